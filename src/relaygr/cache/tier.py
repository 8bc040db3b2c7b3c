"""One tier: a pool of pages and the newest prefix of each user in it."""

import itertools
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

__all__ = ["Tier"]


Worth = Callable[[HeldColumns], npt.NDArray[np.float64] | None]
"""What keeping each prefix is worth, for each of its pages; None while that is not known."""

_LOOKED_AT: Final = 8192
"""Prefixes that are weighed at once, at most."""
_LINED_UP: Final = 16
"""Of these, those worth the least that nobody needs: they go one after the other, before any is weighed again."""


class Tier:
    """Prefixes by user, least recently used first; those that nobody needs are evicted when pages are.

    Where `worth` is known, the prefix that is worth the least goes first: of all, or where there are very
    many, of a stretch that begins anywhere.
    """

    def __init__(self, pages: int) -> None:
        self.worth: Worth = lambda held: None
        self.other: Tier | None = None
        """Where the same prefixes may be, too."""
        self.pool = PagePool(pages)
        self.evictions = 0
        self._prefixes: OrderedDict[str, Prefix] = OrderedDict()
        self._held = Held()
        self._line: dict[str, None] = {}
        """Whose prefixes go next, while nobody needs them and they do not come back."""
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
        user, twin = prefix.user, None if self.other is None else self.other.find(prefix.user)
        self.pool.own(prefix.pages)
        self.drop(user)
        self._prefixes[user] = prefix
        self._held.add(user, last=seen, tokens=prefix.tokens, twice=twin is not None and twin.covers(prefix))
        if self.other is not None and twin is not None:
            self.other._twin(user, twice=prefix.covers(twin))

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
        """Evict until `count` pages are free: first prefixes that nobody needs any page of, then any that free one."""
        line = (self._lined_up, True)
        for candidates, whole in (line, line, (self._in_order, True), (self._in_order, False)):
            missing = count - self.pool.free
            if missing <= 0:
                return
            victims = []
            for prefix in candidates():
                if missing <= 0:
                    break
                unpinned = self.pool.unpinned(prefix.pages)
                if unpinned == len(prefix.pages) if whole else unpinned:
                    victims.append(prefix.user)
                    missing -= unpinned
            for user in victims:
                self.drop(user)
            self.evictions += len(victims)

    def _lined_up(self) -> Iterable[Prefix]:
        """Some of those worth the least; all, where that is not known."""
        if not self._line:
            least = self._weighed()
            if least is None:
                return self
            unneeded = (prefix for prefix in least if self.pool.unpinned(prefix.pages) == len(prefix.pages))
            self._line = {prefix.user: None for prefix in itertools.islice(unneeded, _LINED_UP)}
        return [self._prefixes[user] for user in self._line]

    def _in_order(self) -> Iterable[Prefix]:
        """All of them."""
        self._line.clear()
        first = list(self._weighed() or ())
        told = {prefix.user for prefix in first}
        return [*first, *(prefix for prefix in self if prefix.user not in told)]

    def _weighed(self) -> Iterator[Prefix] | None:
        """Prefixes, those worth the least first; None where that is not known."""
        columns, users = self._held.columns, self._held.users
        rows = np.arange(min(len(users), _LOOKED_AT))
        if len(users) > _LOOKED_AT:
            rows = (rows + self._lot.randrange(len(users))) % len(users)
            columns = HeldColumns(columns.last[rows], columns.tokens[rows], columns.twice[rows])
        worth = self.worth(columns)
        if worth is None:
            return None
        return (self._prefixes[users[row]] for row in rows[np.argsort(worth)].tolist())
