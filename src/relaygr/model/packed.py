"""The inputs of one batch in one buffer, so that one copy takes them to a device."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from relaygr.kernels.ragged import PageList

__all__ = ["BatchShape", "Packed"]

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
    features: int = 0
    """Dense features of a row."""

    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Starts, cached, table, tokens, dense."""
        return (
            (self.users + 1,),
            (self.users,),
            (self.users, max(self.pages, 1)),
            (4, self.rows),
            (self.rows, self.features),
        )

    @property
    def words(self) -> int:
        return sum(_padded(part) for part in self.parts())


class Packed:
    """Views into one buffer of 32-bit words:

    starts [users + 1] | cached [users] | table [users, pages] | tokens [4, rows] | dense [rows, features]

    Each of a token's four numbers lies together with those of the others; `tokens` is [rows, 4] all the same.
    """

    def __init__(self, shape: BatchShape, words: torch.Tensor) -> None:
        """`words`: int32, at least shape.words of them."""
        self.shape = shape
        self.words = words
        views, begin = [], 0
        for part in shape.parts():
            views.append(words[begin : begin + int(np.prod(part))].view(part))
            begin += _padded(part)
        self.starts, self.cached, self.table = views[:3]
        self.tokens = views[3].t()
        self.dense: torch.Tensor | None = views[4].view(torch.float32) if shape.features else None
        self.address = words.data_ptr()
        self._alike: tuple[int, int] | None = None
        self._host = _HostViews(self) if words.device.type == "cpu" else None

    @staticmethod
    def empty(shape: BatchShape, *, device: torch.device | str = "cpu", pinned: bool = False) -> "Packed":
        """Its contents undefined."""
        return Packed(shape, torch.empty(shape.words, dtype=torch.int32, device=device, pin_memory=pinned))

    def to(self, device: torch.device | str) -> "Packed":
        """On that device, where it is not there already; from pinned memory without waiting for it."""
        words = self.words.to(device, non_blocking=self.words.is_pinned())
        return self if words is self.words else Packed(self.shape, words)

    def place(self, rows: Sequence[int], cached: Sequence[int], pages: Sequence[PageList]) -> None:
        """Say whose the rows are and where their tokens lie. Users past these have no rows."""
        host, nobody = self._writable(), self.shape.users - len(rows)
        starts, table = list(itertools.accumulate(rows, initial=0)), host.table
        host.starts[:] = starts + starts[-1:] * nobody
        host.cached[:] = [*cached, *[0] * nobody]
        for user, row in enumerate(pages):
            table[user, : len(row)] = row

    def rows_of(
        self, total: int, alike: tuple[int, int] | None = None
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32] | None]:
        """Tokens and dense features of the first `total` rows, to be written; those behind are made harmless.

        `alike`: the second and third number of every token, written here where the batch before had others.
        """
        host = self._writable()
        tokens, dense = host.tokens, host.dense
        if alike is None:
            tokens[total:] = 0
        else:
            if alike != self._alike:
                tokens[:, 1], tokens[:, 2] = alike
            if total < len(tokens):
                tokens[total:, 0] = 0
                tokens[total:, 3] = 0
        self._alike = alike
        if dense is not None:
            dense[total:] = 0.0
        return tokens[:total], None if dense is None else dense[:total]

    def _writable(self) -> "_HostViews":
        if self._host is None:
            raise ValueError("a batch is written in host memory")
        return self._host


class _HostViews:
    """The parts of a packed batch as arrays: made once, since buffers are used again."""

    def __init__(self, packed: Packed) -> None:
        self.starts: npt.NDArray[np.int32] = packed.starts.numpy()
        self.cached: npt.NDArray[np.int32] = packed.cached.numpy()
        self.table: npt.NDArray[np.int32] = packed.table.numpy()
        self.tokens: npt.NDArray[np.int32] = packed.tokens.numpy()
        self.dense: npt.NDArray[np.float32] | None = None if packed.dense is None else packed.dense.numpy()


def _padded(part: tuple[int, ...]) -> int:
    return -(-int(np.prod(part)) // _ALIGNED) * _ALIGNED
