"""What models run: new tokens of many users, or candidates of many users, packed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from relaygr.history import History
from relaygr.kernels import Ragged
from relaygr.kernels.ragged import PageList
from relaygr.model.candidates import Candidates
from relaygr.model.config import ModelConfig
from relaygr.model.packed import BatchShape, Packed
from relaygr.model.tokens import position_row, write_dense, write_history_tokens, write_item_rows
from relaygr.model.tray import Laid

__all__ = ["AppendBatch", "AppendRow", "ScoreBatch", "ScoreRow", "listed"]


class AppendRow(NamedTuple):
    """One user's next tokens: low … high of context and history, behind the `low` tokens its pages hold.

    Or will hold: a batch may have other tokens of the same pages before them. In every layer, the KV of all rows is
    written before any is read.
    """

    history: History
    context: npt.NDArray[np.int64]
    low: int
    high: int
    pages: PageList
    """The user's pages in order, enough for `high` tokens."""


class ScoreRow(NamedTuple):
    """One user's candidates, against the first `tokens` tokens in its pages."""

    candidates: Candidates
    request: npt.NDArray[np.float32] | None
    position: int
    """Behaviours ranked on: where the candidates stand."""
    tokens: int
    """Context and behaviours together."""
    pages: PageList
    listed: bytes | None = None
    """The pages as the device reads them, int32, where somebody keeps them so: they need not be converted."""
    laid: Laid | None = None
    """Where all this is laid out for a captured launch, if it is."""


@dataclass(frozen=True)
class AppendBatch:
    tokens: torch.Tensor
    """int32 [t, 4]"""
    ragged: Ragged

    @staticmethod
    def pack(config: ModelConfig, rows: Sequence[AppendRow], device: torch.device | str = "cpu") -> "AppendBatch":
        packed = Packed.empty(AppendBatch.shape(rows), pinned=torch.device(device).type == "cuda")
        AppendBatch.fill(packed, config, rows)
        return AppendBatch.of(packed.to(device), rows)

    @staticmethod
    def of(packed: Packed, rows: Sequence[AppendRow]) -> "AppendBatch":
        """What was packed of these rows."""
        counts, cached = tuple(row.high - row.low for row in rows), tuple(row.low for row in rows)
        return AppendBatch(packed.tokens, Ragged(counts, cached, packed.starts, packed.cached, packed.table))

    @staticmethod
    def shape(rows: Sequence[AppendRow]) -> BatchShape:
        return BatchShape(len(rows), sum(row.high - row.low for row in rows), max(len(row.pages) for row in rows))

    @staticmethod
    def fill(packed: Packed, config: ModelConfig, rows: Sequence[AppendRow]) -> None:
        """Write these rows; there must be room for them."""
        packed.place(
            [row.high - row.low for row in rows], [row.low for row in rows], [listed(row.pages) for row in rows]
        )
        tokens = packed.tokens_of(sum(row.high - row.low for row in rows))
        write_history_tokens(config, [(row.history, row.context, row.low, row.high) for row in rows], tokens)


@dataclass(frozen=True)
class ScoreBatch:
    items: torch.Tensor
    """int32 [t], rows of the table."""
    positions: torch.Tensor
    """int32 [users], rows of the positions: where each user's candidates stand."""
    dense: torch.Tensor | None
    """float32 [t, request + candidate features]; None where the model reads none."""
    ragged: Ragged

    @staticmethod
    def pack(config: ModelConfig, rows: Sequence[ScoreRow], device: torch.device | str = "cpu") -> "ScoreBatch":
        packed = Packed.empty(ScoreBatch.shape(config, rows), pinned=torch.device(device).type == "cuda")
        ScoreBatch.fill(packed, config, rows)
        return ScoreBatch.of(packed.to(device), rows)

    @staticmethod
    def of(packed: Packed, rows: Sequence[ScoreRow]) -> "ScoreBatch":
        """What was packed of these rows."""
        counts, cached = tuple(len(row.candidates) for row in rows), tuple(row.tokens for row in rows)
        ragged = Ragged(counts, cached, packed.starts, packed.cached, packed.table)
        return ScoreBatch(packed.items, packed.positions, packed.dense, ragged)

    @staticmethod
    def shape(config: ModelConfig, rows: Sequence[ScoreRow]) -> BatchShape:
        total, pages = sum(len(row.candidates) for row in rows), max(len(row.pages) for row in rows)
        return BatchShape(len(rows), total, pages, config.request_features + config.candidate_features)

    @staticmethod
    def fill(packed: Packed, config: ModelConfig, rows: Sequence[ScoreRow]) -> int:
        """Write these rows; there must be room for them. Returns how many candidates they have."""
        candidates, _, positions, cached, pages, told, _ = zip(*rows, strict=True)
        items = [each.kept for each in candidates]
        counts = list(map(len, items))
        tables = list(map(listed, pages)) if None in told else told
        packed.place(counts, cached, tables, list(map(position_row, positions)))
        total = sum(counts)
        places, dense = packed.candidates_of(total)
        write_item_rows(config, items, max([each.highest for each in candidates]), places)
        if dense is not None:
            begin = 0
            for row, count in zip(rows, counts, strict=True):
                write_dense(config, row.candidates, row.request, dense[begin : begin + count])
                begin += count
        return total


def listed(pages: PageList) -> bytes:
    """Pages as they are read, int32."""
    return np.asarray(pages, np.int32).tobytes()
