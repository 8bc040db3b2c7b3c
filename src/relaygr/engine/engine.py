"""The engine: one instance that pre-infers, keeps, extends, moves and consumes prefixes."""

import asyncio
import math
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Final, Self

from relaygr.cache import Lineage, Tier
from relaygr.clock import Clock, RealClock
from relaygr.config import EngineConfig
from relaygr.engine.cost import CostModel
from relaygr.engine.guard import FAILED
from relaygr.engine.limits import max_history, reserve_pages
from relaygr.engine.loop import EngineLoop
from relaygr.engine.outcomes import Decision, PreInferOutcome, Ranked
from relaygr.engine.profile import profile
from relaygr.engine.status import EngineCounts, EngineStatus
from relaygr.engine.step import Executor, Model, Progress, Served, no_progress
from relaygr.engine.torch_executor import TorchExecutor
from relaygr.engine.waiting import until_done
from relaygr.engine.work import PreInfer, Rank
from relaygr.errors import DeadlineExceeded, InvalidInput, Overloaded, Unavailable
from relaygr.history import History, KnownHistory
from relaygr.shown import shown

__all__ = ["Engine"]

TRUNCATE_AT: Final = 0.75
"""The share of a rank's time after which, under on_miss="truncate", it stops waiting for its prefix."""
_END_OF_TIME: Final = 1e12
UNHURRIED_S: Final = 1.0
"""How urgent a rank is at the least, whatever its deadline: as if it were due this long after it came."""


