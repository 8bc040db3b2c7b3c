"""One tier: a pool of pages and the newest prefix of each user in it."""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

from relaygr.cache.pages import PagePool, Pages
from relaygr.cache.prefix import Prefix

__all__ = ["Tier"]


Worth = Callable[[Prefix], float | None]
"""What keeping a prefix is worth, for each of its pages; None while that is not known."""

_LOOKED_AT: Final = 32


class Tier:
    """Prefixes by user, least recently used first; those that nobody needs are evicted when pages are.

    Where `worth` is known, the prefix that is worth the least goes first: of all, or of some drawn by lot where there
    are many.
    """

    def __init__(self, pages: int) -> None:
        self.worth: Worth = lambda prefix: None
        self._lot = random.Random(0)
        self.pool = PagePool(pages)
        self.evictions = 0
        self._prefixes: OrderedDict[str, Prefix] = OrderedDict()

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

    def install(self, prefix: Prefix) -> None:
        """Keep this prefix, in place of the user's earlier one. Its pages are pinned by the caller meanwhile."""
        self.pool.own(prefix.pages)
        self.drop(prefix.user)
        self._prefixes[prefix.user] = prefix

    def drop(self, user: str) -> bool:
        """Forget the user's prefix; pages that someone still needs are freed when they let go."""
        prefix = self._prefixes.pop(user, None)
        if prefix is not None:
            self.pool.disown(prefix.pages)
        return prefix is not None

    def drop_where(self, unwanted: Callable[[Prefix], bool]) -> int:
        """Forget every prefix for which `unwanted` is true; returns how many."""
        users = [prefix.user for prefix in self if unwanted(prefix)]
        for user in users:
            self.drop(user)
        return len(users)

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
        for whole in (True, False):
            missing = count - self.pool.free
            if missing <= 0:
                return
            victims = []
            for prefix in self._in_line():
                if missing <= 0:
                    break
                unpinned = self.pool.unpinned(prefix.pages)
                if unpinned == len(prefix.pages) if whole else unpinned:
                    victims.append(prefix.user)
                    missing -= unpinned
            for user in victims:
                self.drop(user)
            self.evictions += len(victims)

    def _in_line(self) -> Iterator[Prefix]:
        """All prefixes, in the order they are to go."""
        prefixes = list(self._prefixes.values())
        looked = prefixes if len(prefixes) <= _LOOKED_AT else self._lot.sample(prefixes, _LOOKED_AT)
        worths = [(self.worth(prefix), prefix) for prefix in looked]
        known = [(worth, prefix) for worth, prefix in worths if worth is not None]
        known.sort(key=lambda pair: pair[0])
        first = {id(prefix) for _, prefix in known}
        yield from (prefix for _, prefix in known)
        yield from (prefix for prefix in prefixes if id(prefix) not in first)
