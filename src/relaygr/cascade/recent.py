"""Histories as they were last read: what is served while the store does not answer."""

from collections import OrderedDict
from typing import Final

from relaygr.history import History

__all__ = ["RecentHistories"]

BEHAVIOURS: Final = 2_000_000
"""How many behaviours are kept in all, 20 bytes each."""
EACH: Final = 50
"""What a history takes beside them, in behaviours."""


class RecentHistories:
    """The histories of the users who were here last, `capacity` behaviours in all, what keeping each takes included.

    Reads are numbered as they begin, so that one that took long does not take the place of what came after it.
    """

    def __init__(self, capacity: int = BEHAVIOURS) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, tuple[int, History]] = OrderedDict()
        self._size = 0
        self._last = 0
        self._forgotten = 0
        """The last number when something was to be forgotten."""

    def begin(self) -> int:
        """The number of a read, or of a write, that begins now."""
        self._last += 1
        return self._last

    def get(self, user: str) -> History | None:
        kept = self._kept.get(user)
        return None if kept is None else kept[1]

    def keep(self, user: str, history: History, number: int) -> None:
        """In place of what is kept of the user, unless that came later, or someone was to be forgotten meanwhile; those
        who were here longest ago make room."""
        kept = self._kept.get(user)
        if number <= self._forgotten or (kept is not None and kept[0] > number):
            return
        self.drop(user)
        self._kept[user] = number, history
        self._size += _size(history)
        while self._size > self._capacity:
            self.drop(next(iter(self._kept)))

    def forget(self, user: str) -> None:
        """What is kept of the user, and whatever reads under way will bring."""
        self._forgotten = self._last
        self.drop(user)

    def drop(self, user: str) -> None:
        """What is kept of the user."""
        gone = self._kept.pop(user, None)
        if gone is not None:
            self._size -= _size(gone[1])

    def __len__(self) -> int:
        return len(self._kept)


def _size(history: History) -> int:
    return EACH + len(history)
