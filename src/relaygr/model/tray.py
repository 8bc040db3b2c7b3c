"""One user's candidates as a captured launch reads them: laid out when a rank comes, so that a step only names them."""

import functools
import struct

import numpy as np
import numpy.typing as npt
import torch

from relaygr.kernels.mail import HEAD
from relaygr.model.candidates import Candidates
from relaygr.model.config import ModelConfig
from relaygr.model.packed import padded
from relaygr.model.tokens import position_row, write_dense, write_item_rows

__all__ = ["Laid", "Tray"]


class Tray:
    """Room for so many pages, candidates and features in one buffer of 32-bit words; see `kernels.mail`."""

    def __init__(self, words: torch.Tensor, pages: int, rows: int, features: int) -> None:
        """`words`: int32, `Tray.words` of them, in host memory, at a multiple of 16 bytes."""
        self.address = words.data_ptr()
        memory: npt.NDArray[np.int32] = words.numpy()
        table, items = HEAD + padded((pages,)), padded((rows,))
        self.items = memory[table : table + rows]
        self._dense_at = table + items
        dense = memory[self._dense_at : self._dense_at + rows * features].view(np.float32).reshape(rows, features)
        self.dense: npt.NDArray[np.float32] | None = dense if features else None
        self._line = 4 * pages
        self.memory = memory.data.cast("B")
        """All of it."""
        self._pack = functools.partial(struct.Struct(f"={HEAD}i{self._line}s").pack_into, self.memory, 0)
        """Writes all before the items, zeros where its pages are fewer."""

    @staticmethod
    def words(pages: int, rows: int, features: int) -> int:
        return HEAD + padded((pages,)) + padded((rows,)) + padded((rows, features))

    def lay(
        self,
        config: ModelConfig,
        candidates: Candidates,
        request: npt.NDArray[np.float32] | None,
        position: int,
        tokens: int,
        pages: bytes,
    ) -> None:
        """Write what a `ScoreRow` says, `pages` as they are read; there must be room for it."""
        if len(pages) > self._line:  # what does not fit would be cut off
            raise ValueError(f"the pages of a user take {len(pages)} bytes where there is room for {self._line}")
        self._pack(tokens, position_row(position), self._dense_at, 0, pages)
        items, highest = candidates.kept, candidates.highest
        count = len(items)
        if highest < config.items:
            self.items[:count] = items
        else:  # some are hashed
            write_item_rows(config, (items,), highest, self.items[:count])
        if self.dense is not None:
            write_dense(config, candidates, request, self.dense[:count])


class Laid:
    """A tray that a row was laid on, for as long as somebody holds this: until then nothing else is laid on it."""

    __slots__ = ("_free", "tray")

    def __init__(self, tray: Tray, free: list[Tray]) -> None:
        """`free`: where the tray goes when nobody holds this any more."""
        self.tray = tray
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.tray)
