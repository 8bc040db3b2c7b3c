"""Which prefixes are worth a copy in host memory."""

from collections import OrderedDict
from typing import Final

from relaygr.cache.prefix import Prefix

__all__ = ["MIN_RETURN_RATE", "ReturnRate", "WriteBackQueue"]

MIN_RETURN_RATE: Final = 0.1
"""Below this share of returns a copy would mostly push out prefixes of users who do return."""
_HALVE_AT: Final = 10_000.0


class ReturnRate:
    """How often users come back, learned from what happened: of users seen once, and of users seen again."""

    def __init__(self, *, remembered: int = 200_000) -> None:
        self._remembered = remembered
        self._visits: OrderedDict[str, int] = OrderedDict()
        self._seen = [1.0, 1.0]
        self._returned = [0.5, 0.75]

    def visit(self, user: str) -> None:
        """The user is here."""
        visits = self._visits.pop(user, 0)
        if visits:
            self._returned[visits > 1] += 1
        self._seen[visits > 0] += 1
        self._visits[user] = visits + 1
        if self._seen[visits > 0] > _HALVE_AT:
            self._seen[visits > 0] /= 2
            self._returned[visits > 0] /= 2
        if len(self._visits) > self._remembered:
            self._visits.popitem(last=False)

    def forget(self, user: str) -> None:
        self._visits.pop(user, None)

    def expected(self, user: str) -> float:
        """The share of users like this one who have come back."""
        again = self._visits.get(user, 0) > 1
        return min(1.0, self._returned[again] / self._seen[again])


class WriteBackQueue:
    """Prefixes waiting to be copied to host memory. Bounded: the oldest is dropped for a newer one.

    Nothing is pinned while it waits: a victim of eviction that was not written in time is simply lost.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._waiting: OrderedDict[str, Prefix] = OrderedDict()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, prefix: Prefix, *, return_rate: float, saves_s: float) -> bool:
        """Queue it if users like this one come back and a reload then saves device time, `saves_s` seconds of it."""
        if return_rate < MIN_RETURN_RATE or saves_s <= 0.0:
            return False
        self._waiting.pop(prefix.user, None)
        self._waiting[prefix.user] = prefix
        if len(self._waiting) > self._bound:
            self._waiting.popitem(last=False)
            self.dropped += 1
        return True

    def take(self) -> Prefix | None:
        """The one that has waited longest."""
        return self._waiting.popitem(last=False)[1] if self._waiting else None

    def forget(self, user: str) -> None:
        self._waiting.pop(user, None)

    def clear(self) -> None:
        self._waiting.clear()
