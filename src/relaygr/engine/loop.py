"""The loop that joins policies and device: receive, plan, launch, complete.

Everything here runs on the event loop's thread, so each method is atomic. Steps run in order on the device, so a rank
may be launched as soon as the last chunk of its prefix is; whether that succeeded is known before the rank completes.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import math

import numpy as np

from relaygr.cache import Lineage, Option, Prefix, Source, Tier, WriteBackQueue
from relaygr.clock import Clock
from relaygr.config import EngineConfig
from relaygr.engine.admission import Admission, Backlog
from relaygr.engine.builds import Builds
from relaygr.engine.claims import Claims
from relaygr.engine.cost import CostModel
from relaygr.engine.device import Device
from relaygr.engine.guard import FAILED, Guard
from relaygr.engine.options import Options
from relaygr.engine.outcomes import Path, PreInferOutcome
from relaygr.engine.pre_infers import PreInfers
from relaygr.engine.ranks import Ranks
from relaygr.engine.scheduler import Plan, Scheduler
from relaygr.engine.step import Executor, PageSpoiled, Served, Step, StepResult
from relaygr.engine.turns import Turns
from relaygr.engine.visits import Visits
from relaygr.engine.work import Build, BuildState, PreInfer, Rank
from relaygr.engine.write_back import WriteBack
from relaygr.errors import Unavailable
from relaygr.history import PAGE, KnownHistory
from relaygr.model.batch import AppendRow

__all__ = ["EngineLoop"]

_log = logging.getLogger(__name__)


class EngineLoop:
    """State and transitions of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Clock,
        served: Served,
        tier: Tier,
        host: Tier,
        cost: CostModel,
        reserve_pages: int,
    ) -> None:
        self.served = served
        self.tier = tier
        self.host = host
        self.cost = cost
        self.resident_left_by_earlier = 0
        self.pre_infer_busy_s = 0.0
        """Of the device's busy seconds: those of pre-inference."""
        self.failed = asyncio.Event()
        self.guard = guard = Guard(self._fail)
        self.leave = guard.callback(self._leave)
        """The rank has ended for its caller, and with it the lease that was kept for it.

        One whose caller is asked for the behaviours goes on with the next call: the lease is for that one.
        """
        self.cut = guard.callback(self._cut)
        """Most of the rank's time has passed; see `Ranks.cut`."""
        orders = itertools.count()
        self._turns = Turns(guard.callback(self._turn), clock)
        self.device = Device(executor, cost, clock, self._turns.soon, guard)
        arriving = guard.callback(self._whole)
        self.builds = Builds(
            tier, host, cost, self.device.copy, self._build_ended, arriving, config.accept_epochs, orders
        )
        step_s = config.step_ms / 1e3
        self.ranks = Ranks(
            tier, self.builds, cost, clock, self._choose, self._give_up_build, self.device, step_s, config.on_miss
        )
        self.waits = self.ranks.waits
        self.claims = Claims(tier.pool, config.lease_s, self._claim_ended, guard)
        queue = WriteBackQueue(config.write_back_queue)
        extend = config.reuse == "extend"
        # Tables that are accepted though they are behind go for whole prefixes: a head is computed by those of today.
        self.visits = Visits((tier, host), cost, clock, in_parts=extend and not config.accept_epochs)
        self.write_back = WriteBack(tier, host, queue, self.device.copy, self.visits.last)
        self._accept_epochs = config.accept_epochs
        self._options = Options(tier, host, cost, clock, config.accept_epochs, extend=extend)
        self._scheduler = Scheduler(cost, step_s)
        leased = 0.0 if config.reuse == "none" else config.lease_share
        admission = Admission(tier.pool.total, reserve_pages, leased, config.pre_infer_share)
        backlog = Backlog(config.pre_infer_share)
        self.pre_infers = PreInfers(
            tier, self.builds, self.claims, admission, backlog, self._choose, clock, self._turns.soon
        )
        tier.other, host.other = host, tier
        self._executor = executor
        self._clock = clock
        self._orders = orders
        self._appended = True
        """Whether the last step appended anything."""
        self._closing = False

    # ---- receive

    def next_order(self) -> int:
        """Ties between equal deadlines go to whoever came first."""
        return next(self._orders)

    def rank(self, rank: Rank) -> None:
        """Take a rank; `leave` must follow."""
        with self.guard:
            if not isinstance(rank.history, KnownHistory):  # by its digest it may be asked for again: see `leave`
                self.visits.add(rank.user, rank.arrived)
            self.ranks.take(rank)
            self._turns.soon()

    def _leave(self, rank: Rank) -> None:
        self.ranks.leave(rank)
        if rank.scored and rank.path is Path.RESIDENT:
            claim = self.claims.oldest(rank.user)
            self.resident_left_by_earlier += claim is None or claim.build is None
        if not rank.history_needed:
            if isinstance(rank.history, KnownHistory) and rank.keep:
                self.visits.add(rank.user, self._clock.now())
            self.claims.end_oldest(rank.user)
        self._turns.soon()

    def _cut(self, rank: Rank) -> None:
        self.ranks.cut(rank)
        self._turns.soon()

    def pre_infer(self, call: PreInfer) -> None:
        """Decide about a pre-infer, and begin it if admitted. A refusal reserves nothing."""
        with self.guard:
            self.pre_infers.begin(call)

    def _give_up_build(self, build: Build, keep: bool) -> None:
        """Its time is better spent on others. Nobody waits for it but pre-infers, which are refused after all.

        `keep`: whether what has run of it is kept: its rank goes on from that.
        """
        self.pre_infers.refuse(build)
        prefix = build.prefix
        length = (build.done - prefix.lineage.context_tokens) // PAGE * PAGE
        ran = build.done >= build.base and build.done > (0 if build.head else build.base)  # and of a head all
        if keep and ran and length > 0 and build.keep and self._usable(prefix.lineage):
            self._keep(prefix.first(length))
        self.claims.end_where(lambda claim: claim.build is build, prefix.user)  # and with the last the build

    def evict(self, user: str) -> int:
        """Forget everything of this user: both tiers, leases, and what is in flight, which is not kept when it ends.

        Ranks under way still answer. Returns how many prefixes were dropped.
        """
        with self.guard:
            self.visits.forget(user)
            self.write_back.forget(user)
            self.ranks.forget(user)
            for build in self.builds.of(user):
                self._unlist(build)
            self.claims.end_where(lambda _: True, user)
            return int(self.tier.drop(user)) + int(self.host.drop(user))

    def serve(self, served: Served) -> None:
        """From now on this model. Prefixes it cannot use are dropped; what runs finishes on the model it began with."""
        with self.guard:
            self.served = served
            for build in list(self.builds):
                if not self._usable(build.prefix.lineage):
                    self._unlist(build)
            self.write_back.forget_all()
            self.claims.end_where(lambda claim: not self._usable(claim.lineage))
            for tier in (self.tier, self.host):
                tier.drop_where(lambda prefix: not self._usable(prefix.lineage))

    def _unlist(self, build: Build) -> None:
        """Keep nothing of this build; pre-infers that would have extended it are given up, ranks are not."""
        self.builds.unlist(build)
        self.pre_infers.fail_waiting(build)
        self.builds.abandon_if_unwanted(build)

    def _fail(self, error: Exception) -> None:
        """Answer everybody: what is kept may be wrong, so nothing is done with it any more. See `Guard`."""
        _log.critical("the engine has failed: it answers nobody any more", exc_info=error)
        self._turns.close()
        self.failed.set()
        self.ranks.answer_all(Unavailable(FAILED))
        self.pre_infers.fail_all()

    async def close(self) -> None:
        """Refuse what waits, let what was launched end, forget everything.

        Raises RuntimeError if a page is lost, or if the loop has failed.
        """
        self._closing = True
        self._turns.close()
        if self.guard.error is None:
            with contextlib.suppress(Unavailable), self.guard:  # what fails is told below: nothing is in flight then
                self.ranks.refuse_all()
                self.claims.end_where(lambda _: True)
                self.write_back.forget_all()
                self.pre_infers.fail_all()
                for build in list(self.builds):
                    self.builds.abandon_if_unwanted(build)
        await self.device.drained()
        if self.guard.error is not None:
            raise RuntimeError("the engine has failed") from self.guard.error
        for tier in (self.tier, self.host):
            tier.drop_where(lambda _: True)
            tier.pool.check()
            if tier.pool.free != tier.pool.total:
                raise RuntimeError(f"{tier.pool.total - tier.pool.free} pages are still owned after close")

    # ---- plan

    def _turn(self) -> None:
        """One turn: give pages to those who wait for them, then launch while the device wants more, or when it will."""
        if self._closing:
            return
        if self._executor.host_pages > self.host.pool.total:
            self.host.pool.grow(self._executor.host_pages)
        self.ranks.feed_starved()
        while not (wanted_in_s := self.device.wanted_in_s):
            now, in_flight_s = self._clock.now(), self.device.left_s
            plan = self._scheduler.plan(
                self.builds.runnable(), self.ranks.ready, now, in_flight_s, apart=self._appended
            )
            if plan is None:
                break
            self._appended = bool(plan.appends)
            self._launch(plan)
        if 0 < wanted_in_s < math.inf and (self.ranks.ready or any(self.builds.runnable())):
            self._turns.within(wanted_in_s)  # what is not there yet asks for a turn when it comes
        self.write_back.turn()

    def _choose(self, work: Rank | PreInfer, due: float, needed: float) -> tuple[Option, Build | None]:
        """How to get the prefix this work needs, and the build to join where that is the way."""
        joined = self.builds.joinable(work.user, work.lineage, work.history)
        option = self._options.choose(work, joined, self.waits.wait_s, due, needed, self.device.copies)
        return option, joined if option.source is Source.IN_FLIGHT else None

    def _usable(self, lineage: Lineage) -> bool:
        """Whether the model served now could use a prefix of this lineage."""
        wanted = lineage._replace(version=self.served.version, epoch=self.served.epoch, spread=0)
        return lineage.serves(wanted, self._accept_epochs)

    # ---- launch

    def _launch(self, plan: Plan) -> None:
        appends, copies = [], []
        for build, low, high in plan.appends:
            appends.append(AppendRow(build.history, build.context, low, high, build.prefix.pages))
        for build, high in plan.ends.items():
            if build.page_copy is not None:
                copies.append(build.page_copy)
            self.builds.launched(build, high)
            if build.all_launched:
                self._whole(build)
        scores, reloads = self.ranks.launched(plan.scores)
        features = CostModel.features(
            [(row.high - row.low, row.low) for row in appends],
            [rank.load for rank in plan.scores],
        )
        step = Step(plan.served, appends, scores, copies, reloads)
        self.device.launch(step, plan.cost_s, features, functools.partial(self._step_ended, plan))

    def _whole(self, build: Build) -> None:
        """What its ranks read is there, or will be when a step launched now comes to it."""
        self.ranks.ready.update((rank, None) for rank in build.ranks if not rank.over)
        self._turns.soon()

    # ---- complete

    def _step_ended(self, plan: Plan, result: StepResult | None, error: BaseException | None) -> None:
        """A launched step has ended, in the order of launches; without a result it failed."""
        if result is not None and len(result.scores) != len(plan.scores):
            raise RuntimeError(f"the device has scores of {len(result.scores)} ranks where {len(plan.scores)} were run")
        if isinstance(error, PageSpoiled):
            for user in {build.prefix.user for build, _, _ in plan.appends} | {rank.user for rank in plan.scores}:
                self.tier.drop(user)
                self.host.drop(user)
                self.write_back.forget(user)
        if result is not None and plan.appends:
            self.pre_infer_busy_s += result.seconds * self._pre_infer_part(plan)
        for build, high in plan.ends.items():
            self.builds.ran(build, high, well=result is not None)
        if result is not None:
            self.ranks.scored(plan.scores, result.scores, result.seconds)
        else:
            for rank in plan.scores:
                self.ranks.again(rank)

    def _pre_infer_part(self, plan: Plan) -> float:
        """The share of a step that was pre-inference, by predicted time."""
        if not any(build.pre_infer for build, _, _ in plan.appends):
            return 0.0
        appends = [(build.pre_infer, self.cost.append_s(high - low, low)) for build, low, high in plan.appends]
        whole = sum(cost for _, cost in appends) + sum(rank.cost_s for rank in plan.scores)
        return sum(cost for pre_infer, cost in appends if pre_infer) / whole if whole else 1.0

    def _build_ended(self, build: Build) -> None:
        """A build is done, has failed, or was abandoned: tell those who waited for it."""
        done = build.state is BuildState.DONE
        if done and build.keep and self._usable(build.prefix.lineage):
            self._keep(build.prefix)
        for call, outcome in build.calls:
            self.pre_infers.answer(call, outcome if done else PreInferOutcome.FAILED)
        for rank in list(build.ranks):
            if rank.launched is None and not done:
                self.ranks.again(rank)
            elif rank.launched is None and not rank.over:
                self.ranks.ready[rank] = None
        if not done:
            self.claims.end_where(lambda claim: claim.build is build, build.prefix.user)
        waiting, build.waiting = build.waiting, []
        for work in waiting:
            if isinstance(work, PreInfer):
                self.pre_infers.take(work)
            else:
                work.build = None
                self.ranks.resolve(work)
        self._turns.soon()

    def _keep(self, new: Prefix) -> None:
        """Put the prefix into the device tier, unless a longer one is there whose pages serve this one too; where that
        has lost its head, it gets it back from this one."""
        old = self.tier.find(new.user)
        if old is not None and old.length > new.length and old.includes(new):
            if not old.missing or not new.length:
                return
            if new.tokens >= old.head:
                new = old.on(np.concatenate((new.pages[: old.missing], old.pages)), 0)
        self.tier.install(new, self.visits.last(new.user))
        if self.host.pool.total:
            saved = self.cost.append_s(new.tokens, 0) - self.cost.copy_s(0)
            self.write_back.queue.offer(new, return_rate=self.visits.expected(new.user), saves_s=saved)

    def _claim_ended(self, build: Build | None) -> None:
        if build is not None:
            self.builds.abandon_if_unwanted(build)
        self._turns.soon()
