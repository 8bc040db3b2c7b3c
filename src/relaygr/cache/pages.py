"""Who owns which page of a tier.

    free ──take──▶ owned ──pin──▶ pinned          owned:  an index keeps it; may be evicted
      ▲              │  ◀─unpin──   │             pinned: a lease, a step or a copy needs it; may not
      └──last owner──┴──────────────┘

A page goes back to free when its last owner lets go, never before. free + owned = total, always.

Most who need pages need the same ones as others, all pages of a prefix: their leases are counted for all of these
together, and pages are pinned by the first. Behind the last they stay so until somebody asks for pins: many are let go
of together, and whoever comes back meanwhile finds them pinned.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr.history import PAGE

__all__ = ["Leased", "PagePool", "Pages"]

Pages = npt.NDArray[np.int64]
"""Numbers of pages; as wide as an index, since indexing by any other width costs more than the rest."""

_MOST_OVER: Final = 16384
"""Pages that are let go of together, at most: some fifty microseconds."""


@dataclass(eq=False, slots=True)
class Leased:
    """Pages that are pinned for all who lease these very ones."""

    user: str
    pages: Pages
    key: int
    """What the pool knows it by: the identity of `pages`."""
    count: int
    """Of pages."""
    leases: int = 1


class PagePool:
    """Counts of owners and pins for every page of one tier. Page numbers in one call are distinct."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._pinned = 0
        self._free = list(range(total - 1, -1, -1))
        self._owners = np.zeros(total, np.int32)
        self._pins = np.zeros(total, np.int32)
        self._filled = np.zeros(total, np.int32)
        self._leased: dict[int, Leased] = {}
        """By the identity of their pages."""
        self._over: dict[int, Leased] = {}
        """Of these, those that nobody leases any more, and that are still pinned."""
        self._pages_over = 0

    def grow(self, total: int) -> None:
        """There are this many pages now; the new ones are free."""
        new = range(total - 1, self.total - 1, -1)
        for counts in ("_owners", "_pins", "_filled"):
            setattr(self, counts, np.concatenate((getattr(self, counts), np.zeros(len(new), np.int32))))
        self._free = [*new, *self._free]
        self.total = total

    @property
    def free(self) -> int:
        self._settle()
        return len(self._free)

    @property
    def pinned(self) -> int:
        self._settle()
        return self._pinned

    @property
    def available(self) -> int:
        """Pages that are free or would be if every prefix that nobody needs were evicted."""
        return self.total - self.pinned

    def take(self, count: int) -> Pages:
        """`count` free pages, pinned, their contents undefined. There must be that many."""
        if count > self.free:
            raise RuntimeError(f"{count} pages taken where {self.free} are free")
        cut = len(self._free) - count
        pages = np.array(self._free[cut:], np.int64)
        del self._free[cut:]
        self._pins[pages] = 1
        self._pinned += count
        return pages

    def own(self, pages: Pages) -> None:
        """One more index that keeps these pages."""
        self._owners[pages] += 1

    def disown(self, pages: Pages) -> None:
        left = self._owners[pages] - 1
        self._owners[pages] = left
        self._end(pages[(left == 0) & (self._pins[pages] == 0)])

    def pin(self, pages: Pages) -> None:
        """One more who needs these pages as they are."""
        if not len(pages):
            return  # arrays take long for nothing, too
        pins = self._pins[pages]
        self._pinned += len(pins) - int(np.count_nonzero(pins))
        self._pins[pages] = pins + 1

    def unpin(self, pages: Pages) -> None:
        pins = self._pins[pages] - 1
        self._pins[pages] = pins
        still = int(np.count_nonzero(pins))
        if still < len(pins):
            self._pinned -= len(pins) - still
            owners = self._owners[pages]
            if still or np.count_nonzero(owners) < len(owners):  # `all` takes longer
                self._end(pages[(pins == 0) & (owners == 0)])

    def lease(self, user: str, pages: Pages) -> Leased:
        """One more who needs these pages as they are, all of this user; until `end_leases`."""
        key = id(pages)
        leased = self._leased.get(key)
        if leased is None:
            self.pin(pages)
            leased = self._leased[key] = Leased(user, pages, key, len(pages))
        elif leased.leases:
            leased.leases += 1
        else:
            del self._over[key]
            self._pages_over -= leased.count
            leased.leases = 1
        return leased

    def end_leases(self, ended: Iterable[Leased]) -> None:
        """One less who needs the pages, of each."""
        over, pages_over = self._over, self._pages_over
        for leased in ended:
            leased.leases -= 1
            if not leased.leases:
                over[leased.key] = leased
                pages_over += leased.count
        self._pages_over = pages_over
        if pages_over > _MOST_OVER:
            self._settle()

    def _settle(self) -> None:
        """Unpin what nobody leases any more."""
        if not self._over:
            return
        over, self._over, self._pages_over = self._over, {}, 0
        users: set[str] = set()
        together = []
        for key, leased in over.items():
            del self._leased[key]
            if leased.user in users:
                self.unpin(leased.pages)
            else:  # pages of different users are different pages
                users.add(leased.user)
                together.append(leased.pages)
        self.unpin(together[0] if len(together) == 1 else np.concatenate(together))

    def _end(self, pages: Pages) -> None:
        """Nobody owns or pins these any more."""
        self._filled[pages] = 0
        self._free.extend(pages.tolist())

    def unpinned(self, pages: Pages) -> int:
        """How many of these nobody has pinned: what pinning them would take from `available`."""
        self._settle()
        return len(pages) - int(np.count_nonzero(self._pins[pages])) if len(pages) else 0

    def none_pinned(self, pages: Pages) -> bool:
        """Whether nobody has pinned any of these."""
        self._settle()
        return not np.count_nonzero(self._pins[pages])

    def unneeded(self, pages: Pages) -> npt.NDArray[np.bool_]:
        """Which of these nobody has pinned."""
        self._settle()
        unneeded: npt.NDArray[np.bool_] = self._pins[pages] == 0
        return unneeded

    def filled(self, page: int) -> int:
        """Slots of the page that someone has written or claimed; those behind may be appended to in place."""
        return int(self._filled[page])

    def fill(self, pages: Pages, low: int, high: int) -> None:
        """Claim the slots of tokens low … high in a prefix whose pages these are."""
        if high > low:
            self._filled[pages[low // PAGE : (high - 1) // PAGE]] = PAGE
            self._filled[pages[(high - 1) // PAGE]] = (high - 1) % PAGE + 1

    def check(self) -> None:
        """Raises RuntimeError unless free + owned = total and the counts agree; what is pinned is owned."""
        self._settle()
        if (self._owners < 0).any() or (self._pins < 0).any():
            raise RuntimeError("pages let go of too often")
        held = (self._owners > 0) | (self._pins > 0)
        owned = int(np.count_nonzero(held))
        if owned + len(self._free) != self.total or len(set(self._free)) != len(self._free) or held[self._free].any():
            raise RuntimeError(f"pages lost: {len(self._free)} free + {owned} owned of {self.total}")
        if self.pinned != int(np.count_nonzero(self._pins)):
            raise RuntimeError(f"{self.pinned} pages counted as pinned, {int(np.count_nonzero(self._pins))} are")
