"""What stands around attention in an HSTU layer, defined in plain torch and fused where a GPU runs it.

project   x → LN → ·W + b → U, V, Q, K, with silu on U or on all four; K and V go straight into pages where asked
finish    U, A → LN(A), gate, concat → ·W + x
score     a whole layer of candidates: project, attention, finish
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from relaygr.kernels.attention import Attention, Weighting
from relaygr.kernels.device import has_triton
from relaygr.kernels.ragged import Ragged

__all__ = [
    "LayerWeights",
    "Norm",
    "Projected",
    "finish",
    "finish_plain",
    "project",
    "project_into",
    "project_plain",
    "score",
    "split",
]


class Norm(NamedTuple):
    """A LayerNorm: weight, bias, eps."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float


class Projected(NamedTuple):
    """One layer's projections of packed rows: u [t, H·d]; q, k, v [t, H, d]."""

    u: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor


class LayerWeights(NamedTuple):
    """What one layer is made of: `uvqk` is [dim, 4·H·d], `output` is [H·d or, with concat, 3·H·d, dim]."""

    before: Norm
    uvqk: torch.Tensor
    bias: torch.Tensor
    after: Norm
    output: torch.Tensor
    silu_all: bool
    concat: bool


def project(
    x: torch.Tensor, norm: Norm, weight: torch.Tensor, bias: torch.Tensor, heads: int, *, silu_all: bool
) -> Projected:
    """U, V, Q, K of rows x [t, dim]. `weight` is [dim, 4·H·d], in that order; silu on U, or on all."""
    if not _fused(x, weight.shape[1] // 4):
        return project_plain(x, norm, weight, bias, heads, silu_all=silu_all)
    from relaygr.kernels import layer_triton

    return split(layer_triton.project(x, norm, weight, bias, silu_all=silu_all), heads)


def project_into(
    attention: Attention,
    x: torch.Tensor,
    norm: Norm,
    weight: torch.Tensor,
    bias: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    batch: Ragged,
    *,
    silu_all: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """U [t, H·d] and Q [t, H, d]; K and V of these rows, new tokens of the batch, are in their pages afterwards."""
    heads, head_dim = pages.shape[-2:]
    if not _fused(x, heads * head_dim):
        u, v, q, k = project_plain(x, norm, weight, bias, heads, silu_all=silu_all)
        attention.write(k, v, pages, layer, batch)
        return u, q
    from relaygr.kernels import layer_triton

    uq = layer_triton.project(x, norm, weight, bias, silu_all=silu_all, pages=pages, layer=layer, batch=batch)
    u, q = uq.chunk(2, dim=-1)
    return u, q.view(len(x), heads, head_dim)


def finish(
    x: torch.Tensor,
    u: torch.Tensor,
    attended: torch.Tensor,
    norm: Norm,
    weight: torch.Tensor,
    *,
    concat: bool,
    limit: torch.Tensor | None = None,
) -> torch.Tensor:
    """[U, A, U·LN(A)]·W + x, or (U·LN(A))·W + x; attended is [t, H, d], its heads together.

    `limit`: how many of the rows there are, see `Ragged.limit`; what comes out of the others is undefined.
    """
    if not _fused(x, u.shape[-1]):
        return finish_plain(x, u, attended, norm, weight, concat=concat)
    from relaygr.kernels import layer_triton

    return layer_triton.finish(x, u, attended.flatten(1), norm, weight, concat=concat, limit=limit)


def score(
    attention: Attention,
    weighting: Weighting,
    x: torch.Tensor,
    weights: LayerWeights,
    pages: torch.Tensor,
    layer: int,
    batch: Ragged,
) -> torch.Tensor:
    """One layer of candidates, against pages. Writes nothing into them."""
    heads, head_dim = pages.shape[-2:]
    if _fused(x, heads * head_dim):
        from relaygr.kernels.triton import TritonAttention

        if isinstance(attention, TritonAttention):
            return attention.score_layer(weighting, x, weights, pages, layer, batch)
    u, v, q, k = project(x, weights.before, weights.uvqk, weights.bias, heads, silu_all=weights.silu_all)
    attended = attention.score(weighting, q, k, v, pages, layer, batch)
    return finish(x, u, attended, weights.after, weights.output, concat=weights.concat)


def project_plain(
    x: torch.Tensor, norm: Norm, weight: torch.Tensor, bias: torch.Tensor, heads: int, *, silu_all: bool
) -> Projected:
    """`project`, as it is defined."""
    normed = F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    uvqk = torch.addmm(bias, normed, weight)
    if silu_all:
        return split(F.silu(uvqk), heads)
    projected = split(uvqk, heads)
    return projected._replace(u=F.silu(projected.u))


def finish_plain(
    x: torch.Tensor, u: torch.Tensor, attended: torch.Tensor, norm: Norm, weight: torch.Tensor, *, concat: bool
) -> torch.Tensor:
    """`finish`, as it is defined."""
    a = attended.flatten(1)
    gated = u * F.layer_norm(a, a.shape[-1:], norm.weight, norm.bias, norm.eps)
    combined = torch.cat((u, a, gated), dim=-1) if concat else gated
    return torch.addmm(x, combined, weight)


def split(uvqk: torch.Tensor, heads: int) -> Projected:
    """[t, U | V | Q | K] as its parts, views of it."""
    u, v, q, k = uvqk.chunk(4, dim=-1)
    shape = (len(uvqk), heads, u.shape[-1] // heads)
    return Projected(u, v.view(shape), q.view(shape), k.view(shape))


def _fused(x: torch.Tensor, width: int) -> bool:
    """Whether a GPU runs this in 16 bits, with sizes the fused kernels take, and nothing wants gradients."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[-1] % 32 == 0
        and width % 32 == 0
        and has_triton()
        and not torch.is_grad_enabled()
    )
