"""A caller's deadline, as a frontend keeps it."""

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from relaygr.errors import DeadlineExceeded

__all__ = ["LATEST_S", "Until"]

T = TypeVar("T")

LATEST_S: Final = 0.02
"""How long after a deadline the engine may take to say that it has passed."""


class Until:
    """When a caller's time is over, fixed when its request is here: reading the store and asking twice do not move it.

    Without a deadline, never.
    """

    __slots__ = ("_at", "_loop")

    def __init__(self, ms: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._at = None if ms is None else self._loop.time() + ms / 1e3

    def left_ms(self) -> float | None:
        return None if self._at is None else max(0.0, self._at - self._loop.time()) * 1e3

    @property
    def late_at(self) -> float | None:
        """When the engine has had its time to say so itself; on the event loop's clock."""
        return None if self._at is None else self._at + LATEST_S

    async def bound(self, work: Awaitable[T]) -> T:
        """What the work gives; DeadlineExceeded where it has not by `late_at`."""
        try:
            async with asyncio.timeout_at(self.late_at) as timeout:
                return await work
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise DeadlineExceeded("the history could not be read by the deadline") from error
