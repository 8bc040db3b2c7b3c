"""Embeddings of tokens."""

import torch
from torch import nn

from relaygr.kernels import Ragged
from relaygr.kernels.ends import HotRows, Tables, embed, embed_candidates
from relaygr.model.config import ModelConfig
from relaygr.model.tokens import GAP_ROWS, POSITION_ROWS, candidate_marks, kind_rows, table_rows

__all__ = ["TokenEmbedding"]


class TokenEmbedding(nn.Module):
    """The sum of a token's rows in four tables, plus a projection of a candidate's dense features."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(table_rows(config), config.dim))
        self.kinds = nn.Parameter(torch.empty(kind_rows(config), config.dim))
        self.gaps = nn.Parameter(torch.empty(GAP_ROWS, config.dim))
        self.positions = nn.Parameter(torch.empty(POSITION_ROWS, config.dim))
        self.hot: HotRows | None = None
        """Where the table lies in host memory: rows of it that the device holds."""
        self.dense = nn.Parameter(torch.empty(config.request_features + config.candidate_features, config.dim))
        self._marks = candidate_marks(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[t, dim] from tokens [t, 4]."""
        return embed(tokens, self._tables)

    def candidates(
        self, items: torch.Tensor, positions: torch.Tensor, ragged: Ragged, dense: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same of candidates, whose items [t] are rows of the table, at their users' positions [users]; with
        features [t, r + f], for a model that reads them."""
        x = embed_candidates(items, positions, ragged, self._marks, self._tables)
        return x if dense is None else torch.addmm(x, dense.to(x.dtype), self.dense)

    @property
    def _tables(self) -> Tables:
        return Tables(self.table, self.kinds, self.gaps, self.positions, self.hot)
