"""Where the time of an engine's loop goes, by what it does for a step and for a rank."""

import time
import weakref
from collections import defaultdict
from typing import Any

from relaygr import Engine
from relaygr.engine.cuda_runner import CudaRunner

__all__ = ["Phases"]

STEP_PHASES = ("turn", "plan", "launch", "deliver", "learn", "complete")
"""A turn is what the loop does when something has happened, but for planning and launching what is to be run."""
WITHIN = ("plan", "launch", "learn")
"""Parts of others: planning and launching of a turn, learning of completing."""
RANK_PHASES = ("arrive", "leave")


class Phases:
    """Seconds of the loop's thread in each of its phases, on the CPU and by the clock, and how many steps there were;
    and in what it does for each rank that comes and leaves.

    The clock also counts when the thread was not running: on a virtual machine that others share, some of it is.
    """

    def __init__(self, engine: Engine) -> None:
        loop = engine._loop
        assert loop is not None
        self.apart = True
        """Whether parts are told apart from what they are within. Timing each takes some microseconds, which count to
        what is around it, so how much all takes is timed without."""
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self.wall_s: defaultdict[str, float] = defaultdict(float)
        self.steps = 0
        self.ranks = 0
        self._runner: weakref.ref[CudaRunner] | None = None
        self._within: list[list[float]] = [[0.0, 0.0]]
        """Of each phase that has begun, what those within it took, on the CPU and by the clock."""
        timed = self.timed
        turn, plan, launch, ended = loop._turns._turn, loop._scheduler.plan, loop._launch, loop.device._tell
        learn, arrive, leave = loop.cost.observe_step, engine.begin_rank, loop.leave
        loop._turns._turn = timed("turn", turn)
        loop._scheduler.plan = timed("plan", plan)  # type: ignore[method-assign]
        loop._launch = timed("launch", launch)  # type: ignore[method-assign]
        loop.device._tell = timed("complete", ended)
        loop.cost.observe_step = timed("learn", learn)  # type: ignore[method-assign]
        engine.begin_rank = timed("arrive", arrive)  # type: ignore[method-assign]
        loop.leave = timed("leave", leave)
        runner = getattr(engine._executor, "_runner", None)
        if isinstance(runner, CudaRunner):
            fly = runner._fly

            def flown(flights: Any, ended: Any, result: Any, over: Any) -> Any:
                return fly(flights, ended, timed("deliver", result), timed("deliver", over))

            runner._fly = flown  # type: ignore[method-assign, assignment]
            self._runner = weakref.ref(runner)

    def timed(self, name: str, call: Any) -> Any:
        """The same call, counted to this phase; what is timed within it is not."""
        within = name in WITHIN

        def wrapped(*args: Any, **more: Any) -> Any:
            if within and not self.apart:
                self.steps += name == "launch"
                return call(*args, **more)
            self._within.append([0.0, 0.0])
            began, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **more)
            finally:
                cpu_s, wall_s = time.thread_time() - cpu, time.perf_counter() - began
                inner_cpu_s, inner_wall_s = self._within.pop()
                self.cpu_s[name] += cpu_s - inner_cpu_s
                self.wall_s[name] += wall_s - inner_wall_s
                self._within[-1][0] += cpu_s
                self._within[-1][1] += wall_s
                self.steps += name == "launch"
                self.ranks += name == "arrive"

        return wrapped

    def close(self) -> None:
        """Leave the runner as it was: it would hold itself, and with it the device's memory."""
        if self._runner is not None and (runner := self._runner()) is not None:
            del runner._fly

    def clear(self) -> None:
        self.cpu_s.clear()
        self.wall_s.clear()
        self.steps = self.ranks = 0

    def step_s(self) -> float:
        """Of the CPU, in all steps so far."""
        return sum(self.cpu_s[name] for name in STEP_PHASES)

    def per_step(self, seconds: dict[str, float]) -> dict[str, float]:
        """Microseconds of each phase."""
        return {name: seconds[name] / self.steps * 1e6 for name in STEP_PHASES}

    def per_rank(self, seconds: dict[str, float]) -> dict[str, float]:
        """Microseconds."""
        return {name: seconds[name] / self.ranks * 1e6 for name in RANK_PHASES}
