"""A trace replayed on one engine in this process: real, or simulated from costs that were measured.

Arrivals do not wait for answers, and latency counts from when a request was to be sent. Trigger, admission, scheduler
and expander are those that servers run; only the network is missing.
"""

import asyncio
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from relaygr.cache import Source
from relaygr.engine import Decision, Engine, Path, Ranked
from relaygr.errors import DeadlineExceeded, Overloaded, Unavailable
from relaygr.history import PAGE, History
from relaygr.lab.estimates import percentile
from relaygr.lab.histories import Histories
from relaygr.lab.outcome import SUCCESS, Budgets, Moment, Run
from relaygr.lab.records import Record
from relaygr.lab.trace import Trace
from relaygr.model.candidates import Candidates
from relaygr.relay import Forecast, Shape, SlotReport, Trigger, TriggerConfig
from relaygr.serving.modes import Mode

__all__ = ["Sample", "replay"]

_SLOT: Final = "here"
_AT_ONCE: Final = 4
_TOGETHER: Final = 16
"""Requests that are sent in one turn of the event loop where they are due: with one a sender that is behind would fall
behind further, and with all of them a busy loop would not get to the device."""
_MOMENT_S: Final = 0.25
_ANYTHING: Final = Candidates([0])
"""To rank only for what that leaves."""


@dataclass(frozen=True)
class Sample:
    """An answer to be checked."""

    history: History
    candidates: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    path: str


async def replay(
    engine: Engine,
    trace: Trace,
    mode: Mode,
    budgets: Budgets,
    trigger: TriggerConfig,
    histories: Histories,
    progress: Callable[[int, int], None] = lambda done, of: None,
    *,
    lived_s: float | None = None,
    samples: list[Sample] | None = None,
    sampled: int = 0,
    hopeless: bool = False,
) -> Run:
    """Send every request of the trace at its time. The caller has configured the engine for the mode, and prepared the
    histories for the trace.

    `hopeless`: end as soon as more requests have failed than may, whatever becomes of the others.

    `lived_s`: of the past but its last seconds, so many, what its users would have left is computed as fast as can be,
    in the order of their last requests, rather than lived through. Into `samples` go about `sampled` answers.
    """
    driver = _Driver(engine, trace, mode, budgets, trigger, histories, samples, sampled)
    first = 0
    if lived_s is not None:
        first = int(np.searchsorted(trace.at, -lived_s))
        if mode.keeps:
            await _leave(engine, trace, first, histories)
    start = engine.clock.now() - (float(trace.at[first]) if first < len(trace) else 0.0)
    if first and mode.keeps:
        engine.learn_visits(_visits(trace, first, start))
    watching = asyncio.create_task(driver.watch(start))
    tasks: set[asyncio.Task[None]] = set()
    try:
        for index in range(first, len(trace)):
            wait_s = start + float(trace.at[index]) - engine.clock.now()
            if wait_s > 0 or index % _TOGETHER == 0:
                await asyncio.sleep(max(wait_s, 0.0))
            task = asyncio.create_task(driver.request(index, start))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            progress(index + 1, len(trace))
            if hopeless and driver.failed > driver.may_fail:
                driver.cut_short()
                break
        if tasks:
            await asyncio.gather(*tasks)
    finally:
        for task in (watching, *tasks):
            task.cancel()
        if tasks:  # it was ended: none may be left to an engine that closes
            await asyncio.gather(*tasks, return_exceptions=True)
    return driver.result()


async def _leave(engine: Engine, trace: Trace, end: int, histories: Histories) -> None:
    """Have the engine hold what the first `end` requests would have left, as far as it would still be there."""
    last: dict[int, int] = {}
    for index in range(end):
        last.pop(int(trace.user[index]), None)
        last[int(trace.user[index])] = index  # in the order of last requests
    status = engine.status()
    pages = status.device_pages + status.host_pages
    kept: list[int] = []
    for index in reversed(last.values()):
        pages -= -(-int(trace.length[index]) // PAGE)
        if pages < 0:
            break
        kept.append(index)
    queue = iter(reversed(kept))
    engine.learn_visits(_visits(trace, end, engine.clock.now(), but=set(kept)))  # those are to come

    async def worker() -> None:
        for index in queue:
            user = int(trace.user[index])
            # By ranks: they wait for memory, and what takes longer than a lease is made, too.
            await engine.rank(f"u{user}", histories.of(user, int(trace.length[index])), _ANYTHING)

    await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))


def _visits(trace: Trace, end: int, start: float, *, but: Set[int] = frozenset()) -> Iterator[tuple[str, float]]:
    """The first `end` requests, `but` some, as visits on a clock."""
    for index in range(end):
        if index not in but:
            yield f"u{trace.user[index]}", start + float(trace.at[index])


@dataclass(frozen=True)
class _Counts:
    """What the engine has done by now."""

    at: float
    busy_s: float
    pre_infer_s: float
    from_nothing: int
    left: int
    reloads: int

    @staticmethod
    def of(engine: Engine) -> "_Counts":
        counts, status = engine.counts(), engine.status()
        made = counts.sources.get(Source.NOTHING, 0)
        now = engine.clock.now()
        left = status.resident_left_by_earlier
        return _Counts(now, status.device_busy_s, counts.pre_infer_busy_s, made, left, counts.reloads)


