"""What stands before and behind a stack of layers, defined in plain torch and fused where a GPU runs it.

embed   four row numbers of a token → the sum of the rows; of candidates three are told once for many
head    x → LN → ·W + b, in float32
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from relaygr.kernels.device import has_triton
from relaygr.kernels.layer import Norm
from relaygr.kernels.mail import Mail
from relaygr.kernels.ragged import Ragged

__all__ = [
    "HotRows",
    "Tables",
    "embed",
    "embed_candidates",
    "embed_candidates_plain",
    "embed_plain",
    "head",
    "head_plain",
]


class HotRows(NamedTuple):
    """Rows of a table in host memory that the device holds copies of."""

    rows: torch.Tensor
    """[slots, dim], on the device."""
    slots: torch.Tensor
    """int32 [rows of the table], on the device: the slot that holds a row, or -1."""


class Tables(NamedTuple):
    """What tokens are rows of: [rows, dim] each."""

    items: torch.Tensor
    """May lie in pinned host memory; the others are where the tokens are."""
    kinds: torch.Tensor
    gaps: torch.Tensor
    positions: torch.Tensor
    hot: HotRows | None = None
    """Of the items."""


def embed(tokens: torch.Tensor, tables: Tables) -> torch.Tensor:
    """[t, dim] from tokens [t, 4]."""
    if not _fused(tables.kinds):
        return embed_plain(tokens, tables)
    from relaygr.kernels import ends_triton

    return ends_triton.embed(tokens, tables)


def embed_plain(tokens: torch.Tensor, tables: Tables) -> torch.Tensor:
    """`embed`, as it is defined."""
    x = _items(tokens[:, 0], tables)
    x = x + tables.kinds.index_select(0, tokens[:, 1])
    x = x + tables.gaps.index_select(0, tokens[:, 2])
    return x + tables.positions.index_select(0, tokens[:, 3])


def embed_candidates(
    items: torch.Tensor, positions: torch.Tensor, ragged: Ragged, marks: tuple[int, int], tables: Tables
) -> torch.Tensor:
    """[t, dim] of tokens that have items [t], the same `marks` all, their kind and gap, and each user's position
    [users]. Of rows that belong to nobody it is undefined, and finite."""
    if not _fused(tables.kinds):
        return embed_candidates_plain(items, positions, ragged, marks, tables)
    from relaygr.kernels import ends_triton

    return ends_triton.embed_candidates(items, positions, ragged.starts, marks, tables)


def embed_candidates_plain(
    items: torch.Tensor, positions: torch.Tensor, ragged: Ragged, marks: tuple[int, int], tables: Tables
) -> torch.Tensor:
    """`embed_candidates`, as it is defined."""
    kind, gap = marks
    x = _items(items, tables) + tables.kinds[kind] + tables.gaps[gap]
    return x + tables.positions.index_select(0, positions[ragged.row_users()])


def _items(rows: torch.Tensor, tables: Tables) -> torch.Tensor:
    return tables.items.index_select(0, rows.to(tables.items.device)).to(tables.kinds.device)


def head(
    x: torch.Tensor,
    norm: Norm,
    weight: torch.Tensor,
    bias: torch.Tensor,
    limit: torch.Tensor | None = None,
    mail: Mail | None = None,
) -> torch.Tensor:
    """Scores of rows x [t, dim], float32 [t, tasks]; `weight` is [dim, tasks].

    `limit`: int32 [1], how many rows there are, where that is known on the device alone; what is behind is undefined.
    `mail`: on a GPU, where the scores go instead of coming back, which are then none.
    """
    if not _fused(x):
        assert mail is None
        return head_plain(x, norm, weight, bias)
    from relaygr.kernels import ends_triton

    return ends_triton.head(x, norm.weight, norm.bias, norm.eps, weight, bias, limit, mail)


def head_plain(x: torch.Tensor, norm: Norm, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`head`, as it is defined."""
    normed = F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    return torch.addmm(bias, normed, weight).float()


def _fused(x: torch.Tensor) -> bool:
    """Whether a GPU runs this in 16 bits and nothing wants gradients."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and has_triton() and not torch.is_grad_enabled()
