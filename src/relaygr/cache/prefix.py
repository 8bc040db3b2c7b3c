"""A prefix ψ: whose it is, what it holds, where it lies."""

import functools
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import xxhash

from relaygr.cache.pages import Pages
from relaygr.history import PAGE, History, KnownHistory

__all__ = ["Identity", "Lineage", "Prefix"]

_DIGEST = 16
_NO_CONTEXT: Final = xxhash.xxh3_128_digest(b"")


class Lineage(NamedTuple):
    """What every prefix of one growing history has in common."""

    version: str
    """Digest of the model's dense weights and config."""
    epoch: int
    """Epoch of the model's tables; of a prefix that later ones have extended, that of its oldest part."""
    context: bytes
    """Digest of the context."""
    context_tokens: int
    start: int
    """Where the window begins in the user's whole history."""
    spread: int = 0
    """By how many epochs its newest part is ahead of its oldest."""

    @classmethod
    def of(cls, version: str, epoch: int, context: npt.NDArray[np.int64], history: History | KnownHistory) -> Self:
        digest = xxhash.xxh3_128_digest(context.data) if len(context) else _NO_CONTEXT
        return cls(version, epoch, digest, len(context), history.start)

    def serves(self, wanted: "Lineage", accept_epochs: int) -> bool:
        """Whether a ψ of this lineage may stand for one of the wanted: equal, but for tables a little behind.

        No part of it may be ahead.
        """
        if self == wanted:  # as nearly always
            return not self.spread
        behind = wanted.epoch - self.epoch
        return self.spread <= behind <= accept_epochs and self._replace(epoch=wanted.epoch, spread=0) == wanted


class Identity(NamedTuple):
    """Equal identities mean the same KV."""

    user: str
    lineage: Lineage
    length: int
    digest: bytes


@dataclass(frozen=True, eq=False)
class Prefix:
    """The KV of context and the first `length` behaviours, in pages of one tier. A value: extending makes another.

    Its head may be missing: as many pages from the start as were needed for others. What is behind them is as it was;
    whoever computes them again has the whole.
    """

    user: str
    lineage: Lineage
    length: int
    digest: bytes
    page_digests: bytes
    """The digests at 0, PAGE, 2·PAGE … behaviours, joined."""
    pages: Pages
    """Those behind the ones that are missing."""
    missing: int = 0
    """Pages from its start that are not held any more."""

    @classmethod
    def of(cls, user: str, lineage: Lineage, history: History, pages: Pages) -> Self:
        """The prefix that holds all of `history`."""
        n = len(history)
        return cls(user, lineage, n, history.digest(n), b"".join(history.page_digests(n)), pages)

    @property
    def identity(self) -> Identity:
        return Identity(self.user, self.lineage, self.length, self.digest)

    @property
    def tokens(self) -> int:
        return self.lineage.context_tokens + self.length

    @property
    def head(self) -> int:
        """Tokens of its start that are not held any more; whole pages."""
        return self.missing * PAGE

    @functools.cached_property
    def listed(self) -> bytes:
        """Its pages as the device reads them, int32; made once, for every rank on it."""
        return self.pages.astype(np.int32).tobytes()

    def on(self, pages: Pages, missing: int) -> "Prefix":
        """The same prefix in other pages, of which so many are missing at its start."""
        return replace(self, pages=pages, missing=missing)

    def without_head(self, count: int) -> "Prefix":
        """What is left of it behind its first `count` pages that are there."""
        return Prefix(  # for every eviction: `replace` takes twice as long
            self.user,
            self.lineage,
            self.length,
            self.digest,
            self.page_digests,
            self.pages[count:],
            self.missing + count,
        )

    def first(self, length: int) -> "Prefix":
        """The prefix of the first `length` behaviours, which is all of this one or whole pages of it; in its pages."""
        if length == self.length:
            return self
        page = length // PAGE
        digest = self.page_digests[page * _DIGEST : (page + 1) * _DIGEST]
        pages = self.pages[: max(-(-(self.lineage.context_tokens + length) // PAGE) - self.missing, 0)]
        return replace(
            self, length=length, digest=digest, page_digests=self.page_digests[: (page + 1) * _DIGEST], pages=pages
        )

    def agrees(self, history: History | KnownHistory) -> int:
        """How many behaviours of `history`, from its start, this prefix holds the KV of.

        All of the prefix where the digests at its length agree, else the longest agreeing run of whole pages.
        """
        n = len(history)
        if self.length <= n and history.digest(self.length) == self.digest:
            return self.length
        whole = min(self.length, n) // PAGE
        return self._whole_pages(b"".join(history.page_digests(whole * PAGE)), whole) * PAGE

    def covers(self, other: "Prefix") -> bool:
        """Whether whoever wants the other, of the same user, is as well served by this one."""
        enough = self.length >= other.length and self.missing <= other.missing
        return enough and self.lineage == other.lineage

    def includes(self, other: "Prefix") -> bool:
        """Whether the other, of the same user, is some whole pages of this one; whatever head either lacks."""
        alike = self.lineage == other.lineage and self.length >= other.length and other.length % PAGE == 0
        return alike and self.shares(other) == other.length

    def shares(self, other: "Prefix") -> int:
        """How many behaviours, in whole pages from the start, this prefix and another of its lineage hold alike."""
        return self._whole_pages(other.page_digests, min(self.length, other.length) // PAGE) * PAGE

    def _whole_pages(self, digests: bytes, most: int) -> int:
        """The longest run of pages, `most` at most, at whose end the digests agree."""

        def agree(page: int) -> bool:
            where = slice(page * _DIGEST, (page + 1) * _DIGEST)
            return self.page_digests[where] == digests[where]

        if agree(most):  # all that a history known by its digest alone can tell
            return most
        low, high = 0, most  # digests are chained: where one agrees, all before it do
        while low < high:
            middle = (low + high + 1) // 2
            if agree(middle):
                low = middle
            else:
                high = middle - 1
        return low
