"""Time, injected. What decides never reads the machine's clock by itself."""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

__all__ = ["Clock", "RealClock", "VirtualClock", "VirtualTimeLoop", "run_virtual"]

T = TypeVar("T")


class Clock(Protocol):
    """Seconds that only go forward. Deadlines are absolute on this scale."""

    def now(self) -> float: ...


class RealClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)  # without a call of our own: it is asked all the time


class VirtualClock:
    """The time of a `VirtualTimeLoop`: stands still while code runs, jumps when everything waits."""

    def __init__(self, loop: "VirtualTimeLoop") -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.time()


_STILL = 100_000
"""Rounds of a loop at one instant that are too many."""


class _JumpingSelector(selectors.DefaultSelector):
    """Where a loop would sleep until its next timer, moves the loop's time there instead."""

    now = 0.0
    _still = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError(f"deadlock in virtual time at {self.now:.6f} s: every task waits, no timer is set")
        before, self.now = self.now, self.now + max(timeout, 0.0)
        self._still = 0 if self.now > before else self._still + 1
        if self._still > _STILL:
            raise RuntimeError(
                f"virtual time stands still at {self.now:.6f} s: somebody is called again and again at once"
            )
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time: sleeps and timers cost nothing, and order alone decides.

    A wait that nothing can end raises RuntimeError instead of hanging, and so does time that does not pass. Work in
    threads is not waited for: everything awaited under this loop must be driven by timers or by other tasks.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time and return its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
