"""One tier: a pool of pages and the newest prefix of each user in it."""

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr.cache.held import Held, HeldColumns
from relaygr.cache.pages import PagePool, Pages
from relaygr.cache.prefix import Prefix

__all__ = ["PARTS", "Tier"]


Worth = Callable[[HeldColumns], npt.NDArray[np.float64] | None]
"""What keeping the part of each prefix is worth that goes next, for each of its pages; None while that is not known."""

InParts = Callable[[HeldColumns], npt.NDArray[np.bool_]]
"""Which prefixes lose their heads before they go whole."""

_LOOKED_AT: Final = 8192
"""Prefixes that are weighed at once, at most."""
_LINED_UP: Final = 16
"""Of these, those worth the least that nobody needs: they go one after the other, before any is weighed again. Of few,
a quarter at most."""
PARTS: Final = 3
"""As many a prefix has that goes in parts; several may go at once."""
_NO_PAGE: Final = -1
"""Of a prefix that has none, which is nobody's loss whenever it goes."""


class Tier:
    """Prefixes by user, least recently used first; those that nobody needs are evicted when pages are.

    Where `worth` is known, the prefix that is worth the least goes first: of all, or where there are very
    many, of a stretch that begins anywhere. And of those that go `in_parts` the head alone: to compute that again takes
    the least, since all that is behind it looks back on it.
    """

    def __init__(self, pages: int) -> None:
        self.worth: Worth = lambda held: None
        self.other: Tier | None = None
        """Where the same prefixes may be, too."""
        self.in_parts: InParts = lambda held: np.zeros(len(held.last), np.bool_)
        self.pool = PagePool(pages)
        self.evictions = 0
        self.shortened = 0
        """How often a prefix lost a part of its head."""
        self._prefixes: OrderedDict[str, Prefix] = OrderedDict()
        self._held = Held()
        self._line: dict[str, int] = {}
        """Whose prefixes go next, and how many pages of each, while nobody needs them and they do not come back."""
        self._lot = random.Random(0)

    def __len__(self) -> int:
        return len(self._prefixes)

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._prefixes.values())

    def find(self, user: str) -> Prefix | None:
        """The user's prefix, if one is here. Changes nothing."""
        return self._prefixes.get(user)

    def touch(self, user: str) -> None:
        """The user's prefix was used: it is evicted last."""
        if user in self._prefixes:
            self._prefixes.move_to_end(user)
            self._line.pop(user, None)

    def seen(self, user: str, at: float) -> None:
        """The user was here, whether or not they have a prefix: what theirs is worth depends on it."""
        self._held.seen(user, at)
        self._line.pop(user, None)

    def install(self, prefix: Prefix, seen: float = -math.inf) -> None:
        """Keep this prefix, in place of the user's earlier one. Its pages are pinned by the caller meanwhile.

        `seen`: when its user was last here.
        """
        user = prefix.user
        self.pool.own(prefix.pages)
        self.drop(user)
        self._prefixes[user] = prefix
        page = int(prefix.pages[-1]) if len(prefix.pages) else _NO_PAGE
        self._held.add(user, last=seen, tokens=prefix.tokens, head=prefix.head, twice=False, page=page)
        self._compare(prefix)

    def drop(self, user: str) -> bool:
        """Forget the user's prefix; pages that someone still needs are freed when they let go."""
        prefix = self._prefixes.pop(user, None)
        if prefix is not None:
            self.pool.disown(prefix.pages)
            self._held.remove(user)
            self._line.pop(user, None)
            if self.other is not None:
                self.other._twin(user, twice=False)
        return prefix is not None

    def drop_where(self, unwanted: Callable[[Prefix], bool]) -> int:
        """Forget every prefix for which `unwanted` is true; returns how many."""
        users = [prefix.user for prefix in self if unwanted(prefix)]
        for user in users:
            self.drop(user)
        return len(users)

    def _compare(self, prefix: Prefix) -> None:
        """This is what the user has here now: note whether either tier's serves as well as the other's."""
        twin = None if self.other is None else self.other.find(prefix.user)
        if self.other is not None and twin is not None:
            self._held.set_twice(prefix.user, twin.covers(prefix))
            self.other._twin(prefix.user, twice=prefix.covers(twin))

    def _twin(self, user: str, *, twice: bool) -> None:
        """What the other tier has of the user has changed, and with it what theirs is worth here."""
        self._held.set_twice(user, twice)
        self._line.pop(user, None)

    def can_reserve(self, count: int, shared: Pages) -> bool:
        """Whether `reserve` would succeed. Changes nothing."""
        return self.pool.available - self.pool.unpinned(shared) >= count

    def reserve(self, count: int, shared: Pages) -> Pages | None:
        """Pin `shared` and `count` new pages, evicting as needed. None if that cannot be, and then nothing changed."""
        if not self.can_reserve(count, shared):
            return None
        self.pool.pin(shared)
        if self.pool.free < count:
            self._evict(count)
        return self.pool.take(count)

    def _evict(self, count: int) -> None:
        """Evict until `count` pages are free: first prefixes that nobody needs any page of, or their heads, then any
        that free one."""
        while self.pool.free < count and (self._line or self._line_up()):
            for user, pages in list(self._line.items()):
                if self.pool.free >= count:
                    return
                prefix = self._prefixes[user]
                if self.pool.none_pinned(prefix.pages):
                    self._shorten(prefix, pages)
                self._line.pop(user, None)
        for whole in (True, False):
            if self.pool.free >= count:
                return
            for prefix in self._in_order():
                if self.pool.free >= count:
                    return
                unpinned = self.pool.unpinned(prefix.pages)
                if unpinned == len(prefix.pages) if whole else unpinned:
                    self.drop(prefix.user)
                    self.evictions += 1

    def _shorten(self, prefix: Prefix, count: int) -> None:
        """Its first `count` pages go, all of it where these are all."""
        if count >= len(prefix.pages):
            self.drop(prefix.user)
            self.evictions += 1
            return
        user = prefix.user
        short = self._prefixes[user] = prefix.without_head(count)
        self.pool.disown(prefix.pages[:count])
        self.shortened += 1
        self._held.set_head(user, short.head)
        self._compare(short)

    def _line_up(self) -> bool:
        """Choose some of those worth the least, and how much of each goes; False where there are none, or unweighed.

        As much as is worth no more than the best of them is: the whole of what is hardly worth anything.
        """
        weighed = self._weighed()
        if weighed is None:
            return False
        rows, worth = weighed
        users, most = self._held.users, math.ceil(min(_LINED_UP, len(rows) / 4))
        # Where somebody needs pages of a prefix, the last one is seldom not among them.
        free = np.flatnonzero(self.pool.unneeded(self._held.columns.page[rows]))
        free = free[worth[free].argsort()]
        chosen = []
        for place in (place for some in (free[: 2 * most], free[2 * most :]) for place in some.tolist()):
            if self.pool.none_pinned(self._prefixes[users[rows[place]]].pages):
                chosen.append(place)
                if len(chosen) == most:
                    break
        if not chosen:
            return False
        lined_up = rows[chosen]
        shares = self._going(lined_up, float(worth[chosen[-1]]))
        for row, share in zip(lined_up.tolist(), shares.tolist(), strict=True):
            prefix = self._prefixes[users[row]]
            whole = len(prefix.pages) + prefix.missing
            left = len(prefix.pages) - math.ceil(whole * share)
            self._line[prefix.user] = len(prefix.pages) if left < whole / PARTS / 2 else len(prefix.pages) - left
        return True

    def _going(self, rows: npt.NDArray[np.int64], price: float) -> npt.NDArray[np.float64]:
        """Of the prefixes in these rows, the share that goes where what is worth this much or less does."""
        whole = ~self.in_parts(self._held.columns.at(rows))
        if whole.all():
            return np.ones(len(rows))
        columns = self._held.columns.at(rows.repeat(PARTS))
        parts = np.tile(np.arange(PARTS), len(rows))
        worth = self.worth(columns._replace(head=columns.head + columns.tokens * parts / PARTS))
        assert worth is not None, "it was known just now"
        dear = (worth > price).reshape(-1, PARTS)
        going = np.where(dear.any(axis=1) & ~whole, dear.argmax(axis=1), PARTS)
        return np.maximum(going, 1) / PARTS

    def _in_order(self) -> Iterable[Prefix]:
        """All of them."""
        self._line.clear()
        weighed = self._weighed()
        users = self._held.users
        first = []
        if weighed is not None:
            rows, worth = weighed
            first = [self._prefixes[users[row]] for row in rows[worth.argsort()].tolist()]
        told = {prefix.user for prefix in first}
        return [*first, *(prefix for prefix in self if prefix.user not in told)]

    def _weighed(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]] | None:
        """Rows of prefixes, and what they are worth; None where that is not known."""
        columns, users = self._held.columns, self._held.users
        rows = np.arange(min(len(users), _LOOKED_AT))
        if len(users) > _LOOKED_AT:
            rows = (rows + self._lot.randrange(len(users))) % len(users)
            columns = columns.at(rows)
        worth = self.worth(columns)
        return None if worth is None else (rows, worth)
