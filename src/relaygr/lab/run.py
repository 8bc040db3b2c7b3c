"""A trace replayed on one engine in this process: real, or simulated from costs that were measured.

Arrivals do not wait for answers, and latency counts from when a request was to be sent. Trigger, admission, scheduler
and expander are those that servers run; only the network is missing.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from relaygr.cache import Source
from relaygr.clock import VirtualClock, VirtualTimeLoop, run_virtual
from relaygr.config import EngineConfig
from relaygr.engine import Decision, Engine, Path
from relaygr.engine.simulated import SimulatedCosts, SimulatedExecutor, SimulatedModel
from relaygr.errors import DeadlineExceeded, InvalidInput, Overloaded, Unavailable
from relaygr.history import History
from relaygr.lab.histories import Histories
from relaygr.lab.trace import Trace
from relaygr.lab.traffic import percentile
from relaygr.relay import Forecast, Shape, SlotReport, Trigger, TriggerConfig
from relaygr.serving.modes import Mode

__all__ = ["Budgets", "Run", "replay", "simulate"]

_SLOT = "here"


@dataclass(frozen=True)
class Budgets:
    """What an answer must keep to."""

    ranking_ms: float = 50.0
    pipeline_ms: float = 200.0

    def __post_init__(self) -> None:
        if not 0 < self.ranking_ms <= self.pipeline_ms:
            raise InvalidInput("ranking_ms", f"must be positive and at most pipeline_ms, {self.pipeline_ms:g}")


@dataclass
class Run:
    """What became of a trace's requests, the past left out."""

    mode: Mode
    ranking_ms: list[float] = field(default_factory=list)
    """Of those that were answered: from when ranking was asked for."""
    pipeline_ms: list[float] = field(default_factory=list)
    """Of those that were answered: from when the request was to be sent."""
    paths: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    """By the error's name; TRUNCATED counts as a failure, except in the mode that truncates."""
    requests: int = 0
    reused: float = 0.0
    """The share of requests for which nothing was begun from nothing: an earlier one had left a prefix."""
    device_busy: float = 0.0
    pre_infer_share: float = 0.0

    def holds(self, budgets: Budgets, success: float = 0.99) -> bool:
        """Whether P99 of ranking and pipeline are within the budgets, and enough requests were answered."""
        if not self.ranking_ms or 1 - sum(self.failed.values()) / self.requests < success:
            return False
        ranking, pipeline = self.p(self.ranking_ms, 99), self.p(self.pipeline_ms, 99)
        return ranking <= budgets.ranking_ms and pipeline <= budgets.pipeline_ms

    def told(self, budgets: Budgets) -> dict[str, Any]:
        """In plain values."""
        return {
            "mode": self.mode.value,
            "requests": self.requests,
            "within budgets": self.holds(budgets),
            "failed": sum(self.failed.values()) / self.requests if self.requests else 0.0,
            "ranking P50": self.p(self.ranking_ms, 50),
            "ranking P99": self.p(self.ranking_ms, 99),
            "pipeline P99": self.p(self.pipeline_ms, 99),
            "reuse": self.reused,
            "device busy": self.device_busy,
            "pre-inference": self.pre_infer_share,
            "paths": {path: count / self.requests for path, count in self.paths.items()},
        }

    @staticmethod
    def p(values: list[float], percent: float) -> float:
        """A percentile of these; not a number where there are none."""
        return percentile(values, percent) if values else float("nan")


