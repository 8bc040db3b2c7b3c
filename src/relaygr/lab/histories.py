"""Histories for traces: of any user and length, the same each time, kept while they grow."""

from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr.history import History

__all__ = ["Histories"]

_POOL: Final = 1 << 20
_KEPT: Final = 1 << 14
"""Users: more than there are in any trace of some seconds, since to make one anew takes as long as many requests."""
_NOTHING: Final = History.empty()


class Histories:
    """What a user has done so far. A longer history of a user begins with its shorter ones."""

    def __init__(self, items: int, actions: int, seed: int = 0, *, alike: bool = False) -> None:
        """`alike`: all users have done the same. Costs less, where nobody looks at what they did."""
        self._alike = alike
        random = np.random.default_rng(seed)
        self._items: npt.NDArray[np.int64] = random.integers(0, items, _POOL)
        self._actions = random.integers(0, actions, _POOL).astype(np.int32)
        self._kept: OrderedDict[int, History] = OrderedDict()

    def candidates(self, request: int, count: int) -> npt.NDArray[np.int64]:
        """Of a request: any items, the same for the same request."""
        first = request * 977 % (_POOL - count)
        return self._items[first : first + count]

    def of(self, user: int, length: int) -> History:
        user = 0 if self._alike else user
        known = self._kept.pop(user, _NOTHING)
        if len(known) < length:
            index = (user * 7919 + np.arange(len(known), length)) % _POOL
            times = 1_600_000_000 + np.arange(len(known), length) * 60
            known = known.append(self._items[index], self._actions[index], times)
        self._kept[user] = known
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return known if len(known) == length else known[:length]

    def prepare(self, users: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]) -> None:
        """Make the longest of each user's, and its digest: what a server would have read from its store."""
        longest: dict[int, int] = {}
        for user, length in zip(users.tolist(), lengths.tolist(), strict=True):
            user = 0 if self._alike else user
            longest[user] = max(length, longest.get(user, 0))
        for user, length in list(longest.items())[-_KEPT:]:
            self.of(user, length).digest()
