"""What was measured of a device, and what would become of probes there."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from relaygr.clock import VirtualClock, VirtualTimeLoop, run_virtual
from relaygr.config import EngineConfig
from relaygr.engine import Engine
from relaygr.engine.simulated import SimulatedCosts, SimulatedExecutor, SimulatedModel
from relaygr.lab.histories import Histories
from relaygr.lab.outcome import Budgets, Run
from relaygr.lab.probe import Probe
from relaygr.lab.run import replay
from relaygr.lab.trace import Trace
from relaygr.lab.tuning import Tuning
from relaygr.lab.workload import Workload
from relaygr.serving.modes import Mode

__all__ = ["Device"]


@dataclass(frozen=True)
class Device:
    """What a simulation needs to know of a device, all of it measured."""

    costs: SimulatedCosts
    page_bytes: int
    config: EngineConfig

    @staticmethod
    def of(told: dict[str, Any]) -> "Device":
        """From plain values, as `asdict` makes them."""
        return Device(SimulatedCosts(**told["costs"]), told["page_bytes"], EngineConfig(**told["config"]))

    def slower(self, factor: float) -> "Device":
        """Where steps take so many times as long as the profile said."""
        steps = ("step", "token", "pair", "candidate", "candidate_pair")
        return replace(self, costs=replace(self.costs, **{name: factor * getattr(self.costs, name) for name in steps}))

    def full_s(self, length: int, candidates: int) -> float:
        """What computing in full takes by itself."""
        costs = self.costs
        pairs = length * (length + 1) / 2
        scoring = candidates * (costs.candidate + costs.candidate_pair * length)
        return costs.step + costs.token * length + costs.pair * pairs + scoring

    def length_for(self, seconds: float, candidates: int) -> int:
        """The longest history that takes no longer than that in full."""
        low, high = 1, 1 << 24
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.full_s(middle, candidates) <= seconds else (low, middle - 1)
        return low

    def probe(
        self,
        mode: Mode,
        workload: Workload,
        budgets: Budgets,
        length: int,
        engine: str = "",
        *,
        one_at_a_time: bool = False,
    ) -> Probe:
        """Tuned for histories of this length, and for many requests under way unless there is `one_at_a_time`."""
        tuning = Tuning.of(budgets, mode, self.costs.step, self.full_s(length, workload.candidates))
        if one_at_a_time:
            tuning = tuning.one_at_a_time(budgets)
        return Probe(mode, workload, budgets, tuning, engine)

    def simulate(self, probe: Probe) -> dict[str, Any]:
        """What the probe would tell, by the simulator."""
        return self.run(probe, hopeless=True).told(probe.budgets)

    def run(
        self,
        probe: Probe,
        progress: Callable[[int, int], None] = lambda done, of: None,
        *,
        trace: Trace | None = None,
        hopeless: bool = False,
    ) -> Run:
        """What would become of the probe's requests, in virtual time. Scores are not made up: there are none.

        With a `trace` of its own, that is sent, and all of its past is lived through. See `replay`.
        """
        lived_s = probe.lived_s if trace is None else None
        sent = probe.trace() if trace is None else trace
        config = probe.mode.engine(probe.tuning.engine(self.config))
        trigger = probe.mode.trigger(probe.tuning.trigger(probe.budgets))

        async def main() -> Run:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop)
            executor = SimulatedExecutor(
                self.costs, page_bytes=self.page_bytes, depth=2, remember=False, contents=False
            )
            async with Engine(SimulatedModel(), config, clock=VirtualClock(loop), executor=executor) as engine:
                histories = Histories(10**6, 16, alike=True)
                histories.prepare(sent.user, sent.length)
                return await replay(
                    engine, sent, probe.mode, probe.budgets, trigger, histories, progress,
                    lived_s=lived_s, hopeless=hopeless,
                )  # fmt: skip

        return run_virtual(main())
