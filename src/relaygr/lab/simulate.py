"""A trace replayed in virtual time, on a device that takes as long as one was measured to."""

import asyncio
from collections.abc import Callable

from relaygr.clock import VirtualClock, VirtualTimeLoop, run_virtual
from relaygr.config import EngineConfig
from relaygr.engine import Engine
from relaygr.engine.simulated import SimulatedCosts, SimulatedExecutor, SimulatedModel
from relaygr.lab.histories import Histories
from relaygr.lab.outcome import Budgets, Run
from relaygr.lab.run import replay
from relaygr.lab.trace import Trace
from relaygr.lab.tuning import Tuning
from relaygr.serving.modes import Mode

__all__ = ["simulate"]


def simulate(
    costs: SimulatedCosts,
    page_bytes: int,
    config: EngineConfig,
    trace: Trace,
    mode: Mode,
    budgets: Budgets,
    tuning: Tuning,
    progress: Callable[[int, int], None] = lambda done, of: None,
    *,
    lived_s: float | None = None,
    hopeless: bool = False,
) -> Run:
    """Replay on a device with these costs and pages of this size. Scores are not made up: there are none."""

    async def main() -> Run:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        executor = SimulatedExecutor(costs, page_bytes=page_bytes, depth=2, remember=False, contents=False)
        chosen = mode.engine(tuning.engine(config))
        async with Engine(SimulatedModel(), chosen, clock=VirtualClock(loop), executor=executor) as engine:
            wanted, histories = mode.trigger(tuning.trigger(budgets)), Histories(10**6, 16, alike=True)
            return await replay(
                engine, trace, mode, budgets, wanted, histories, progress, lived_s=lived_s, hopeless=hopeless
            )

    return run_virtual(main())
