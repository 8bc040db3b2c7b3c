"""A model on a device, kept open, on which probes run in any mode."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self

from relaygr.config import EngineConfig
from relaygr.engine import Engine
from relaygr.engine.simulated import SimulatedCosts
from relaygr.engine.step import Executor, Model
from relaygr.engine.torch_executor import TorchExecutor
from relaygr.errors import InvalidInput
from relaygr.lab.device import Device
from relaygr.lab.histories import Histories
from relaygr.lab.oracle import check
from relaygr.lab.outcome import Run
from relaygr.lab.probe import Probe
from relaygr.lab.run import Sample, replay
from relaygr.lab.standing import StandingExecutor
from relaygr.lab.trace import Trace
from relaygr.model import RankingModel
from relaygr.serving.garbage import settled

__all__ = ["Bench", "Unloaded"]

_ALONE: Final = 7


@dataclass(frozen=True)
class Unloaded:
    """Milliseconds of one rank by itself, in the middle, from the caller's side."""

    full: float
    resident: float


class Bench:
    """Engines of any mode, one after the other, on one device with the same kernels, graphs and memory.

    An async context manager. Nothing of one probe is there in the next.
    """

    def __init__(self, model: Model, config: EngineConfig, executor: Executor | None = None) -> None:
        """`executor`: a real one, unless given."""
        self.config = config
        self._model = model
        self._standing = StandingExecutor(executor or TorchExecutor(), model, config)
        self._histories = Histories(model.config.items, model.config.actions)
        self.samples: list[Sample] = []

    async def __aenter__(self) -> Self:
        await self._standing.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._standing.__aexit__(kind, error, trace)

    @property
    def host_pages(self) -> int:
        """Those that may be used by now."""
        return self._standing.ready_host_pages

    @property
    def facts(self) -> dict[str, float]:
        return self._standing.facts()

    async def run(
        self,
        probe: Probe,
        progress: Callable[[int, int], None] = lambda done, of: None,
        *,
        sampled: int = 0,
        trace: Trace | None = None,
        hopeless: bool = False,
    ) -> Run:
        """What became of the probe's requests. Of `sampled` of them the scores are kept in `samples`. See `replay`.

        With a `trace` of its own, that is sent, and all of its past is lived through.
        """
        lived_s = probe.lived_s if trace is None else None
        trace = probe.trace() if trace is None else trace
        longest = int(trace.length.max(initial=0))
        if self.config.max_history is not None and longest > self.config.max_history:
            raise InvalidInput("lengths", f"reach {longest}; max_history is {self.config.max_history}")
        config = probe.mode.engine(probe.tuning.engine(self.config))
        async with Engine(self._model, config, executor=self._standing) as engine:
            trigger = probe.mode.trigger(probe.tuning.trigger(probe.budgets))
            self._histories.prepare(trace.user, trace.length)
            with settled():
                return await replay(
                    engine, trace, probe.mode, probe.budgets, trigger, self._histories, progress,
                    lived_s=lived_s, samples=self.samples, sampled=sampled, hopeless=hopeless,
                )  # fmt: skip

    def check(self, at_most: int | None = None) -> dict[str, Any]:
        """The scores that were kept, or so many of them, the last ones, against full inference; none is kept longer."""
        samples, self.samples = self.samples if at_most is None else self.samples[-at_most:], []
        if not isinstance(self._model, RankingModel):
            return {"samples": 0}
        checked = check(self._model, samples, self.config.device, self.config.dtype)
        return {
            "samples": checked.samples,
            "paths": sorted({sample.path for sample in samples}),
            "difference": checked.difference,
            "allowed": checked.allowed,
            "holds": checked.holds,
        }

    async def measure(self) -> Device:
        """What work costs on this device, by the engine's own profile, for a simulator to go by."""
        async with Engine(self._model, self.config, executor=self._standing) as engine:
            status = engine.status()
            costs = SimulatedCosts(*status.cost_model["steps"], *status.cost_model["copies"])
            device_cache = f"{status.device_pages * status.page_bytes}B"
            return Device(costs, status.page_bytes, replace(self.config, device_cache=device_cache))

    async def unloaded(self, length: int, candidates: int, step_ms: float) -> Unloaded:
        """What a rank takes when nothing else runs, in full and on a resident prefix."""
        taken: dict[str, list[float]] = {"full": [], "resident": []}
        config = replace(self.config, step_ms=step_ms, host_cache="0")
        async with Engine(self._model, config, executor=self._standing) as engine:
            for turn in range(_ALONE + 2):
                history, items = self._histories.of(10**6 + turn, length), self._histories.candidates(turn, candidates)
                history.digest()
                for kind in taken:
                    began = engine.clock.now()
                    await engine.rank(f"alone {turn}", history, items)
                    if turn >= 2:
                        taken[kind].append((engine.clock.now() - began) * 1e3)
                await engine.evict(f"alone {turn}")
        return Unloaded(*(sorted(times)[len(times) // 2] for times in taken.values()))
