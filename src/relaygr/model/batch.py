"""What models run: new tokens of many users, or candidates of many users, packed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from relaygr.history import History
from relaygr.kernels import Ragged
from relaygr.kernels.ragged import PageList
from relaygr.model.candidates import Candidates
from relaygr.model.config import ModelConfig
from relaygr.model.tokens import candidate_tokens, history_tokens

__all__ = ["AppendBatch", "AppendRow", "ScoreBatch", "ScoreRow"]


@dataclass(frozen=True)
class AppendRow:
    """One user's next tokens: low … high of context and history, behind the `low` tokens its pages hold."""

    history: History
    context: npt.NDArray[np.int64]
    low: int
    high: int
    pages: PageList
    """The user's pages in order, enough for `high` tokens."""


@dataclass(frozen=True)
class ScoreRow:
    """One user's candidates, against the first `tokens` tokens in its pages."""

    candidates: Candidates
    request: npt.NDArray[np.float32] | None
    position: int
    """Behaviours ranked on: where the candidates stand."""
    tokens: int
    """Context and behaviours together."""
    pages: PageList


@dataclass(frozen=True)
class AppendBatch:
    tokens: torch.Tensor
    """int64 [t, 4]"""
    ragged: Ragged

    @staticmethod
    def pack(config: ModelConfig, rows: Sequence[AppendRow], device: torch.device | str = "cpu") -> "AppendBatch":
        tokens = [history_tokens(config, row.history, row.context, row.low, row.high) for row in rows]
        return AppendBatch(
            torch.from_numpy(np.concatenate(tokens)).to(device),
            Ragged.build(
                [row.high - row.low for row in rows], [row.low for row in rows], [row.pages for row in rows], device
            ),
        )


@dataclass(frozen=True)
class ScoreBatch:
    tokens: torch.Tensor
    """int64 [t, 4]"""
    dense: torch.Tensor | None
    """float32 [t, request + candidate features]; None where the model reads none."""
    ragged: Ragged

    @staticmethod
    def pack(config: ModelConfig, rows: Sequence[ScoreRow], device: torch.device | str = "cpu") -> "ScoreBatch":
        tokens = [candidate_tokens(config, row.candidates.items, row.position) for row in rows]
        counts = [len(row.candidates) for row in rows]
        dense = None
        if config.request_features + config.candidate_features:
            dense = torch.from_numpy(np.concatenate([_dense(config, row) for row in rows])).to(device)
        return ScoreBatch(
            torch.from_numpy(np.concatenate(tokens)).to(device),
            dense,
            Ragged.build(counts, [row.tokens for row in rows], [row.pages for row in rows], device),
        )


def _dense(config: ModelConfig, row: ScoreRow) -> npt.NDArray[np.float32]:
    """The request's features, then the candidate's; zeros where not given."""
    dense = np.zeros((len(row.candidates), config.request_features + config.candidate_features), np.float32)
    if row.request is not None:
        dense[:, : config.request_features] = row.request
    if row.candidates.features is not None:
        dense[:, config.request_features :] = row.candidates.features
    return dense
