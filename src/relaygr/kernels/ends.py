"""What stands before and behind a stack of layers, defined in plain torch and fused where a GPU runs it.

embed   four row numbers of a token → the sum of the rows
head    x → LN → ·W + b, in float32
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from relaygr.kernels.device import has_triton
from relaygr.kernels.layer import Norm
from relaygr.kernels.mail import Mail

__all__ = ["HotRows", "embed", "embed_plain", "head", "head_plain"]


class HotRows(NamedTuple):
    """Rows of a table in host memory that the device holds copies of."""

    rows: torch.Tensor
    """[slots, dim], on the device."""
    slots: torch.Tensor
    """int32 [rows of the table], on the device: the slot that holds a row, or -1."""


def embed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    kinds: torch.Tensor,
    gaps: torch.Tensor,
    positions: torch.Tensor,
    hot: HotRows | None = None,
) -> torch.Tensor:
    """[t, dim] from tokens [t, 4]. `table` may lie in pinned host memory, the rest is on the tokens' device."""
    if not _fused(kinds):
        return embed_plain(tokens, table, kinds, gaps, positions)
    from relaygr.kernels import ends_triton

    return ends_triton.embed(tokens, table, kinds, gaps, positions, hot)


def embed_plain(
    tokens: torch.Tensor, table: torch.Tensor, kinds: torch.Tensor, gaps: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """`embed`, as it is defined."""
    ids = tokens[:, 0]
    x = table.index_select(0, ids.to(table.device)).to(kinds.device)
    x = x + kinds.index_select(0, tokens[:, 1])
    x = x + gaps.index_select(0, tokens[:, 2])
    return x + positions.index_select(0, tokens[:, 3])


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