class _Driver:
    def __init__(
        self,
        engine: Engine,
        trace: Trace,
        mode: Mode,
        budgets: Budgets,
        trigger: TriggerConfig,
        histories: Histories,
        samples: list[Sample] | None,
        sampled: int,
    ) -> None:
        self._engine = engine
        self._trace = trace
        self._budgets = budgets
        self._trigger = Trigger(trigger)
        self._run = Run(mode)
        self._version: int | None = None
        """Of the costs that the trigger has heard."""
        self._histories = histories
        self._samples = samples
        self._every = max(1, int((trace.at >= 0).sum()) // sampled) if sampled else 0
        self._before: _Counts | None = None
        self._behind: list[float] = []
        self.failed = 0
        self._planned = int((trace.at >= 0).sum())
        self.may_fail = (1 - SUCCESS) * self._planned

    def cut_short(self) -> None:
        self._run.planned = self._planned

    async def request(self, index: int, start: float) -> None:
        """One request, from its arrival to its answer."""
        trace, engine, clock = self._trace, self._engine, self._engine.clock
        if trace.at[index] >= 0 and self._before is None:
            self._before = _Counts.of(engine)
        sent = start + float(trace.at[index])
        if sent >= start:
            self._behind.append(clock.now() - sent)
        length, count = int(trace.length[index]), int(trace.candidates[index])
        user, history = f"u{trace.user[index]}", self._histories.of(int(trace.user[index]), length)
        shape = Shape(length, candidates=count)
        decision, forecast = self._signal(user, history, shape)
        asked = sent + float(trace.retrieval_ms[index] + trace.pre_processing_ms[index]) / 1e3
        await asyncio.sleep(max(0.0, asked - clock.now()))
        deadline = min(asked + self._budgets.ranking_ms / 1e3, sent + self._budgets.pipeline_ms / 1e3)
        items = self._histories.candidates(index, count)
        now = self._trigger.forecast(_SLOT, shape, clock.now())
        late = now is not None and engine.pulse()[0] + now.full_ms > (deadline - clock.now()) * 1e3
        failure, path = "", ""
        try:
            ranked = await engine.rank(user, history, items, deadline=deadline)
            path = str(ranked.path)
            self._sample(index, history, items, ranked)
            if forecast is not None:
                self._trigger.learn(forecast, ranked.path, (clock.now() - asked) * 1e3)
            if ranked.path is Path.TRUNCATED and self._run.mode is not Mode.TRUNCATE:
                failure = "TRUNCATED"
        except (DeadlineExceeded, Overloaded, Unavailable) as error:
            failure = type(error).__name__
            took = {"DeadlineExceeded": clock.now() - asked, "Overloaded": deadline - asked}.get(failure)
            if forecast is not None and took is not None and decision is Decision.NOT_AT_RISK:
                self._trigger.learn(forecast, Path.FULL, took * 1e3)
        if trace.at[index] >= 0:
            ended = clock.now()
            record = Record(
                at=float(trace.at[index]),
                user=int(trace.user[index]),
                visit=int(trace.visit[index]),
                length=length,
                decision=str(decision),
                path=path,
                failure=failure,
                ranking_ms=(ended - asked) * 1e3,
                pipeline_ms=(ended - sent) * 1e3,
                late_in_full=late,
            )
            self._run.records.append(record)
            self.failed += bool(failure)

    async def watch(self, start: float) -> None:
        """Look at the engine now and then."""
        before = _Counts.of(self._engine)
        while True:
            await asyncio.sleep(_MOMENT_S)
            now, status = _Counts.of(self._engine), self._engine.status()
            wall = max(now.at - before.at, 1e-9)
            self._run.moments.append(
                Moment(
                    now.at - start,
                    1 - status.device_pages_free / max(status.device_pages, 1),
                    status.device_pages_pinned / max(status.device_pages, 1),
                    1 - status.host_pages_free / status.host_pages if status.host_pages else 0.0,
                    (now.busy_s - before.busy_s) / wall,
                    (now.pre_infer_s - before.pre_infer_s) / wall,
                )
            )
            before = now

    def result(self) -> Run:
        run, before, now = self._run, self._before, _Counts.of(self._engine)
        if before is not None and run.requests:
            wall = max(now.at - before.at, 1e-9)
            run.reused = max(0.0, 1 - (now.from_nothing - before.from_nothing) / run.requests)
            run.reloaded = (now.reloads - before.reloads) / run.requests
            run.resident_left = now.left - before.left
            run.device_busy = (now.busy_s - before.busy_s) / wall
            run.pre_infer_share = (now.pre_infer_s - before.pre_infer_s) / wall
            run.behind_ms = percentile(self._behind, 99) * 1e3
        return run

    def _sample(self, index: int, history: History, items: npt.NDArray[Any], ranked: Ranked) -> None:
        if self._samples is not None and self._every and index % self._every == 0 and self._trace.at[index] >= 0:
            self._samples.append(Sample(history[len(history) - ranked.used :], items, ranked.scores, str(ranked.path)))

    def _signal(self, user: str, history: History, shape: Shape) -> tuple[Decision, Forecast | None]:
        """What the trigger and then admission say, and on what; what is admitted is begun."""
        engine, now = self._engine, self._engine.clock.now()
        wait_ms, version = engine.pulse()
        if version != self._version:
            self._version = version
            self._trigger.hear(_SLOT, SlotReport(version, engine.status().cost_model["steps"], wait_ms), now)
        else:
            self._trigger.hear_wait(_SLOT, wait_ms, now)
        verdict = self._trigger.decide(_SLOT, shape, now)
        if verdict.decision is not Decision.ADMIT:
            return verdict.decision, verdict.forecast
        due = now + max(self._budgets.lead_ms, 1e-3) / 1e3
        return engine.signal(user, history, deadline=due), verdict.forecast
