"""HSTU: layers of gated SiLU attention, in both published variants."""

import torch
from torch import nn

from relaygr.errors import InvalidInput
from relaygr.kernels import Attention, PageLayout, Ragged, ReferenceAttention, Silu
from relaygr.kernels.layer import LayerWeights, Norm, finish, project_into, score
from relaygr.model.config import Combine, ModelConfig, SiluOn
from relaygr.model.stack import BeforeLayer

__all__ = ["HstuLayer", "HstuStack"]


class HstuLayer(nn.Module):
    """x → LN → U, V, Q, K → attention A → combine(U, A, LN(A)) + x. Weights are [in, out]."""

    def __init__(
        self, dim: int, heads: int, head_dim: int, *, silu_on: SiluOn, combine: Combine, norm_eps: float
    ) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads, self.head_dim = heads, head_dim
        self.silu_on, self.combine, self.norm_eps = silu_on, combine, norm_eps
        self.input_norm_weight = nn.Parameter(torch.ones(dim))
        self.input_norm_bias = nn.Parameter(torch.zeros(dim))
        self.uvqk_weight = nn.Parameter(torch.empty(dim, 4 * width))
        self.uvqk_bias = nn.Parameter(torch.zeros(4 * width))
        self.output_norm_weight = nn.Parameter(torch.ones(width))
        self.output_norm_bias = nn.Parameter(torch.zeros(width))
        self.output_weight = nn.Parameter(torch.empty(3 * width if combine == "concat" else width, dim))

    def project_into(
        self, attention: Attention, x: torch.Tensor, pages: torch.Tensor, index: int, batch: Ragged
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """U and Q of new tokens, whose K and V go into their pages."""
        norm, silu_all = self._input_norm(), self.silu_on == "uvqk"
        return project_into(
            attention, x, norm, self.uvqk_weight, self.uvqk_bias, pages, index, batch, silu_all=silu_all
        )

    def finish(
        self, x: torch.Tensor, u: torch.Tensor, attended: torch.Tensor, limit: torch.Tensor | None = None
    ) -> torch.Tensor:
        concat = self.combine == "concat"
        return finish(x, u, attended, self._output_norm(), self.output_weight, concat=concat, limit=limit)

    def weights(self) -> LayerWeights:
        """The layer as kernels take it."""
        return LayerWeights(
            self._input_norm(),
            self.uvqk_weight,
            self.uvqk_bias,
            self._output_norm(),
            self.output_weight,
            silu_all=self.silu_on == "uvqk",
            concat=self.combine == "concat",
        )

    def _input_norm(self) -> Norm:
        return Norm(self.input_norm_weight, self.input_norm_bias, self.norm_eps)

    def _output_norm(self) -> Norm:
        return Norm(self.output_norm_weight, self.output_norm_bias, self.norm_eps)


class HstuStack(nn.Module):
    """HSTU layers. `scale_length` divides every attention sum and never depends on the batch."""

    def __init__(
        self,
        layers: int,
        dim: int,
        heads: int,
        head_dim: int,
        *,
        scale_length: float,
        silu_on: SiluOn = "u",
        combine: Combine = "concat",
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            HstuLayer(dim, heads, head_dim, silu_on=silu_on, combine=combine, norm_eps=norm_eps) for _ in range(layers)
        )
        self.dim, self.heads, self.head_dim = dim, heads, head_dim
        self.weighting = Silu(scale=head_dim**-0.5, length=scale_length)
        self.attention: Attention = ReferenceAttention()

    @classmethod
    def from_config(cls, config: ModelConfig) -> "HstuStack":
        return cls(
            config.layers,
            config.dim,
            config.heads,
            config.head_dim,
            scale_length=config.scale_length,
            silu_on=config.silu_on,
            combine=config.combine,
            norm_eps=config.norm_eps,
        )

    def layout(self) -> PageLayout:
        return PageLayout(len(self.layers), self.heads, self.head_dim, self._layer(0).uvqk_weight.dtype)

    def append(self, x: torch.Tensor, pages: torch.Tensor, batch: Ragged) -> None:
        last = len(self.layers) - 1
        for index in range(last):
            x = self._append_layer(index, x, pages, batch)
        self._layer(last).project_into(self.attention, x, pages, last, batch)

    def score(
        self, x: torch.Tensor, pages: torch.Tensor, batch: Ragged, before: BeforeLayer | None = None
    ) -> torch.Tensor:
        for index in range(len(self.layers)):
            if before is not None:
                before(index)
            layer = self._layer(index)
            x = score(self.attention, self.weighting, x, layer.weights(), pages, index, batch)
        return x

    @torch.inference_mode()
    def forward(self, x: torch.Tensor, num_candidates: int) -> torch.Tensor:
        """One user's embeddings [n + m, dim], history first, under the candidate mask; returns [n + m, dim].

        History is causal; each candidate sees the history and itself.
        """
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise InvalidInput("x", f"must be of shape [n + m, {self.dim}], not {tuple(x.shape)}")
        if not 0 <= num_candidates <= len(x):
            raise InvalidInput("num_candidates", f"is {num_candidates} of {len(x)} rows")
        n, layout = len(x) - num_candidates, self.layout()
        pages = layout.allocate(max(layout.count(n), 1), device=x.device)
        table = [range(len(pages))]
        history, candidates = x[:n], x[n:]
        if n:
            batch = Ragged.build([n], [0], table, x.device)
            for index in range(len(self.layers)):
                history = self._append_layer(index, history, pages, batch)
        if num_candidates:
            candidates = self.score(candidates, pages, Ragged.build([num_candidates], [n], table, x.device))
        return torch.cat((history, candidates))

    def _layer(self, index: int) -> HstuLayer:
        layer = self.layers[index]
        assert isinstance(layer, HstuLayer)
        return layer

    def _append_layer(self, index: int, x: torch.Tensor, pages: torch.Tensor, batch: Ragged) -> torch.Tensor:
        layer = self._layer(index)
        u, q = layer.project_into(self.attention, x, pages, index, batch)
        return layer.finish(x, u, self.attention.append(self.weighting, q, pages, index, batch), batch.limit)