async def replay(
    engine: Engine,
    trace: Trace,
    mode: Mode,
    budgets: Budgets,
    trigger: TriggerConfig,
    histories: Histories,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Run:
    """Send every request of the trace at its time. The engine is configured for the mode by the caller."""
    driver = _Driver(engine, trace, mode, budgets, trigger, histories)
    start = engine.clock.now() - (float(trace.at[0]) if len(trace) else 0.0)
    tasks = set()
    for index in range(len(trace)):
        await asyncio.sleep(max(0.0, start + float(trace.at[index]) - engine.clock.now()))
        task = asyncio.create_task(driver.request(index, start))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        progress(index + 1, len(trace))
    if tasks:
        await asyncio.gather(*tasks)
    return driver.result()


def simulate(
    costs: SimulatedCosts,
    page_bytes: int,
    config: EngineConfig,
    trace: Trace,
    mode: Mode,
    budgets: Budgets,
    target_ms: float | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Run:
    """Replay in virtual time on a device with these costs and pages of this size.

    Steps take a tenth of the ranking budget at most: what an urgent rank waits behind.
    """
    config = replace(config, step_ms=min(config.step_ms, budgets.ranking_ms / 10))

    async def main() -> Run:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        executor = SimulatedExecutor(costs, page_bytes=page_bytes, depth=2)
        async with Engine(SimulatedModel(), mode.engine(config), clock=VirtualClock(loop), executor=executor) as engine:
            wanted = mode.trigger(TriggerConfig(ranking_budget_ms=budgets.ranking_ms, target_ms=target_ms))
            return await replay(engine, trace, mode, budgets, wanted, Histories(10**6, 16), progress)

    return run_virtual(main())


class _Driver:
    def __init__(
        self,
        engine: Engine,
        trace: Trace,
        mode: Mode,
        budgets: Budgets,
        trigger: TriggerConfig,
        histories: Histories,
    ) -> None:
        self._engine = engine
        self._trace = trace
        self._budgets = budgets
        self._trigger = Trigger(trigger)
        self._run = Run(mode)
        self._report: SlotReport | None = None
        self._histories = histories
        self._before: tuple[float, float, float, float] | None = None

    async def request(self, index: int, start: float) -> None:
        """One request, from its arrival to its answer."""
        trace, engine, clock = self._trace, self._engine, self._engine.clock
        counted = trace.at[index] >= 0
        if counted and self._before is None:
            self._before = self._counts()
        sent = start + float(trace.at[index])
        user, length, count = f"u{trace.user[index]}", int(trace.length[index]), int(trace.candidates[index])
        history = self._histories.of(int(trace.user[index]), length)
        stages_s = float(trace.retrieval_ms[index] + trace.pre_processing_ms[index]) / 1e3
        decision, forecast = self._signal(user, history, Shape(length, candidates=count), stages_s)
        await asyncio.sleep(max(0.0, sent + stages_s - clock.now()))
        asked = sent + stages_s
        deadline = min(asked + self._budgets.ranking_ms / 1e3, sent + self._budgets.pipeline_ms / 1e3)
        items = self._histories.candidates(index, count)
        failure = path = None
        try:
            ranked = await engine.rank(user, history, items, deadline=deadline)
            path = ranked.path
            if forecast is not None:
                self._trigger.learn(forecast, path, (clock.now() - asked) * 1e3)
            if path is Path.TRUNCATED and self._run.mode is not Mode.TRUNCATE:
                failure = "TRUNCATED"
        except (DeadlineExceeded, Overloaded, Unavailable) as error:
            failure = type(error).__name__
            if forecast is not None and failure == "DeadlineExceeded" and decision is Decision.NOT_AT_RISK:
                self._trigger.learn(forecast, Path.FULL, (clock.now() - asked) * 1e3)
        if not counted:
            return
        run, now = self._run, clock.now()
        run.requests += 1
        run.decisions[decision] += 1
        if path is not None:
            run.paths[path] += 1
        if failure is not None:
            run.failed[failure] += 1
        else:
            run.ranking_ms.append((now - asked) * 1e3)
            run.pipeline_ms.append((now - sent) * 1e3)

    def result(self) -> Run:
        run = self._run
        if self._before is not None and run.requests:
            now, busy, pre_infer, from_nothing = (
                after - before for after, before in zip(self._counts(), self._before, strict=True)
            )
            run.reused = max(0.0, 1 - from_nothing / run.requests)
            run.device_busy = busy / now if now else 0.0
            run.pre_infer_share = pre_infer / now if now else 0.0
        return run

    def _signal(self, user: str, history: History, shape: Shape, stages_s: float) -> tuple[Decision, Forecast | None]:
        """What the trigger and then admission say, and on what; what is admitted is begun."""
        engine, now = self._engine, self._engine.clock.now()
        wait_ms, version = engine.pulse()
        if self._report is None or self._report.version != version:
            steps = engine.status().cost_model["steps"]
            self._report = SlotReport(version, steps, wait_ms)
        self._trigger.hear(_SLOT, SlotReport(version, self._report.coefficients, wait_ms), now)
        verdict = self._trigger.decide(_SLOT, shape, now)
        if verdict.decision is not Decision.ADMIT:
            return verdict.decision, verdict.forecast
        return engine.signal(user, history, deadline=now + max(stages_s, 1e-6)), verdict.forecast

    def _counts(self) -> tuple[float, float, float, float]:
        """The time; busy seconds of the device, and of pre-inference among them; prefixes begun from nothing."""
        counts = self._engine.counts()
        busy_s = self._engine.status().device_busy_s
        return self._engine.clock.now(), busy_s, counts.pre_infer_busy_s, float(counts.sources.get(Source.NOTHING, 0))
