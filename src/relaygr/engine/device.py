"""The executor as the loop sees it: what is in flight, what it will take, how it ended."""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from relaygr.clock import Clock
from relaygr.engine.cost import CostModel
from relaygr.engine.guard import Guard
from relaygr.engine.step import Executor, PageCopy, Step, StepResult

__all__ = ["Copy", "Device", "Ended"]

_LEAD_S: Final = 2e-3
"""How long before the end of a step the next is launched, at the least."""
_LEAD_SHARE: Final = 0.1
"""And a share of what it was predicted to take, since it may end sooner."""
_LAUNCHES: Final = 2.0
"""And so many times the longest launch of late: the loop has other work in front of it, about as much."""
_FADES: Final = 0.98
"""What is left of that with every launch: half of it after 34."""
_SOON_S: Final = 5e-4
"""What no timer is set for: they are of a millisecond."""

Ended = Callable[[BaseException | None], None]
"""Called with the error, or None."""
StepEnded = Callable[[StepResult | None, BaseException | None], None]
"""Called with the result, or with None and the error."""
Copy = Callable[[PageCopy, Ended], None]
"""`Device.copy`, as those who only copy see it."""


class Device:
    """Launches steps and copies, learns what they cost, and counts faults. Callbacks come on the event loop."""

    def __init__(
        self, executor: Executor, cost: CostModel, clock: Clock, turn_soon: Callable[[], None], guard: Guard
    ) -> None:
        self.faults: Counter[str] = Counter()
        self.busy_s = 0.0
        self.copies = 0
        """Copies in flight."""
        self._executor = executor
        self._cost = cost
        self._clock = clock
        self._turn_soon = turn_soon
        self._guard = guard
        self._tell = guard.callback(self._step_ended)
        self._numbers = itertools.count()
        self._steps: dict[int, float] = {}
        """Predicted seconds of each step in flight, in the order of their launch."""
        self._began = 0.0
        """When the first of them was begun."""
        self._launching_s = 0.0
        """How long the longest launch of late took, laying out its inputs included."""
        self._changed: asyncio.Event | None = None
        """Whether something has ended, where somebody waits for that."""

    @property
    def steps(self) -> int:
        """Steps in flight."""
        return len(self._steps)

    @property
    def wanted_in_s(self) -> float:
        """How soon another step should be launched: now, shortly before those in flight end, or not before one has.

        What is launched cannot be taken back: until then something more urgent may come. But a device that waits for
        what takes long to launch is lost time: where launches take a third of a step there is hardly any waiting.
        """
        if not self._steps:
            return 0.0
        if len(self._steps) >= self._executor.depth:
            return math.inf
        lead_s = _LEAD_S + _LEAD_SHARE * sum(self._steps.values()) + _LAUNCHES * self._launching_s
        early_s = self.left_s - lead_s
        return early_s if early_s > _SOON_S else 0.0

    @property
    def left_s(self) -> float:
        """What the steps in flight will still take, as far as that was predicted."""
        if not self._steps:
            return 0.0
        first = next(iter(self._steps.values()))
        return sum(self._steps.values()) - min(self._clock.now() - self._began, first)

    def launch(self, step: Step, predicted_s: float, features: Sequence[float], ended: StepEnded) -> None:
        """Run the step. `ended` gets its result, or None and the error."""
        number, now = next(self._numbers), self._clock.now()
        if not self._steps:
            self._began = now
        self._steps[number] = predicted_s

        def finished(future: "asyncio.Future[StepResult]") -> None:
            if number == next(iter(self._steps)):  # not one that the device did not even take
                self._began = self._clock.now()
            del self._steps[number]
            self._tell(features, predicted_s, ended, future)
            if self._changed is not None:
                self._changed.set()

        try:
            future = self._executor.launch(step)
        except Exception as error:  # a device that does not even take the work
            future = _failed(error)
        future.add_done_callback(finished)
        del future  # an error of it holds this frame
        self._launching_s = max(self._clock.now() - now, _FADES * self._launching_s)

    def _step_ended(
        self, features: Sequence[float], predicted_s: float, ended: StepEnded, future: "asyncio.Future[StepResult]"
    ) -> None:
        error = _error_of(future)
        result = None if error is not None else future.result()
        if result is None:
            self.faults["step"] += 1
        else:
            self.busy_s += result.seconds
            self._cost.observe_step(features, predicted_s, result.seconds)
        ended(result, error)
        self._turn_soon()

    def copy(self, copy: PageCopy, ended: Ended) -> None:
        """Move pages between the tiers. `ended` gets the error, or None."""
        self.copies += 1

        def tell(future: "asyncio.Future[float]") -> None:
            error = _error_of(future)
            if error is None:
                self._cost.copies.observe((1.0, float(len(copy.source))), future.result())
            else:
                self.faults[f"copy {copy.direction}"] += 1
            ended(error)
            self._turn_soon()

        told = self._guard.callback(tell)

        def finished(future: "asyncio.Future[float]") -> None:
            self.copies -= 1
            told(future)
            if self._changed is not None:
                self._changed.set()

        try:
            future = self._executor.copy(copy)
        except Exception as error:
            future = _failed(error)
        future.add_done_callback(finished)
        del future  # as above

    async def drained(self) -> None:
        """Wait until nothing is in flight."""
        if self._changed is None:
            self._changed = asyncio.Event()
        while self._steps or self.copies:
            self._changed.clear()
            await self._changed.wait()


def _failed(error: Exception) -> "asyncio.Future[Any]":
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


def _error_of(future: "asyncio.Future[StepResult] | asyncio.Future[float]") -> BaseException | None:
    return asyncio.CancelledError() if future.cancelled() else future.exception()
