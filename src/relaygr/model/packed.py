"""The inputs of one batch in one buffer, so that one copy takes them to a device."""

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["BatchShape", "Packed", "padded"]

_ALIGNED = 4
"""Words that every part is a multiple of: kernels are compiled for pointers aligned to 16 bytes, or for others."""


@dataclass(frozen=True)
class BatchShape:
    """What a packed batch has room for."""

    users: int
    rows: int
    """Of all users together."""
    pages: int
    """Of the user who has the most."""
    features: int | None = None
    """Dense features of a candidate; None where rows are tokens of histories."""

    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Starts, cached, positions, table, tokens, items, dense."""
        scored = self.features is not None
        return (
            (self.users + 1,),
            (self.users,),
            (self.users if scored else 0,),
            (self.users, max(self.pages, 1)),
            (4, 0 if scored else self.rows),
            (self.rows if scored else 0,),
            (self.rows, self.features or 0),
        )

    @property
    def words(self) -> int:
        return sum(padded(part) for part in self.parts())


class Packed:
    """Views into one buffer of 32-bit words:

    of histories:   starts [users + 1] | cached [users] | table [users, pages] | tokens [4, rows]
    of candidates:  starts | cached | positions [users] | table | items [rows] | dense [rows, features]

    Candidates have an item each and share their user's position. Each of a token's four numbers lies together with
    those of the others; `tokens` is [rows, 4] all the same.
    """

    def __init__(self, shape: BatchShape, words: torch.Tensor) -> None:
        """`words`: int32, at least shape.words of them."""
        self.shape = shape
        self.words = words
        views, begin = [], 0
        for part in shape.parts():
            views.append(words[begin : begin + int(np.prod(part))].view(part))
            begin += padded(part)
        self.starts, self.cached, self.positions, self.table = views[:4]
        self.tokens = views[4].t()
        self.items = views[5]
        self.dense: torch.Tensor | None = views[6].view(torch.float32) if shape.features else None
        self.address = words.data_ptr()
        self._host = _HostViews(self) if words.device.type == "cpu" else None

    @staticmethod
    def empty(shape: BatchShape, *, device: torch.device | str = "cpu", pinned: bool = False) -> "Packed":
        """Its contents undefined."""
        return Packed(shape, torch.empty(shape.words, dtype=torch.int32, device=device, pin_memory=pinned))

    def to(self, device: torch.device | str) -> "Packed":
        """On that device, where it is not there already; from pinned memory without waiting for it."""
        words = self.words.to(device, non_blocking=self.words.is_pinned())
        return self if words is self.words else Packed(self.shape, words)

    def place(
        self,
        rows: Sequence[int],
        cached: Sequence[int],
        pages: Sequence[bytes],
        positions: Sequence[int] = (),
    ) -> None:
        """Say whose the rows are, where their tokens lie, and where candidates stand. Users past these have no rows.

        `pages` are those of each user as they are read, int32.
        """
        host, nobody = self._writable(), [0] * (self.shape.users - len(rows))
        longest = max(map(len, pages), default=0)
        if longest > host.line:  # what does not fit would be cut off
            raise ValueError(f"the pages of a user take {longest} bytes where there is room for {host.line}")
        words = list(itertools.accumulate(rows, initial=0))
        words += words[-1:] * len(nobody)
        words += cached
        words += nobody
        if self.shape.features is not None:
            words += positions
            words += nobody
        host.head.pack_into(host.memory, 0, *words, *pages, *[b""] * len(nobody))

    def tokens_of(self, total: int) -> npt.NDArray[np.int32]:
        """Tokens of the first `total` rows, to be written; those behind are made harmless."""
        tokens = self._writable().tokens
        tokens[total:] = 0
        return tokens[:total]

    def candidates_of(self, total: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32] | None]:
        """Items and dense features of the first `total` rows, to be written; those behind are made harmless."""
        host = self._writable()
        items, dense = host.items, host.dense
        if total == len(items):
            return items, dense
        items[total:] = 0
        if dense is None:
            return items[:total], None
        dense[total:] = 0.0
        return items[:total], dense[:total]

    def _writable(self) -> "_HostViews":
        if self._host is None:
            raise ValueError("a batch is written in host memory")
        return self._host


class _HostViews:
    """Where and how the parts of a packed batch are written: found once, since buffers are used again."""

    def __init__(self, packed: Packed) -> None:
        users, scored = packed.shape.users, packed.shape.features is not None
        words: npt.NDArray[np.int32] = packed.words.numpy()
        behind_starts, behind_users = (4 * (padded((count,)) - count) for count in (users + 1, users))
        each = f"{users}i{behind_users}x"
        self.line = 4 * packed.table.shape[1]
        """Bytes of a user's pages, at most."""
        table = f"{self.line}s" * users
        self.head = struct.Struct(f"={users + 1}i{behind_starts}x{each}{each if scored else ''}{table}")
        """Starts, cached, positions and the table: written at once, zeros where somebody's pages are fewer."""
        self.memory = words.data.cast("B")
        """All of it."""
        self.tokens: npt.NDArray[np.int32] = packed.tokens.numpy()
        self.items: npt.NDArray[np.int32] = packed.items.numpy()
        self.dense: npt.NDArray[np.float32] | None = None if packed.dense is None else packed.dense.numpy()


def padded(part: tuple[int, ...]) -> int:
    """Words that a part of this shape takes, with what is behind it up to where the next may begin."""
    return -(-int(np.prod(part)) // _ALIGNED) * _ALIGNED
