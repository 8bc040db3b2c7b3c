"""Who owns which page of a tier.

    free ──take──▶ owned ──pin──▶ pinned          owned:  an index keeps it; may be evicted
      ▲              │  ◀─unpin──   │             pinned: a lease, a step or a copy needs it; may not
      └──last owner──┴──────────────┘

A page goes back to free when its last owner lets go, never before. free + owned = total, always.
"""

import numpy as np
import numpy.typing as npt

from relaygr.history import PAGE

__all__ = ["PagePool", "Pages"]

Pages = npt.NDArray[np.int64]
"""Numbers of pages; as wide as an index, since indexing by any other width costs more than the rest."""


class PagePool:
    """Counts of owners and pins for every page of one tier. Page numbers in one call are distinct."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.pinned = 0
        self._free = list(range(total - 1, -1, -1))
        self._owners = np.zeros(total, np.int32)
        self._pins = np.zeros(total, np.int32)
        self._filled = np.zeros(total, np.int32)

    def grow(self, total: int) -> None:
        """There are this many pages now; the new ones are free."""
        new = range(total - 1, self.total - 1, -1)
        for counts in ("_owners", "_pins", "_filled"):
            setattr(self, counts, np.concatenate((getattr(self, counts), np.zeros(len(new), np.int32))))
        self._free = [*new, *self._free]
        self.total = total

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that are free or would be if every prefix that nobody needs were evicted."""
        return self.total - self.pinned

    def take(self, count: int) -> Pages:
        """`count` free pages, pinned, their contents undefined. There must be that many."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages taken where {len(self._free)} are free")
        cut = len(self._free) - count
        pages = np.array(self._free[cut:], np.int64)
        del self._free[cut:]
        self._pins[pages] = 1
        self.pinned += count
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
        self.pinned += len(pins) - int(np.count_nonzero(pins))
        self._pins[pages] = pins + 1

    def unpin(self, pages: Pages) -> None:
        pins = self._pins[pages] - 1
        self._pins[pages] = pins
        still = int(np.count_nonzero(pins))
        if still < len(pins):
            self.pinned -= len(pins) - still
            owners = self._owners[pages]
            if still or np.count_nonzero(owners) < len(owners):  # `all` takes longer
                self._end(pages[(pins == 0) & (owners == 0)])

    def _end(self, pages: Pages) -> None:
        """Nobody owns or pins these any more."""
        self._filled[pages] = 0
        self._free.extend(pages.tolist())

    def unpinned(self, pages: Pages) -> int:
        """How many of these nobody has pinned: what pinning them would take from `available`."""
        return len(pages) - int(np.count_nonzero(self._pins[pages])) if len(pages) else 0

    def none_pinned(self, pages: Pages) -> bool:
        """Whether nobody has pinned any of these."""
        return not np.count_nonzero(self._pins[pages])

    def unneeded(self, pages: Pages) -> npt.NDArray[np.bool_]:
        """Which of these nobody has pinned."""
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
        if (self._owners < 0).any() or (self._pins < 0).any():
            raise RuntimeError("pages let go of too often")
        held = (self._owners > 0) | (self._pins > 0)
        owned = int(np.count_nonzero(held))
        if owned + len(self._free) != self.total or len(set(self._free)) != len(self._free) or held[self._free].any():
            raise RuntimeError(f"pages lost: {len(self._free)} free + {owned} owned of {self.total}")
        if self.pinned != int(np.count_nonzero(self._pins)):
            raise RuntimeError(f"{self.pinned} pages counted as pinned, {int(np.count_nonzero(self._pins))} are")
