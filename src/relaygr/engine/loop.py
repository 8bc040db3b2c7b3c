"""The loop that joins policies and device: receive, plan, launch, complete.

    rank ──receive──▶ resolve ─┬─ resident ───────────────▶ ready ──plan, launch──▶ step ──complete──▶ scores
                               ├─ in flight: join its build ──▲                       │
                               ├─ reload ──▶ copy ──▶ build ──┤ all tokens launched   │ failed: resolve again
                               ├─ extend, compute ─▶ build ───┘                       ▼
                               └─ no pages yet: starved, holds nothing ◀──── resolve again

Everything here runs on the event loop's thread, so each method is atomic. Steps run in order on the device, so a rank
may be launched as soon as the last chunk of its prefix is; whether that succeeded is known before the rank completes.
"""

import asyncio
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr.cache import Lease, Lineage, Option, Prefix, Source, Tier, WriteBackQueue, choose
from relaygr.cache.write_back import ReturnRate
from relaygr.clock import Clock
from relaygr.config import EngineConfig
from relaygr.engine.admission import Admission, Demand
from relaygr.engine.builds import Builds
from relaygr.engine.claims import Claims
from relaygr.engine.cost import CostModel
from relaygr.engine.outcomes import Decision, Path, PreInferOutcome, Ranked, Timings
from relaygr.engine.scheduler import Plan, Scheduler
from relaygr.engine.step import Executor, PageCopy, Served, Step, StepResult
from relaygr.engine.work import Build, BuildState, PreInfer, Rank
from relaygr.engine.write_back import WriteBack
from relaygr.errors import DeadlineExceeded, Unavailable
from relaygr.history import PAGE
from relaygr.model.batch import AppendRow, ScoreRow

__all__ = ["EngineLoop"]

MAX_ATTEMPTS: Final = 8
"""How often a rank is tried on a device that fails before it is told so."""
SAFETY: Final = 0.8
"""The share of the time left that a truncated rank is cut to fit."""

_OUTCOMES: Final = {
    Path.FULL: PreInferOutcome.COMPUTED,
    Path.EXTENDED: PreInferOutcome.EXTENDED,
    Path.RELOADED: PreInferOutcome.RELOADED,
}


