"""When users come back: what a second of keeping something for them is worth, learned from their gaps.

Least recently used first is right where users return soon or never. A feed that is refreshed every few seconds by more
users than memory holds is the opposite: whoever asked just now will not for a while, and whoever asked seconds ago is
due. So what is kept is decided by how often users have returned at which age, age being the time since the last visit.
"""

import math
from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["ReturnTimes"]

_STEP: Final = math.log(1.3)
_EDGES: Final[npt.NDArray[np.float64]] = np.concatenate(([0.0], 0.1 * np.exp(_STEP * np.arange(50))))
"""Ages in seconds, up to half a day; beyond, nobody is expected back."""
_WIDTHS: Final = np.diff(_EDGES)
_GAPS: Final = 4096
_ENOUGH: Final = 64
"""Returns that must have been seen before anything is concluded."""
_REFIT_S: Final = 1.0
_SPAN_S: Final = 3600.0
"""How far back gaps should reach: where traffic is too much for that, fewer users are followed."""


class ReturnTimes:
    """Follows a sample of users, all of them at first, and learns how likely a return is at each age.

    Time is the caller's, in seconds, and does not go back.
    """

    def __init__(self, *, remembered: int = 200_000) -> None:
        self._remembered = remembered
        self._last: OrderedDict[str, float] = OrderedDict()
        self._begun = np.zeros(_GAPS)
        self._ended = np.full(_GAPS, np.nan)
        self._users: list[str | None] = [None] * _GAPS
        self._used = np.zeros(_GAPS, np.bool_)
        """Which places are somebody's."""
        self._place: dict[str, int] = {}
        """Where the open gap of each user who is followed lies."""
        self._next = 0
        self._stride = 1
        self._rates: npt.NDArray[np.float64] | None = None
        """By age, and last of all for those who are not expected back."""
        self._fitted = -_REFIT_S

    def visit(self, user: str, now: float) -> None:
        """The user is here."""
        self._last.pop(user, None)
        self._last[user] = now
        if len(self._last) > self._remembered:
            self._last.popitem(last=False)
        place = self._place.pop(user, None)
        if place is not None:
            self._ended[place] = now
        if self._stride == 1 or _lot(user) % self._stride == 0:
            self._follow(user, now)

    def forget(self, user: str) -> None:
        """Nothing is known of the user's visits any more; what was learned of all users stays."""
        self._last.pop(user, None)
        place = self._place.pop(user, None)
        if place is not None:
            self._users[place] = None
            self._used[place] = False

    def last(self, user: str) -> float:
        """When the user was here; long ago where that is not known."""
        return self._last.get(user, -np.inf)

    def rates(self, last: npt.NDArray[np.float64], now: float) -> npt.NDArray[np.float64] | None:
        """Returns per second of waiting for users who were last here then, over the best time to wait.

        None while too little is known.
        """
        if now - self._fitted >= _REFIT_S:
            self._fit(now)
        if self._rates is None:
            return None
        return self._rates[_bins(now - last)]

    def _follow(self, user: str, now: float) -> None:
        place = self._next
        if self._users[place] is not None and now - self._begun[place] < _SPAN_S and self._stride < 1 << 20:
            self._thin()
            place = self._next
        old = self._users[place]
        if old is not None and self._place.get(old) == place:
            del self._place[old]
        self._users[place] = user
        self._used[place] = True
        self._begun[place], self._ended[place] = now, np.nan
        self._place[user] = place
        self._next = (place + 1) % _GAPS

    def _thin(self) -> None:
        """All places are taken by gaps that are not old: follow half of the users from now on."""
        self._stride *= 2
        for place, user in enumerate(self._users):
            if user is not None and _lot(user) % self._stride:
                if self._place.get(user) == place:
                    del self._place[user]
                self._users[place] = None
        kept = [place for place in range(self._next, self._next + _GAPS) if self._users[place % _GAPS] is not None]
        moved = [place % _GAPS for place in kept]
        users = [self._users[place] for place in moved]
        begun, ended = self._begun[moved], self._ended[moved]
        count = len(moved)
        self._users = [*users, *[None] * (_GAPS - count)]
        self._used[:] = np.arange(_GAPS) < count
        self._begun[:count], self._ended[:count] = begun, ended
        self._place = {user: place for place, user in enumerate(users) if user in self._place}
        self._next = count % _GAPS

    def _fit(self, now: float) -> None:
        """How likely a return is at each age, from gaps that have ended and gaps that have not yet."""
        self._fitted = now
        begun, ended = self._begun[self._used], self._ended[self._used]
        over = ~np.isnan(ended)
        if np.count_nonzero(over) < _ENOUGH:
            return
        length = np.where(over, ended, now) - begun
        self._rates = _best_rates(_hazard(length, over))


def _lot(user: str) -> int:
    return xxhash.xxh3_64_intdigest(user.encode())


def _bins(ages: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Between which edges each age lies; behind the last one, the number of widths."""
    bins: npt.NDArray[np.int64] = _EDGES.searchsorted(ages, side="right")
    return np.maximum(bins - 1, 0)  # weighed with every eviction: no wrappers of numpy's


def _hazard(length: npt.NDArray[np.float64], over: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Between any two edges: returns per second waited, of gaps so long, of which some are over."""
    bins, count = _bins(length), len(_WIDTHS) + 1
    ends, seconds = np.bincount(bins, minlength=count)[:-1], np.bincount(bins, length, count)[:-1]
    longer = len(length) - np.cumsum(ends)
    waited = longer * _WIDTHS + seconds - ends * _EDGES[:-1]
    returned = np.bincount(bins[over], minlength=count)[:-1]
    hazard: npt.NDArray[np.float64] = returned / np.maximum(waited, 1e-9)
    return hazard


def _best_rates(hazard: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For each age: over the best time to wait from then on, returns that come per second waited (Gittins' index).

    And none for those beyond all ages.
    """
    lasting = hazard * _WIDTHS
    waited = np.where(lasting > 1e-12, -np.expm1(-lasting) / np.maximum(hazard, 1e-300), _WIDTHS)
    passed = np.concatenate(([0.0], np.cumsum(lasting)))
    # By age, and by until when is waited; before that age there is nothing to wait for.
    still = np.exp(-np.maximum(passed - passed[:-1, None], 0.0))
    spent = np.cumsum(np.triu(still[:, :-1] * waited), axis=1)
    rates = np.divide(1.0 - still[:, 1:], spent, out=np.zeros_like(spent), where=spent > 0.0)
    return np.append(rates.max(axis=1), 0.0)
