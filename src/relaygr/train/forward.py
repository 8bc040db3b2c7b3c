"""What serving computes, over whole sequences and with gradients: the same parameters, tokens and attention.

    history     t0  t1  t2  t3 …     causal, as `append` runs it
    candidates  c0  c1  c2  c3 …     candidate i sees the history before its place, and itself, as `score` runs it

Serving runs candidates behind the history alone. Here each stands behind as much of it as `sees` says, so that every
position of a sequence predicts in one pass. Sequences are padded on the right: nothing valid sees what is padded.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from relaygr.kernels.layer import Norm, Projected, project_plain
from relaygr.model import RankingModel
from relaygr.model.hstu import HstuLayer, HstuStack
from relaygr.model.softmax import SoftmaxLayer, SoftmaxStack, rotary

__all__ = ["Outputs", "forward", "normed", "scores_of"]


class Outputs(NamedTuple):
    """Rows behind the last layer."""

    history: torch.Tensor
    """[b, n, dim]"""
    candidates: torch.Tensor | None
    """[b, m, dim]"""


class _Rows(NamedTuple):
    """Candidates' part of a batch: their rows, and which history keys they see, [b, 1, m, n]."""

    x: torch.Tensor
    sees: torch.Tensor
    positions: torch.Tensor


def forward(
    model: RankingModel,
    history: torch.Tensor,
    candidates: torch.Tensor | None = None,
    sees: torch.Tensor | None = None,
    dense: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> Outputs:
    """Run history tokens [b, n, 4] and candidate tokens [b, m, 4], of which each sees the first `sees` [b, m] of the
    history. `dense` [b, m, f] are the candidates' features. Dropout is on embeddings and on what each layer adds."""
    n = history.shape[1]
    x = F.dropout(_embedded(model, history), dropout)
    rows = None
    if candidates is not None:
        assert sees is not None
        c = _embedded(model, candidates)
        if dense is not None:
            c = c + dense @ model.embedding.dense
        visible = torch.arange(n, device=x.device) < sees[:, None, :, None]
        rows = _Rows(F.dropout(c, dropout), visible, sees)
    stack = model.stack
    if isinstance(stack, HstuStack):
        return _hstu(stack, x, rows, dropout)
    assert isinstance(stack, SoftmaxStack)
    return _softmax(stack, x, rows, dropout)


def _embedded(model: RankingModel, tokens: torch.Tensor) -> torch.Tensor:
    """The sum of the tokens' rows; by F.embedding, whose gradient adds many tokens of one row in order and fast."""
    own = model.embedding
    tables = (own.table, own.kinds, own.gaps, own.positions)
    first, *rest = (F.embedding(tokens[..., column], table) for column, table in enumerate(tables))
    return sum(rest, first)


def normed(model: RankingModel, x: torch.Tensor) -> torch.Tensor:
    """Rows under the model's last norm: what its head reads."""
    x = x.to(model.norm_weight.dtype)
    return F.layer_norm(x, x.shape[-1:], model.norm_weight, model.norm_bias, model.config.norm_eps)


def scores_of(model: RankingModel, candidates: torch.Tensor) -> torch.Tensor:
    """Logits [b, m, tasks] of candidates' rows [b, m, dim]."""
    return normed(model, candidates) @ model.head_weight + model.head_bias


def _hstu(stack: HstuStack, x: torch.Tensor, rows: _Rows | None, dropout: float) -> Outputs:
    weighting = stack.weighting
    c = None if rows is None else rows.x
    n = x.shape[1]
    causal = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
    for index in range(len(stack.layers)):
        layer = stack.layers[index]
        assert isinstance(layer, HstuLayer)
        u, v, q, k = _project(layer, x)
        v, q, k = _heads(v / weighting.length, x), _heads(q * weighting.scale, x), _heads(k, x)
        attended = F.silu(q @ k.mT).masked_fill(~causal, 0.0) @ v
        if c is not None and rows is not None:
            cu, cv, cq, ck = _project(layer, c)
            cv, cq, ck = _heads(cv / weighting.length, c), _heads(cq * weighting.scale, c), _heads(ck, c)
            own = F.silu((cq * ck).sum(-1, keepdim=True))
            seen = F.silu(cq @ k.mT).masked_fill(~rows.sees, 0.0) @ v + own * cv
            c = _added(layer.finish, c, dropout, cu, _packed(seen))
        x = _added(layer.finish, x, dropout, u, _packed(attended))
    return Outputs(x, c)


def _project(layer: HstuLayer, x: torch.Tensor) -> Projected:
    norm = Norm(layer.input_norm_weight, layer.input_norm_bias, layer.norm_eps)
    silu_all = layer.silu_on == "uvqk"
    return project_plain(x.flatten(0, 1), norm, layer.uvqk_weight, layer.uvqk_bias, layer.heads, silu_all=silu_all)


def _softmax(stack: SoftmaxStack, x: torch.Tensor, rows: _Rows | None, dropout: float) -> Outputs:
    scale = stack.weighting.scale
    c = None if rows is None else rows.x
    b, n = x.shape[:2]
    wide = torch.promote_types(x.dtype, torch.float32)
    turn = rotary(torch.arange(n, device=x.device).repeat(b), stack.head_dim, wide)
    turn_candidates = None if rows is None else rotary(rows.positions.flatten(), stack.head_dim, wide)
    for index in range(len(stack.layers)):
        layer = stack.layers[index]
        assert isinstance(layer, SoftmaxLayer)
        q, k, v = (_heads(part, x) for part in layer.project(x.flatten(0, 1), turn))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        if c is not None and rows is not None and turn_candidates is not None:
            cq, ck, cv = (_heads(part, c) for part in layer.project(c.flatten(0, 1), turn_candidates))
            over = (cq @ k.mT).masked_fill(~rows.sees, -torch.inf)
            own = (cq * ck).sum(-1, keepdim=True)
            weights = (torch.cat((over, own), dim=-1) * scale).softmax(-1)
            seen = weights[..., :-1] @ v + weights[..., -1:] * cv
            c = _added(layer.finish, c, dropout, _packed(seen))
        x = _added(layer.finish, x, dropout, _packed(attended))
    return Outputs(x, c)


def _heads(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[b, head, row, d] from packed rows [b · row, head, d]."""
    return part.view(like.shape[0], like.shape[1], *part.shape[1:]).transpose(1, 2)


def _packed(part: torch.Tensor) -> torch.Tensor:
    """[b · row, head, d] from [b, head, row, d]."""
    return part.transpose(1, 2).flatten(0, 1)


def _added(finish: Callable[..., torch.Tensor], x: torch.Tensor, dropout: float, *parts: torch.Tensor) -> torch.Tensor:
    """What a layer makes of its rows; with dropout on what it adds to them."""
    flat = x.flatten(0, 1)
    out = finish(flat, *parts).to(flat.dtype)
    if dropout:
        out = flat + F.dropout(out - flat, dropout)
    return out.view_as(x)
