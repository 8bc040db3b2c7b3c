"""The contract of attention over pages: two shapes, two ways to weigh a key."""

from dataclasses import dataclass
from typing import Protocol

import torch

from relaygr.kernels.ragged import Ragged

__all__ = ["Attention", "Silu", "Softmax", "Weighting"]


@dataclass(frozen=True)
class Silu:
    """Weight of a key: silu(q·k·scale) / length. Additive over keys, so any split of them is a plain sum."""

    scale: float
    length: float


@dataclass(frozen=True)
class Softmax:
    """Weight of a key: softmax over the visible keys of q·k·scale."""

    scale: float


Weighting = Silu | Softmax


class Attention(Protocol):
    """Attention of packed rows over one layer of a page pool `[page, layer, k|v, token, head, dim]`.

    q, k, v: [rows, head, dim] of the pool's dtype and device; results have the shape and dtype of q.
    A score row sees its user's cached tokens and itself, so it depends on no other row of the batch.
    """

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, layer: int, batch: Ragged) -> None:
        """Put the new tokens' K and V into their pages. Touches nothing else in the pool."""
        ...

    def append(
        self, weighting: Weighting, q: torch.Tensor, pages: torch.Tensor, layer: int, batch: Ragged
    ) -> torch.Tensor:
        """Causal: new token i of a user sees its cached tokens and new tokens 0 … i, all read from the pages."""
        ...

    def score(
        self,
        weighting: Weighting,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: torch.Tensor,
        layer: int,
        batch: Ragged,
    ) -> torch.Tensor:
        """Each candidate sees its user's cached tokens, from the pages, and itself, from k and v. Writes nothing."""
        ...
