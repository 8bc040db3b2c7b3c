"""What a score is, computed the plain way: float64, dense, one masked attention over everything at once.

Written from docs/model.md and from nothing else: it reads a model's config and its weights by name, and shares no code
with pages, kernels, tokens or stacks. Import it in any test as `oracle`.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from relaygr.history import History
from relaygr.model import Candidates, RankingModel

__all__ = ["TOLERANCE", "assert_scores", "bucket", "mask", "oracle_scores", "row"]

Scores = npt.NDArray[np.float64]

TOLERANCE = 1e-5
"""Largest difference of scores in fp32, in units of max(1, the largest score)."""

_NO_GAP = 120
_NO_POSITION = 2304
_WORD = 2**64 - 1


def assert_scores(actual: Any, expected: Any) -> None:
    """max |Δ| ≤ 1e-5 × max(1, max |score|), same shape, all of it finite."""
    actual, expected = (np.asarray(scores, np.float64) for scores in (actual, expected))
    assert actual.shape == expected.shape, f"{actual.shape} scores where {expected.shape} were expected"
    assert np.isfinite(actual).all(), "scores are not finite"
    assert np.isfinite(expected).all(), "expected scores are not finite"
    allowed = TOLERANCE * max(1.0, float(np.abs(expected).max(initial=0.0)))
    worst = float(np.abs(actual - expected).max(initial=0.0))
    assert worst <= allowed, f"scores differ by {worst:.3g}; {allowed:.3g} is allowed"


def oracle_scores(
    model: RankingModel, history: History, candidates: Any, *, context: Any = None, request: Any = None
) -> Scores:
    """The scores of `candidates` behind `context` and `history`: float64 [m, tasks]."""
    config, weights = model.config, model.state_dict()
    items = candidates.items if isinstance(candidates, Candidates) else np.asarray(candidates)
    features = candidates.features if isinstance(candidates, Candidates) else None
    ids = [] if context is None else [int(i) for i in context]
    n, m = len(history), len(items)

    tokens = [
        (config.items + row(id_, config.contexts), config.actions + 1 + j, _NO_GAP, _NO_POSITION)
        for j, id_ in enumerate(ids)
    ]
    times = history.timestamps.tolist()
    for i, (item, action) in enumerate(zip(history.items.tolist(), history.actions.tolist(), strict=True)):
        gap = times[i] - times[i - 1] if i else 0
        tokens.append((row(item, config.items), action, bucket(gap, 2, 2**31 - 1), bucket(i, 7, 2**24 - 1)))
    end = bucket(n, 7, 2**24 - 1)
    tokens += [(row(int(item), config.items), config.actions, _NO_GAP, end) for item in items]

    where = torch.tensor(tokens)
    tables = ("embedding.table", "embedding.kinds", "embedding.gaps", "embedding.positions")
    x = torch.stack([weights[name][where[:, i]].double() for i, name in enumerate(tables)]).sum(0)
    dense = np.zeros((m, config.request_features + config.candidate_features))
    if request is not None:
        dense[:, : config.request_features] = np.asarray(request, np.float32)
    if features is not None:
        dense[:, config.request_features :] = features
    x[len(x) - m :] += torch.from_numpy(dense) @ weights["embedding.dense"].double()

    past = len(ids) + n
    visible = mask(past, m)
    layer = _hstu_layer if config.family == "hstu" else _softmax_layer
    for index in range(config.layers):
        prefix = f"stack.layers.{index}."
        named = {name[len(prefix) :]: w.double() for name, w in weights.items() if name.startswith(prefix)}
        x = layer(config, named, x, visible, past)
    x = _layer_norm(x[past:], weights["norm_weight"].double(), weights["norm_bias"].double(), config.norm_eps)
    scores: Scores = (x @ weights["head_weight"].double() + weights["head_bias"].double()).numpy()
    return scores


def row(id_: int, rows: int) -> int:
    """The row of an id in a table of `rows`: its own, or splitmix64 of it."""
    if id_ < rows:
        return id_
    z = (id_ + 0x9E3779B97F4A7C15) & _WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _WORD
    return (z ^ (z >> 31)) % rows


def bucket(value: int, bits: int, limit: int) -> int:
    """Exact below 2^(bits+1), then 2^bits buckets to each doubling."""
    value = min(value, limit)
    shift = max(value.bit_length() - 1 - bits, 0)
    return (shift << bits) + (value >> shift)


def mask(past: int, candidates: int) -> torch.Tensor:
    """True where row i sees row j: what is not later, and of the candidates only itself."""
    i, j = torch.arange(past + candidates)[:, None], torch.arange(past + candidates)[None, :]
    return (j <= i) & ((j < past) | (j == i))


def _silu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps) * weight + bias


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[rows, H·d] as [H, rows, d]."""
    return x.reshape(len(x), heads, -1).transpose(0, 1)


def _hstu_layer(
    config: Any, w: dict[str, torch.Tensor], x: torch.Tensor, visible: torch.Tensor, past: int
) -> torch.Tensor:
    normed = _layer_norm(x, w["input_norm_weight"], w["input_norm_bias"], config.norm_eps)
    u, v, q, k = (normed @ w["uvqk_weight"] + w["uvqk_bias"]).chunk(4, dim=1)
    u = _silu(u)
    if config.silu_on == "uvqk":
        v, q, k = _silu(v), _silu(q), _silu(k)
    v, q, k = (_heads(part, config.heads) for part in (v, q, k))
    weights = _silu((q / math.sqrt(config.head_dim)) @ k.transpose(1, 2)).mul_(visible)
    a = (weights @ v / config.scale_length).transpose(0, 1).reshape(len(x), -1)
    gated = u * _layer_norm(a, w["output_norm_weight"], w["output_norm_bias"], config.norm_eps)
    combined = torch.cat((u, a, gated), dim=1) if config.combine == "concat" else gated
    return x + combined @ w["output_weight"]


def _softmax_layer(
    config: Any, w: dict[str, torch.Tensor], x: torch.Tensor, visible: torch.Tensor, past: int
) -> torch.Tensor:
    normed = _rms_norm(x, w["attention_norm_weight"], config.norm_eps)
    q, k, v = (_heads(part, config.heads) for part in (normed @ w["qkv_weight"]).chunk(3, dim=1))
    angles = torch.outer(
        torch.arange(len(x)).clamp(max=past).double(),
        torch.tensor([10_000.0 ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)], dtype=torch.double),
    )
    turn = torch.polar(torch.ones_like(angles), angles)
    q, k = _turned(q, turn), _turned(k, turn)
    logits = ((q / math.sqrt(config.head_dim)) @ k.transpose(1, 2)).masked_fill_(~visible, -math.inf)
    a = (torch.softmax(logits, dim=-1) @ v).transpose(0, 1).reshape(len(x), -1)
    x = x + a @ w["output_weight"]
    gate, up = (_rms_norm(x, w["feed_norm_weight"], config.norm_eps) @ w["gate_up_weight"]).chunk(2, dim=1)
    return x + (_silu(gate) * up) @ w["down_weight"]


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Coordinate i of a head's first half and i of its second are one complex number, turned by its angle."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)
