"""The pipeline: one request through the cascade, with the pre-infer signal sent ahead."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, NamedTuple, Self, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from relaygr.cascade.recent import RecentHistories
from relaygr.cascade.stage import (
    Offload,
    Prepared,
    PreProcessing,
    PreProcessingRequest,
    Ranking,
    RankReply,
    Retrieval,
    RetrievalRequest,
    RiskTest,
    Signal,
    in_thread,
)
from relaygr.clock import Clock, RealClock
from relaygr.engine import Decision, Path
from relaygr.errors import DeadlineExceeded, InvalidInput, RelayError, Unavailable
from relaygr.history import History, HistoryStore, SteppedWindow, StoreCorrupt, StoreError
from relaygr.history.history import index, integers
from relaygr.relay import Shape
from relaygr.shown import shown

__all__ = [
    "Pipeline",
    "PipelineConfig",
    "RecommendRequest",
    "Recommendation",
    "Recommended",
    "StagesMs",
]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_WINDOW: Final = SteppedWindow(cap=8192, step=1024)


@dataclass(frozen=True)
class PipelineConfig:
    """One cascade."""

    pipeline_ms: float = 135.0
    """From a request's arrival to its answer; past it the request fails with DeadlineExceeded."""
    ranking_ms: float = 50.0
    """Of these, for ranking."""
    store_share: float = 0.3
    """The share of pipeline_ms that the store may take where a user's history was read before; past it, that one is
    used, and the answer says so."""
    signal_grace_ms: float = 2.0
    """How long a rank that is ready waits for the reply to its signal, which names the instance to follow. It is taken
    out of the ranking budget; 0: not at all."""
    retrieve: int = 1024
    """Items asked of retrieval; more than the candidates, because some will have been seen."""
    candidates: int = 512
    """The most candidates ranked."""
    window: SteppedWindow = _WINDOW
    """How much of a history is read."""

    def __post_init__(self) -> None:
        for field in ("pipeline_ms", "ranking_ms", "signal_grace_ms", "store_share"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidInput(field, f"must be a number, not {shown(value)}")
            if not 0 <= value < math.inf:
                raise InvalidInput(field, "must be finite and not negative")
        if self.ranking_ms >= self.pipeline_ms:
            raise InvalidInput("ranking_ms", f"must be less than pipeline_ms, {self.pipeline_ms:g}")
        if self.signal_grace_ms >= self.ranking_ms:
            raise InvalidInput("signal_grace_ms", f"must be less than ranking_ms, {self.ranking_ms:g}")
        if self.store_share > 1:
            raise InvalidInput("store_share", f"must be at most 1, not {self.store_share:g}")
        for field in ("retrieve", "candidates"):
            if index(field, getattr(self, field)) < 1:
                raise InvalidInput(field, "must be at least 1")
        if self.retrieve < self.candidates:
            raise InvalidInput("retrieve", f"must be at least candidates, {self.candidates}")
        if not isinstance(self.window, SteppedWindow):
            raise InvalidInput("window", f"must be a SteppedWindow, not {type(self.window).__name__}")

    @property
    def lead_ms(self) -> float:
        """How long after its arrival a request's rank is expected, at the latest: a signal's work is due then."""
        return self.pipeline_ms - self.ranking_ms


@dataclass(frozen=True, eq=False)
class RecommendRequest:
    """What to recommend to this user? An unknown user is one with an empty history."""

    user: str
    k: int = 10
    """The most items wanted."""
    context: npt.NDArray[np.int64] | None = None
    """Slow facts of the user: ids, or None."""

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or index("k", self.k) < 1:
            raise InvalidInput("k", "must be at least 1")
        if self.context is not None:
            object.__setattr__(self, "context", integers("context", self.context, np.int64))


class Recommended(NamedTuple):
    """One item, with its score by the model's first task."""

    item: int
    score: float


class StagesMs(TypedDict):
    """Where a request's time went. The total has the reading of the history, too."""

    retrieval: float
    pre_processing: float
    ranking: float
    """With the wait for the signal's reply."""
    total: float


class Recommendation(NamedTuple):
    """The answer: the best items first, those of equal score as retrieval ordered them."""

    items: tuple[Recommended, ...]
    """Empty where retrieval found nothing that the user has not seen."""
    path: Path | None
    """None where nothing was ranked."""
    decision: Decision
    """Of the signal. UNAVAILABLE: it failed, or its reply came too late to be used."""
    instance: str | None
    """The slot that ranked; None where nothing was ranked."""
    signalled: str | None
    """The slot that the signal's reply named."""
    used: int
    """Behaviours ranked on."""
    epoch: int | None
    """Epoch of the tables ranked with; None where nothing was ranked."""
    engine_ms: float | None
    """Of ranking, what the engine took; None where nothing was ranked."""
    stages_ms: StagesMs
    stale: bool = False
    """Whether the store did not answer, and the history is the one that was read last."""


class Pipeline:
    """Runs requests, any number at once, from one event loop. An async context manager.

        arrival ── history ─┬─ trigger ── signal ─ ─ ─ reply: the slot ─ ─┐
                            └─ retrieval ── pre-processing ───────────────┴─ rank ── answer

    A signal that fails, or whose reply is late, changes nothing about the answer but its `decision`.
    """

    def __init__(
        self,
        store: HistoryStore,
        retrieval: Retrieval,
        pre_processing: PreProcessing,
        ranking: Ranking,
        trigger: RiskTest | None = None,
        config: PipelineConfig | None = None,
        *,
        clock: Clock | None = None,
        wall_time: Callable[[], float] = time.time,
        offload: Offload = in_thread,
        read_here: bool = False,
    ) -> None:
        """Without a trigger every request with a history or a context is signalled. `clock` is the ranking's too;
        it, `wall_time` (seconds since 1970) and `offload` are seams. What is handed in is not closed here.

        `read_here`: histories of users who were here lately are read on the event loop. For a store on this machine,
        which then has them in memory: going to a thread and back takes longer than the read."""
        self.config = config or PipelineConfig()
        self._store = store
        self._retrieval = retrieval
        self._pre_processing = pre_processing
        self._ranking = ranking
        self._trigger = trigger
        self._clock: Clock = clock or RealClock()
        self._wall_time = wall_time
        self._offload = offload
        self._read_here = read_here
        self._store_ms = self.config.store_share * self.config.pipeline_ms
        self._store_limit = f"{self._store_ms:g} ms of the store"
        self._pipeline_limit = f"pipeline budget of {self.config.pipeline_ms:g} ms"
        self._ranking_limit = f"ranking budget of {self.config.ranking_ms:g} ms"
        self._recent = RecentHistories()
        self._signals: set[asyncio.Task[Signal]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Refuse further requests and end what signals are still out. Requests under way are their callers'."""
        self._closed = True
        for signal in self._signals:
            signal.cancel()
        await asyncio.gather(*self._signals, return_exceptions=True)

    async def run(self, request: RecommendRequest, /) -> Recommendation:
        """Answer one request. Raises errors of `relaygr.errors`: DeadlineExceeded where a budget passed, and whatever
        the store, retrieval, pre-processing or ranking raise of them."""
        if self._closed:
            raise Unavailable("the pipeline is closed")
        budgets, watch = self.config, _Stopwatch(self._clock)
        end = _Limit(watch.arrived + budgets.pipeline_ms / 1e3, self._pipeline_limit)
        at = self._wall_time()

        history, stale = await self._history(request.user, watch.arrived, end)
        sent = self._send_signal(request, history, due=watch.arrived + budgets.lead_ms / 1e3)
        try:
            await asyncio.sleep(0)  # the signal is on its way before anything else is begun
            watch.lap()

            wanted = RetrievalRequest(request.user, history, budgets.retrieve)
            retrieved = await self._by(end, "retrieval", lambda: self._retrieval.run(wanted))
            retrieval_ms = watch.lap()

            found = PreProcessingRequest(history, retrieved, budgets.candidates, at)
            prepared = await self._by(end, "pre-processing", lambda: self._pre_processing.run(found))
            pre_processing_ms = watch.lap()

            signal, reply = await self._rank(request, history, prepared, sent, end)
            ranking_ms = watch.lap()
        finally:
            sent.cancel()

        stages: StagesMs = {
            "retrieval": retrieval_ms,
            "pre_processing": pre_processing_ms,
            "ranking": ranking_ms,
            "total": watch.total(),
        }
        if reply is None or prepared.candidates is None:
            return Recommendation((), None, signal.decision, None, signal.slot, 0, None, None, stages, stale)
        items = _best(prepared.candidates.items, reply.scores, request.k)
        return Recommendation(
            items,
            reply.path,
            signal.decision,
            reply.slot,
            signal.slot,
            reply.used,
            reply.epoch,
            reply.timings.total,
            stages,
            stale,
        )

    def appended(self, user: str, new: History, length: int) -> None:
        """These were stored as the user's newest, who has `length` now: should the store be gone, they are not."""
        recent = self._recent.get(user)
        if recent is None or recent.start + len(recent) == length:  # read since
            return
        if recent.start + len(recent) + len(new) == length:
            longer = recent.append(new.items, new.actions, new.timestamps)
            self._recent.keep(user, self.config.window.apply(longer), self._recent.begin())
        else:  # others have written, too
            self._recent.drop(user)

    def forget(self, user: str) -> None:
        """Keep nothing of the user."""
        self._recent.forget(user)

    async def _history(self, user: str, arrived: float, end: "_Limit") -> tuple[History, bool]:
        """The window of the user's history, and whether it is the one read last, because the store does not answer."""
        recent, number = self._recent.get(user), self._recent.begin()
        try:
            if recent is not None and self._read_here:
                history = self._read(user, recent)
            else:
                limit, read = end, partial(self._read, user, recent)
                if recent is not None:
                    limit = min(end, _Limit(arrived + self._store_ms / 1e3, self._store_limit))
                history = await self._by(limit, "reading the history", lambda: self._offload(read))
        except (DeadlineExceeded, Unavailable, StoreError) as error:
            if recent is None or isinstance(error, StoreCorrupt):
                raise
            return recent, True
        self._recent.keep(user, history, number)
        return history, False

    def _read(self, user: str, recent: History | None) -> History:
        """The window of the user's history. It begins at a page, so that stored page hashes come with it."""
        window = self.config.window
        start = window.start(self._store.length(user)) if recent is None else recent.start
        while True:
            history = self._store.read(user, window.cap, start=start, known=recent)
            wanted = window.start(history.start + len(history))
            if history.start == start <= wanted:
                return history if start == wanted else history[wanted - start :]
            start = wanted  # it has grown past the window, or was replaced by a shorter one

    def _send_signal(self, request: RecommendRequest, history: History, *, due: float) -> "asyncio.Future[Signal]":
        """The reply to come, or one that says why no signal is sent."""
        loop = asyncio.get_running_loop()
        context = 0 if request.context is None else len(request.context)
        shape = Shape(len(history), context, self.config.candidates)
        decision = Decision.ADMIT if shape.prefix else Decision.NOT_AT_RISK
        if shape.prefix and self._trigger is not None:
            decision = self._trigger.decide(request.user, shape)
        if decision is not Decision.ADMIT:
            unsent: asyncio.Future[Signal] = loop.create_future()
            unsent.set_result(Signal(decision, None))
            return unsent
        sent = loop.create_task(self._ranking.signal(request.user, history, request.context, due=due))
        self._signals.add(sent)
        sent.add_done_callback(self._signal_ended)
        return sent

    def _signal_ended(self, sent: "asyncio.Task[Signal]") -> None:
        self._signals.discard(sent)
        error = None if sent.cancelled() else sent.exception()
        if error is not None and not isinstance(error, RelayError):
            _log.error("a signal failed unexpectedly; its request goes on without", exc_info=error)

    async def _rank(
        self,
        request: RecommendRequest,
        history: History,
        prepared: Prepared,
        sent: "asyncio.Future[Signal]",
        end: "_Limit",
    ) -> tuple[Signal, RankReply | None]:
        """Rank where the signal went, if that is known in time. No candidates: no reply."""
        config, began = self.config, self._clock.now()
        limit = min(end, _Limit(began + config.ranking_ms / 1e3, self._ranking_limit))
        candidates = prepared.candidates
        if candidates is None:
            return _known(sent), None
        if not sent.done() and config.signal_grace_ms:
            until = min(limit.at, began + config.signal_grace_ms / 1e3)
            await asyncio.wait((sent,), timeout=until - began)
        signal = _known(sent)
        reply = await self._by(
            limit,
            "ranking",
            lambda: self._ranking.rank(
                request.user,
                history,
                candidates,
                request.context,
                prepared.request,
                slot=signal.slot,
                deadline=limit.at,
            ),
        )
        if len(reply.scores) != len(candidates):
            raise Unavailable(f"ranking answered {len(reply.scores)} scores for {len(candidates)} candidates")
        return signal, reply

    async def _by(self, limit: "_Limit", stage: str, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` gives, if it does by then; else it is cancelled and DeadlineExceeded raised."""
        left = limit.at - self._clock.now()
        if left <= 0:
            raise DeadlineExceeded(f"the {limit.name} passed before {stage}")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as timeout:
                # Set in the loop's next turn: the work has sent by then what it sends, and waits.
                setting = loop.call_soon(timeout.reschedule, loop.time() + left)
                try:
                    return await work()
                finally:
                    setting.cancel()
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise DeadlineExceeded(f"the {limit.name} passed in {stage}") from error


class _Limit(NamedTuple):
    """When time is over, and what has passed then."""

    at: float
    name: str


class _Stopwatch:
    """Times since arrival and since the last lap, in milliseconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.arrived = self._last = clock.now()

    def lap(self) -> float:
        before, self._last = self._last, self._clock.now()
        return (self._last - before) * 1e3

    def total(self) -> float:
        return (self._clock.now() - self.arrived) * 1e3


def _known(sent: "asyncio.Future[Signal]") -> Signal:
    """The signal's reply, as far as there is one."""
    if not sent.done() or sent.cancelled() or sent.exception() is not None:
        return Signal(Decision.UNAVAILABLE, None)
    return sent.result()


def _best(items: npt.NDArray[np.int64], scores: npt.NDArray[np.float32], k: int) -> tuple[Recommended, ...]:
    """The first k by the first task; equal scores keep their order."""
    first = scores[:, 0]
    order = (-first).argsort(kind="stable")[:k]
    return tuple(map(Recommended, items[order].tolist(), first[order].tolist()))
