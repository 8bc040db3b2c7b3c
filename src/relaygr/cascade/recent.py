"""Histories as they were last read: what is served while the store does not answer."""

from collections import OrderedDict
from typing import Final

from relaygr.history import History

__all__ = ["RecentHistories"]

BEHAVIOURS: Final = 2_000_000
"""How many behaviours are kept in all, 20 bytes each."""


class RecentHistories:
    """The histories of the users who were here last, `capacity` behaviours in all. Each counts as one at least."""

    def __init__(self, capacity: int = BEHAVIOURS) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, History] = OrderedDict()
        self._size = 0

    def get(self, user: str) -> History | None:
        return self._kept.get(user)

    def keep(self, user: str, history: History) -> None:
        """In place of what is kept of the user; those who were here longest ago make room."""
        self.forget(user)
        self._kept[user] = history
        self._size += _size(history)
        while self._size > self._capacity:
            self.forget(next(iter(self._kept)))

    def forget(self, user: str) -> None:
        gone = self._kept.pop(user, None)
        if gone is not None:
            self._size -= _size(gone)

    def __len__(self) -> int:
        return len(self._kept)


def _size(history: History) -> int:
    return max(1, len(history))