class Engine:
    """Serves one model on one device. An async context manager; all calls from one event loop.

        async with Engine(model, EngineConfig()) as engine:
            await engine.pre_infer(user, history)
            ranked = await engine.rank(user, history, candidates)

    Scores do not depend on what is cached: a cache failure is a miss. The model must not change while it is served.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        clock: Clock | None = None,
        executor: Executor | None = None,
        progress: Progress = no_progress,
    ) -> None:
        """`clock` and `executor` are seams for tests and simulation; the defaults are real.

        `progress` hears how far the device has been prepared.
        """
        self.config = config or EngineConfig()
        self.clock: Clock = clock or RealClock()
        self._model = model
        self._executor: Executor = executor or TorchExecutor(progress)
        self._loop: EngineLoop | None = None
        self._max_history = 0
        self._page_bytes = 0
        self._swapping: asyncio.Lock
        """The model asked for last is served last."""
        self._preparing: asyncio.Task[Served] | None = None
        """Goes on when its caller is cancelled: a device that prepares a model cannot be stopped, only waited for."""

    async def __aenter__(self) -> Self:
        """Allocate the tiers and measure what work costs. Raises InvalidInput if the config cannot be."""
        if self._loop is not None:
            raise RuntimeError("the engine is open already")
        self._swapping = asyncio.Lock()
        capacity = self._executor.open(self._model, self.config)
        try:
            self._max_history = max_history(self.config, capacity)
            self._page_bytes = capacity.page_bytes
            served = await self._prepare(self._model)
            device, host = Tier(capacity.device), Tier(self._executor.host_pages)
            cost = CostModel()
            await profile(self._executor, served, device, host, cost, self._max_history)
        except BaseException:
            await self._close_executor()
            raise
        self._loop = EngineLoop(
            self.config, self._executor, self.clock, served, device, host, cost, reserve_pages(self._max_history)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Refuse what waits, let what was launched end, and check that no page is lost.

        Raises RuntimeError if one is, or if the engine has failed.
        """
        loop, self._loop = self._loop, None
        if loop is not None:
            try:
                await loop.close()
            finally:
                await self._close_executor()

    async def pre_infer(
        self, user: str, history: History | KnownHistory, *, context: Any = None, deadline: float | None = None
    ) -> PreInferOutcome:
        """Make the prefix of this history resident, and keep it for the rank that follows.

        Returns when it is there, or at once with the reason it was refused. `deadline` is when the rank is expected:
        it orders the work until that comes; if ψ is not there by then the answer is FAILED while the work goes on until
        the lease ends.
        """
        return await self._begin_pre_infer(user, history, context, deadline).future

    def signal(
        self, user: str, history: History | KnownHistory, *, context: Any = None, deadline: float | None = None
    ) -> Decision:
        """Like `pre_infer`, but answers at once what was decided and never waits for ψ.

        A prefix that extends one being made is decided about when that one is there: until then the answer is ADMIT.
        Raises HistoryNeeded for a history given by its digest whose prefix is neither here nor being made.
        """
        future = self._begin_pre_infer(user, history, context, deadline).future
        if not future.done():
            return Decision.ADMIT
        outcome = future.result()
        return Decision(outcome.value) if outcome.value in Decision.__members__ else Decision.ADMIT

    def _begin_pre_infer(
        self, user: str, history: History | KnownHistory, context: Any, deadline: float | None
    ) -> PreInfer:
        loop = self._open_loop()
        served = loop.served
        self._check_user(user)
        history = self._check_history(served, history)
        ids = served.model.check_context(context)
        now = self.clock.now()
        due = self._check_deadline(deadline, now)
        call = PreInfer(
            served=served,
            user=user,
            history=history,
            context=ids,
            lineage=Lineage.of(served.version, served.epoch, ids, history),
            deadline=due if deadline is not None else now + self.config.lease_s,
            future=asyncio.get_running_loop().create_future(),
        )
        loop.pre_infer(call)
        if not call.over:
            timer = asyncio.get_running_loop().call_later(call.deadline - now, loop.pre_infers.expire, call)
            call.future.add_done_callback(lambda _: timer.cancel())
        return call

    async def rank(
        self,
        user: str,
        history: History | KnownHistory,
        candidates: Any,
        *,
        context: Any = None,
        request: Any = None,
        deadline: float | None = None,
    ) -> Ranked:
        """Score the candidates on all of this history, by the cheapest way that is in time.

        `deadline` is absolute on `engine.clock`; past it DeadlineExceeded is raised, and Overloaded at once where what
        waits for the device would make this one late. `history` is all of it, each time;
        a KnownHistory stands for one whose prefix is likely cached, and raises HistoryNeeded where it is not.
        """
        return await self.begin_rank(user, history, candidates, context=context, request=request, deadline=deadline)

    def begin_rank(
        self,
        user: str,
        history: History | KnownHistory,
        candidates: Any,
        *,
        context: Any = None,
        request: Any = None,
        deadline: float | None = None,
    ) -> "asyncio.Future[Ranked]":
        """Like `rank`, for callers without a task: what it will answer. Cancelling that gives up the rank, and with it
        whatever nobody else wants. Bad input is raised at once."""
        now = self.clock.now()
        loop = self._open_loop()
        served = loop.served
        self._check_user(user)
        history = self._check_history(served, history)
        checked = served.model.check_candidates(candidates)
        features = served.model.check_request(request)
        ids = served.model.check_context(context)
        due = self._check_deadline(deadline, now)
        if len(loop.ranks) >= self.config.max_ranks:
            raise Overloaded(f"{len(loop.ranks)} ranks are under way, max_ranks allows no more")
        events = asyncio.get_running_loop()
        rank = Rank(
            served=served,
            user=user,
            history=history,
            context=ids,
            lineage=Lineage.of(served.version, served.epoch, ids, history),
            candidates=checked,
            request=features,
            deadline=math.inf if deadline is None else due,
            due=min(due, now + UNHURRIED_S),
            order=loop.next_order(),
            arrived=now,
            future=events.create_future(),
            keep=self.config.reuse != "none",
        )
        loop.rank(rank)
        if rank.future.done():
            loop.leave(rank)
            return rank.future
        timers = []
        if deadline is not None:
            timers.append(events.call_later(due - now, loop.ranks.expire, rank))
            if self.config.on_miss == "truncate":
                timers.append(events.call_later(TRUNCATE_AT * (due - now), loop.cut, rank))

        def leave(_: "asyncio.Future[Ranked]") -> None:
            for timer in timers:
                timer.cancel()
            loop.leave(rank)

        rank.future.add_done_callback(leave)
        return rank.future

    async def swap_model(self, model: Model) -> None:
        """Serve this model from now on. Cached prefixes of the old one become misses; what runs finishes on the old.

        Raises InvalidInput for a model whose pages have another shape, or whose tables changed while its epoch did not;
        Unavailable if the engine is closed meanwhile. One that is cancelled changes nothing.
        """
        self._open_loop()
        async with self._swapping:
            await self._prepared()
            self._open_loop()
            served = await self._prepare(model)
            self._open_loop().serve(served)

    async def _prepare(self, model: Model) -> Served:
        def over(_: "asyncio.Task[Served]") -> None:
            self._preparing = None

        self._preparing = preparing = asyncio.create_task(self._executor.prepare(model))
        preparing.add_done_callback(over)
        return await asyncio.shield(preparing)

    async def _close_executor(self) -> None:
        """Not while it prepares a model, whoever is cancelled meanwhile."""
        cancelled = None if self._preparing is None else await until_done(self._preparing)
        self._executor.close()
        if cancelled is not None:
            raise cancelled

    async def _prepared(self) -> None:
        """No model is being prepared any more, though whoever asked for it may have gone."""
        if self._preparing is not None:
            await asyncio.wait((self._preparing,))

    async def evict(self, user: str) -> int:
        """Forget everything of this user in both tiers and in flight. Returns how many prefixes were dropped."""
        loop = self._open_loop()
        self._check_user(user)
        return loop.evict(user)

    def learn_visits(self, visits: Iterable[tuple[str, float]]) -> None:
        """Take these for all that is known of users' visits, each with its time on `engine.clock`, in order.

        What is kept for whom follows from that. For an engine that takes over from another.
        """
        self._open_loop().visits.learn(visits)

    def status(self) -> EngineStatus:
        """What the engine holds and has done. Raises Unavailable when it is not open."""
        loop = self._open_loop()
        tier, host = loop.tier, loop.host
        return EngineStatus(
            version=loop.served.version,
            epoch=loop.served.epoch,
            actions=loop.served.model.config.actions,
            max_history=self._max_history,
            page_bytes=self._page_bytes,
            device_pages=tier.pool.total,
            device_pages_free=tier.pool.free,
            device_pages_pinned=tier.pool.pinned,
            device_prefixes=len(tier),
            device_evictions=tier.evictions,
            device_shortened=tier.shortened,
            host_pages=host.pool.total,
            host_pages_free=host.pool.free,
            host_pages_pinned=host.pool.pinned,
            host_prefixes=len(host),
            host_evictions=host.evictions,
            host_shortened=host.shortened,
            leases=len(loop.claims),
            ranks_under_way=len(loop.ranks),
            builds_under_way=sum(1 for _ in loop.builds),
            steps_in_flight=loop.device.steps,
            copies_in_flight=loop.device.copies,
            wait_ms=loop.waits.wait_s() * 1e3,
            device_busy_s=loop.device.busy_s,
            written_back=loop.write_back.written,
            write_back_waiting=len(loop.write_back.queue),
            paths={path.value: count for path, count in loop.ranks.paths.items()},
            resident_left_by_earlier=loop.resident_left_by_earlier,
            outcomes={outcome.value: count for outcome, count in loop.pre_infers.outcomes.items()},
            faults=dict(loop.device.faults),
            prepared=self._executor.facts(),
            cost_model_version=loop.cost.version,
            cost_model_error=loop.cost.error,
            cost_model={"steps": loop.cost.steps.coefficients, "copies": loop.cost.copies.coefficients},
        )

    def counts(self) -> EngineCounts:
        """What the engine has done. Raises Unavailable when it is not open."""
        loop = self._open_loop()
        return EngineCounts(
            pre_infer_busy_s=loop.pre_infer_busy_s,
            sources={source.value: count for source, count in loop.builds.sources.items()},
            reloads=loop.builds.reloads,
            write_back_dropped=loop.write_back.queue.dropped,
        )

    def pulse(self) -> tuple[float, int]:
        """What every reply carries: milliseconds a rank without hurry would wait now, and the cost model's version."""
        loop = self._open_loop()
        return loop.waits.wait_s() * 1e3, loop.cost.version

    async def failed(self) -> None:
        """Wait until the engine fails for a fault of its own: from then on every call raises Unavailable. Close it, and
        open another."""
        await self._loop_there().failed.wait()

    def _open_loop(self) -> EngineLoop:
        loop = self._loop_there()
        if loop.guard.error is not None:
            raise Unavailable(FAILED)
        return loop

    def _loop_there(self) -> EngineLoop:
        if self._loop is None:
            raise Unavailable("the engine is not open: use it in `async with`")
        return self._loop

    @staticmethod
    def _check_user(user: Any) -> None:
        if not isinstance(user, str) or not user:
            raise InvalidInput("user", "must be a non-empty string")

    def _check_history(self, served: Served, history: Any) -> History | KnownHistory:
        checked = history if isinstance(history, KnownHistory) else served.model.check_history(history)
        if len(checked) > self._max_history:
            raise InvalidInput("history", f"has {len(checked)} behaviours; max_history is {self._max_history}")
        return checked

    @staticmethod
    def _check_deadline(deadline: Any, now: float) -> float:
        """When work is due. DeadlineExceeded where that has passed."""
        if deadline is None:
            return now + UNHURRIED_S
        if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not abs(deadline) < _END_OF_TIME:
            raise InvalidInput("deadline", f"must be finite seconds on engine.clock, not {shown(deadline)}")
        if deadline <= now:
            raise DeadlineExceeded(f"the deadline passed {(now - deadline) * 1e3:.1f} ms ago")
        return float(deadline)