class EngineLoop:
    """State and transitions of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Clock,
        served: Served,
        device: Tier,
        host: Tier,
        cost: CostModel,
        reserve_pages: int,
    ) -> None:
        self.served = served
        self.device = device
        self.host = host
        self.cost = cost
        self.paths: Counter[Path] = Counter()
        self.outcomes: Counter[PreInferOutcome] = Counter()
        self.faults: Counter[str] = Counter()
        self.resident_left_by_earlier = 0
        self.busy_s = 0.0
        self.builds = Builds(device, host, cost, self._copy, self._build_ended, config.accept_epochs)
        self.claims = Claims(device.pool, config.lease_s, self._claim_ended)
        self.write_back = WriteBack(device, host, WriteBackQueue(config.write_back_queue), self._copy)
        self._config = config
        self._executor = executor
        self._clock = clock
        self._events = asyncio.get_running_loop()
        self._scheduler = Scheduler(cost, config.step_ms / 1e3)
        self._admission = Admission(device.pool.total, reserve_pages, config.lease_share, config.pre_infer_share)
        self._returns = ReturnRate()
        self._orders = itertools.count()
        self._ranks: dict[Rank, None] = {}
        """All ranks under way."""
        self._ready: dict[Rank, None] = {}
        """Those to score: their prefixes are there, or will be by the time the step reaches them."""
        self._starved: dict[Rank, None] = {}
        """Those that wait for pages."""
        self._steps: deque[float] = deque()
        """Predicted seconds of each step in flight."""
        self._copies = 0
        self._turn_set = False
        self._closing = False
        self._idle = asyncio.Event()

    # ---- receive -----------------------------------------------------------------------------------------------

    def next_order(self) -> int:
        """Ties between equal deadlines go to whoever came first."""
        return next(self._orders)

    @property
    def under_way(self) -> int:
        """Ranks taken and not answered."""
        return len(self._ranks)

    @property
    def in_flight(self) -> tuple[int, int]:
        """Steps and copies launched and not completed."""
        return len(self._steps), self._copies

    def wait_s(self, due: float = math.inf) -> float:
        """How long work due then would wait for the device: what is in flight, and all that is due before it."""
        wait = sum(self._steps)
        wait += sum(build.cost_s for build in self.builds if build.due <= due)
        return wait + sum(rank.cost_s for rank in self._ready if rank.due <= due)

    def rank(self, rank: Rank) -> None:
        """Take a rank. Its future is answered when it is scored or its deadline comes; `leave` must follow."""
        self._ranks[rank] = None
        self._returns.visit(rank.user)
        self._resolve(rank)
        self._turn_soon()

    def leave(self, rank: Rank) -> None:
        """The caller has its answer, or has gone: what only this rank wanted is given up."""
        rank.future.cancel()
        self._ranks.pop(rank, None)
        if rank.launched is None:
            self._let_go(rank)
        self.claims.end_oldest(rank.user)
        self._turn_soon()

    def expire(self, rank: Rank) -> None:
        """The rank's deadline is here."""
        if not rank.over:
            rank.future.set_exception(DeadlineExceeded(f"the rank of {rank.user!r} was not done by its deadline"))
            self._ready.pop(rank, None)

    def cut(self, rank: Rank) -> None:
        """Most of the rank's time has passed. If its prefix is not there yet, stop waiting and truncate."""
        if not rank.over and rank.launched is None and rank not in self._ready and rank.path is not Path.TRUNCATED:
            self._truncate(rank)
            self._turn_soon()

    def pre_infer(self, call: PreInfer) -> None:
        """Decide about a pre-infer, and begin it if admitted. A refusal reserves nothing."""
        if call.over:
            return
        option, joined = self._option(call, call.deadline, call.deadline)
        if joined is not None and joined.prefix.length < len(call.history):
            joined.waiting.append(call)
            return
        if joined is not None:
            pages, need = joined.prefix.pages, 0
        elif option.source is Source.RESIDENT:
            pages = self._resident(call).pages
            need = self.device.pool.unpinned(pages)
        else:
            shared, copied, new = self.builds.pages_for(call.user, call.lineage, len(call.history), option)
            need = new + self.device.pool.unpinned(np.concatenate((shared, copied)))
        if not self._admit(call, option.device_s if joined is None else 0.0, need):
            return
        build, outcome = joined, PreInferOutcome.JOINED
        if option.source is Source.RESIDENT:
            self.device.touch(call.user)
            outcome = PreInferOutcome.RESIDENT
        elif joined is None:
            build = self.builds.start(call, option, call.deadline, self.next_order(), keep=True)
            assert build is not None, "admission has counted the pages"
            pages, outcome = build.prefix.pages, _OUTCOMES[build.made]
        self.claims.add(call.user, call.lineage, pages, build, self._clock.now())
        if build is None or build.ended:
            self._answer(call, outcome)
        else:
            build.due = min(build.due, call.deadline)
            build.calls.append((call, outcome))
        self._turn_soon()

    def give_up(self, call: PreInfer) -> None:
        """The pre-infer's deadline is here, or its caller has gone: the work goes on until the lease ends."""
        self._answer(call, PreInferOutcome.FAILED)

    def _admit(self, call: PreInfer, cost_s: float, pages: int) -> bool:
        horizon = call.deadline - self._clock.now()
        decision = self._admission.decide(
            Demand(pages, self.device.pool.pinned, cost_s, self.builds.pre_infer_s(), horizon)
        )
        if decision is Decision.ADMIT:
            return True
        self._answer(call, PreInferOutcome(decision.value))
        return False

    def _answer(self, call: PreInfer, outcome: PreInferOutcome) -> None:
        if not call.over:
            self.outcomes[outcome] += 1
            call.future.set_result(outcome)

    def evict(self, user: str) -> int:
        """Forget everything of this user: both tiers, leases, and what is in flight, which is not kept when it ends.

        Ranks under way still answer. Returns how many prefixes were dropped.
        """
        self._returns.forget(user)
        self.write_back.forget(user)
        for build in self.builds.of(user):
            self.builds.unlist(build)
        self.claims.end_where(lambda _: True, user)
        return int(self.device.drop(user)) + int(self.host.drop(user))

    def serve(self, served: Served) -> None:
        """From now on this model. Prefixes it cannot use are dropped; what runs finishes on the model it began with."""
        self.served = served
        for build in list(self.builds):
            if not self._usable(build.prefix):
                self.builds.unlist(build)
        self.write_back.forget_all()
        self.claims.end_where(lambda claim: not claim.lineage.serves(self._wanted(claim.lineage), self._accept))
        for tier in (self.device, self.host):
            tier.drop_where(lambda prefix: not self._usable(prefix))

    async def close(self) -> None:
        """Refuse what waits, let what was launched end, forget everything. Raises RuntimeError if a page is lost."""
        self._closing = True
        for rank in list(self._ranks):
            if not rank.over:
                rank.future.set_exception(Unavailable("the engine is closing"))
            self.leave(rank)
        self.claims.end_where(lambda _: True)
        self.write_back.forget_all()
        for build in list(self.builds):
            for call in [call for call, _ in build.calls] + [
                work for work in build.waiting if isinstance(work, PreInfer)
            ]:
                self._answer(call, PreInferOutcome.FAILED)
            self.builds.abandon_if_unwanted(build)
        while self._steps or self._copies:
            self._idle.clear()
            await self._idle.wait()
        for tier in (self.device, self.host):
            tier.drop_where(lambda _: True)
            tier.pool.check()
            if tier.pool.free != tier.pool.total:
                raise RuntimeError(f"{tier.pool.total - tier.pool.free} pages are still owned after close")

    # ---- plan --------------------------------------------------------------------------------------------------

    def _turn_soon(self) -> None:
        if not self._turn_set:
            self._turn_set = True
            self._events.call_soon(self._turn)

    def _turn(self) -> None:
        """One turn: give pages to those who wait for them, then launch while the device wants more."""
        self._turn_set = False
        if self._closing:
            return
        for rank in sorted(self._starved, key=lambda rank: (rank.due, rank.order)):
            del self._starved[rank]
            self._resolve(rank)
            if rank in self._starved:
                break  # the most urgent goes first: no later one takes the pages it waits for
        while len(self._steps) < self._executor.depth:
            plan = self._scheduler.plan(self.builds.runnable(), self._ready)
            if plan is None:
                break
            self._launch(plan)
        self.write_back.turn()

    @property
    def _accept(self) -> int:
        return self._config.accept_epochs

    def _wanted(self, lineage: Lineage) -> Lineage:
        """The lineage as the model served now would make it."""
        return lineage._replace(version=self.served.version, epoch=self.served.epoch)

    def _usable(self, prefix: Prefix) -> bool:
        """Whether the model served now could use this prefix."""
        return prefix.lineage.serves(self._wanted(prefix.lineage), self._accept)

    def _resident(self, work: Rank | PreInfer) -> Prefix:
        """What the device tier holds of exactly this work's history."""
        prefix = self.device.find(work.user)
        assert prefix is not None
        return prefix.first(len(work.history))

    def _agreeing(self, tier: Tier, work: Rank | PreInfer) -> int:
        """Behaviours of this history that the tier holds the KV of; -1 where it has nothing of this lineage."""
        prefix = tier.find(work.user)
        if prefix is None or not prefix.lineage.serves(work.lineage, self._accept):
            return -1
        return prefix.agrees(work.history)

    def _option(self, work: Rank | PreInfer, due: float, needed: float) -> tuple[Option, Build | None]:
        """How to get the prefix this work needs, and the build to join where that is the way."""
        now, n, context = self._clock.now(), len(work.history), work.lineage.context_tokens
        resident = self._agreeing(self.device, work)
        if resident == n:
            return Option(Source.RESIDENT, n, now, 0.0), None
        wait = self.wait_s(due)

        def append_s(base: int) -> float:
            """Device time to append what is missing behind `base` behaviours, or everything."""
            held = context + base if base > 0 else 0
            return self.cost.append_s(context + n - held, held)

        options = [Option(Source.NOTHING, 0, now + wait + append_s(0), append_s(0))]
        if resident > 0:
            options.append(Option(Source.DEVICE, resident, now + wait + append_s(resident), append_s(resident)))
        on_host = self._agreeing(self.host, work)
        if on_host > max(resident, 0):
            rest = append_s(on_host)
            copy = self.cost.copy_s(-(-(context + on_host) // PAGE)) * (1 + self._copies)
            options.append(Option(Source.HOST, on_host, now + (max(wait, copy) + rest if rest else copy), rest))
        joined = self.builds.joinable(work.user, work.lineage, work.history)
        if joined is not None and joined.prefix.length > resident:
            rest = append_s(joined.prefix.length) if joined.prefix.length else append_s(0)
            behind = joined.cost_s if joined.due > due else 0.0
            options.append(Option(Source.IN_FLIGHT, joined.prefix.length, now + wait + behind + rest, rest))
        option = choose(options, needed)
        return option, joined if option.source is Source.IN_FLIGHT else None

    def _resolve(self, rank: Rank) -> None:
        """Find this rank its prefix: there, joined, begun, or waiting for pages."""
        if rank.over:
            return
        rank.cost_s = self.cost.score_s(len(rank.candidates), rank.lineage.context_tokens + len(rank.history))
        needed = rank.deadline - rank.cost_s - self.cost.step_s
        option, joined = self._option(rank, rank.due, needed)
        if self._config.on_miss == "truncate" and option.ready > needed:
            self._truncate(rank)
        elif option.source is Source.RESIDENT:
            self.device.touch(rank.user)
            self._attach(rank, self._resident(rank), None)
            self._ready[rank] = None
        elif joined is None:
            self._begin(rank, option)
        else:
            rank.path = rank.path.costlier(Path.WAITED)
            joined.due = min(joined.due, rank.due)
            if joined.prefix.length == len(rank.history):
                self._join(rank, joined)
            else:
                rank.build = joined
                joined.waiting.append(rank)

    def _begin(self, rank: Rank, option: Option) -> None:
        """Build the rank's prefix in the way the option says, or wait for pages."""
        keep = rank.path is not Path.TRUNCATED
        build = self.builds.start(rank, option, rank.due, self.next_order(), keep=keep)
        if build is None:
            self._starved[rank] = None
        else:
            rank.path = rank.path.costlier(build.made)
            self._join(rank, build)

    def _truncate(self, rank: Rank) -> None:
        """Rank on the newest behaviours that fit into the time left."""
        self._let_go(rank)
        left = SAFETY * (rank.deadline - self._clock.now() - sum(self._steps)) - self.cost.step_s
        context, candidates = rank.lineage.context_tokens, len(rank.candidates)

        def cost_s(length: int) -> float:
            return self.cost.append_s(context + length, 0) + self.cost.score_s(candidates, context + length)

        low, high = 0, len(rank.history)
        while low < high:  # the longest cut that fits
            middle = (low + high + 1) // 2
            low, high = (middle, high) if cost_s(middle) <= left else (low, middle - 1)
        rank.path = Path.TRUNCATED
        rank.history = rank.history[len(rank.history) - low :]
        rank.lineage = rank.lineage._replace(start=rank.history.start)
        rank.cost_s = self.cost.score_s(candidates, context + low)
        self._begin(rank, Option(Source.NOTHING, 0, self._clock.now(), cost_s(low)))

    def _attach(self, rank: Rank, prefix: Prefix, build: Build | None) -> None:
        """This is what the rank scores on: pin it."""
        rank.prefix, rank.build = prefix, build
        rank.lease = Lease(self.device.pool, rank.user, prefix.pages, math.inf)

    def _join(self, rank: Rank, build: Build) -> None:
        """The rank scores on exactly what this build makes."""
        self._attach(rank, build.prefix, build)
        build.ranks.append(rank)
        if build.all_launched:
            self._ready[rank] = None

    def _let_go(self, rank: Rank) -> None:
        """Undo `_attach`, and take the rank from every list it waits in."""
        self._ready.pop(rank, None)
        self._starved.pop(rank, None)
        if rank.lease is not None:
            rank.lease.release()
        build, rank.prefix, rank.lease, rank.build = rank.build, None, None, None
        if build is not None:
            if rank in build.ranks:
                build.ranks.remove(rank)
            if rank in build.waiting:
                build.waiting.remove(rank)
            self.builds.abandon_if_unwanted(build)

    # ---- launch ------------------------------------------------------------------------------------------------

    def _launch(self, plan: Plan) -> None:
        now = self._clock.now()
        appends, copies = [], []
        for build, low, high in plan.appends:
            appends.append(AppendRow(build.history, build.context, low, high, build.prefix.pages))
            if build.page_copy is not None:
                copies.append(build.page_copy)
            self.builds.launched(build, high)
            if build.all_launched:
                self._ready.update((rank, None) for rank in build.ranks if not rank.over)
        scores = []
        for rank in plan.scores:
            assert rank.prefix is not None
            del self._ready[rank]
            rank.launched = now
            prefix = rank.prefix
            scores.append(ScoreRow(rank.candidates, rank.request, prefix.length, prefix.tokens, prefix.pages))
        served = plan.appends[0][0].served if plan.appends else plan.scores[0].served
        self._steps.append(plan.cost_s)
        try:
            future = self._executor.launch(Step(served, appends, scores, copies))
        except Exception as error:  # a device that does not even take the work
            future = self._events.create_future()
            future.set_exception(error)
        future.add_done_callback(lambda done: self._step_done(plan, done))

    def _copy(self, copy: PageCopy, done: Callable[[BaseException | None], None]) -> None:
        self._copies += 1
        try:
            future = self._executor.copy(copy)
        except Exception as error:
            future = self._events.create_future()
            future.set_exception(error)

        def finished(future: "asyncio.Future[float]") -> None:
            self._copies -= 1
            error = _error_of(future)
            if error is None:
                self.cost.copies.observe((1.0, float(len(copy.source))), future.result())
            else:
                self.faults[f"copy {copy.direction}"] += 1
            done(error)
            self._turn_soon()
            self._idle.set()

        future.add_done_callback(finished)

    # ---- complete ----------------------------------------------------------------------------------------------

    def _step_done(self, plan: Plan, future: "asyncio.Future[StepResult]") -> None:
        self._steps.popleft()
        error = _error_of(future)
        if error is None:
            result = future.result()
            self.busy_s += result.seconds
            self.cost.steps.observe(_features(plan), result.seconds)
        else:
            self.faults["step"] += 1
        for build, _, high in plan.appends:
            self.builds.ran(build, high, error)
        for index, rank in enumerate(plan.scores):
            if rank.over:
                self._let_go(rank)
            elif error is not None or (rank.build is not None and rank.build.state is not BuildState.DONE):
                self._again(rank)
            else:
                self._scored(rank, result.scores[index], result.seconds)
        self._turn_soon()
        self._idle.set()

    def _scored(self, rank: Rank, scores: npt.NDArray[np.float32], seconds: float) -> None:
        assert rank.prefix is not None
        assert rank.launched is not None
        self.paths[rank.path] += 1
        claim = self.claims.oldest(rank.user)
        if rank.path is Path.RESIDENT and (claim is None or claim.build is None):
            self.resident_left_by_earlier += 1
        total = self._clock.now() - rank.arrived
        timings = Timings(total * 1e3, (rank.launched - rank.arrived) * 1e3, seconds * 1e3)
        rank.future.set_result(Ranked(scores, rank.path, rank.prefix.length, rank.prefix.lineage.epoch, timings))
        self._let_go(rank)

    def _build_ended(self, build: Build) -> None:
        """A build is done, has failed, or was abandoned: tell those who waited for it."""
        done = build.state is BuildState.DONE
        if done and build.keep and self._usable(build.prefix):
            self._keep(build.prefix)
        for call, outcome in build.calls:
            self._answer(call, outcome if done else PreInferOutcome.FAILED)
        for rank in list(build.ranks):
            if done and not rank.over and rank.launched is None:
                self._ready[rank] = None
            elif not done and rank.launched is None:
                self._again(rank)
        waiting, build.waiting = build.waiting, []
        for work in waiting:
            if isinstance(work, PreInfer):
                self.pre_infer(work)
            else:
                work.build = None
                self._resolve(work)
        if not done:
            self.claims.end_where(lambda claim: claim.build is build, build.prefix.user)
        self._turn_soon()

    def _keep(self, new: Prefix) -> None:
        """Put the prefix into the device tier, unless a longer one of the same history is there."""
        old = self.device.find(new.user)
        longer = old is not None and old.lineage == new.lineage and old.length > new.length
        if old is not None and longer and old.shares(new) == new.length // PAGE * PAGE:
            return
        self.device.install(new)
        if self.host.pool.total:
            saved = self.cost.append_s(new.tokens, 0) - self.cost.copy_s(0)
            self.write_back.queue.offer(new, return_rate=self._returns.expected(new.user), saves_s=saved)

    def _claim_ended(self, build: Build | None) -> None:
        if build is not None:
            self.builds.abandon_if_unwanted(build)
        self._turn_soon()

    def _again(self, rank: Rank) -> None:
        """Something this rank relied on failed: a miss. Resolve it anew."""
        rank.launched = None
        self._let_go(rank)
        if rank.over:
            return
        rank.attempts += 1
        if rank.attempts >= MAX_ATTEMPTS:
            rank.future.set_exception(Unavailable(f"the device failed {rank.attempts} times"))
        elif rank.path is Path.TRUNCATED:
            self._begin(rank, Option(Source.NOTHING, 0, self._clock.now(), 0.0))
        else:
            self._resolve(rank)


def _error_of(future: "asyncio.Future[StepResult] | asyncio.Future[float]") -> BaseException | None:
    return asyncio.CancelledError() if future.cancelled() else future.exception()


def _features(plan: Plan) -> tuple[float, ...]:
    return CostModel.features(
        [(high - low, low) for _, low, high in plan.appends],
        [(len(rank.candidates), rank.prefix.tokens if rank.prefix else 0) for rank in plan.scores],
    )
