"""A softmax decoder: RMSNorm, rotary positions, SwiGLU. Nothing around it knows which family runs."""

import torch
import torch.nn.functional as F
from torch import nn

from relaygr.kernels import Attention, PageLayout, Ragged, ReferenceAttention, Softmax
from relaygr.model.config import ModelConfig
from relaygr.model.stack import BeforeLayer

__all__ = ["SoftmaxLayer", "SoftmaxStack", "rotary"]

_ROTARY_BASE = 10_000.0


def rotary(positions: torch.Tensor, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [t, 1, head_dim / 2] of the angles at these positions.

    Angles are taken in float64: at position 100,000 a float32 angle is already off by a hundredth of a radian.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angles = positions.to(torch.float64)[:, None] * _ROTARY_BASE**-exponents
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class SoftmaxLayer(nn.Module):
    """x + attention(RMS(x)), then + SwiGLU(RMS(x)). Weights are [in, out]."""

    def __init__(self, dim: int, heads: int, head_dim: int, *, norm_eps: float) -> None:
        super().__init__()
        width = heads * head_dim
        hidden = -(-8 * dim // 3 // 32) * 32
        self.heads, self.head_dim, self.norm_eps = heads, head_dim, norm_eps
        self.attention_norm_weight = nn.Parameter(torch.ones(dim))
        self.qkv_weight = nn.Parameter(torch.empty(dim, 3 * width))
        self.output_weight = nn.Parameter(torch.empty(width, dim))
        self.feed_norm_weight = nn.Parameter(torch.ones(dim))
        self.gate_up_weight = nn.Parameter(torch.empty(dim, 2 * hidden))
        self.down_weight = nn.Parameter(torch.empty(hidden, dim))

    def project(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """q, k (both turned to their positions) and v, [t, H, d] each."""
        normed = F.rms_norm(x, x.shape[-1:], self.attention_norm_weight, self.norm_eps)
        q, k, v = (part.view(len(x), self.heads, self.head_dim) for part in (normed @ self.qkv_weight).chunk(3, dim=-1))
        return _turn(q, *turn), _turn(k, *turn), v

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = torch.addmm(x, attended.flatten(1), self.output_weight)
        normed = F.rms_norm(x, x.shape[-1:], self.feed_norm_weight, self.norm_eps)
        gate, up = (normed @ self.gate_up_weight).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate) * up, self.down_weight)


class SoftmaxStack(nn.Module):
    """Softmax decoder layers. Rotary positions count tokens, context included; candidates stand behind the last."""

    def __init__(self, layers: int, dim: int, heads: int, head_dim: int, *, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SoftmaxLayer(dim, heads, head_dim, norm_eps=norm_eps) for _ in range(layers))
        self.heads, self.head_dim = heads, head_dim
        self.weighting = Softmax(scale=head_dim**-0.5)
        self.attention: Attention = ReferenceAttention()

    @classmethod
    def from_config(cls, config: ModelConfig) -> "SoftmaxStack":
        return cls(config.layers, config.dim, config.heads, config.head_dim, norm_eps=config.norm_eps)

    def layout(self) -> PageLayout:
        return PageLayout(len(self.layers), self.heads, self.head_dim, self._layer(0).qkv_weight.dtype)

    def append(self, x: torch.Tensor, pages: torch.Tensor, batch: Ragged) -> None:
        turn = self._turn_of(batch.token_positions(), x)
        last = len(self.layers) - 1
        for index in range(len(self.layers)):
            layer = self._layer(index)
            q, k, v = layer.project(x, turn)
            self.attention.write(k, v, pages, index, batch)
            if index < last:
                x = layer.finish(x, self.attention.append(self.weighting, q, pages, index, batch))

    def score(
        self, x: torch.Tensor, pages: torch.Tensor, batch: Ragged, before: BeforeLayer | None = None
    ) -> torch.Tensor:
        turn = self._turn_of(batch.candidate_positions(), x)
        for index in range(len(self.layers)):
            if before is not None:
                before(index)
            layer = self._layer(index)
            q, k, v = layer.project(x, turn)
            x = layer.finish(x, self.attention.score(self.weighting, q, k, v, pages, index, batch))
        return x

    def _layer(self, index: int) -> SoftmaxLayer:
        layer = self.layers[index]
        assert isinstance(layer, SoftmaxLayer)
        return layer

    def _turn_of(self, positions: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary(positions, self.head_dim, torch.promote_types(x.dtype, torch.float32))
