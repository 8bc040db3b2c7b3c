"""When the loop takes its next turn: soon, or at a time should nothing happen before."""

import asyncio
from collections.abc import Callable

from relaygr.clock import Clock

__all__ = ["Turns"]


class Turns:
    """However often a turn is asked for, it is taken once."""

    def __init__(self, turn: Callable[[], None], clock: Clock) -> None:
        self._turn = turn
        self._clock = clock
        self._soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0
        """When the timer is due."""

    def soon(self) -> None:
        """Behind what runs now."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._take)

    def within(self, seconds: float) -> None:
        """So much later at the latest. A timer that is due sooner stays: its turn asks again."""
        at = self._clock.now() + seconds
        if self._timer is not None and self._at <= at:
            return
        self.close()
        self._at, self._timer = at, asyncio.get_running_loop().call_later(seconds, self._due)

    def close(self) -> None:
        """Forget the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        self._timer = None
        self.soon()

    def _take(self) -> None:
        self._soon = False
        self._turn()
