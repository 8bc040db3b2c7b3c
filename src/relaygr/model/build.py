"""Fresh models."""

import math

import torch

from relaygr.errors import InvalidInput
from relaygr.model.config import Combine, Family, ModelConfig, SiluOn
from relaygr.model.ranking import RankingModel

__all__ = ["build_model"]


def build_model(
    family: Family,
    *,
    layers: int,
    dim: int,
    heads: int,
    items: int,
    seed: int,
    actions: int = 16,
    tasks: int = 1,
    head_dim: int | None = None,
    scale_length: float | None = None,
    request_features: int = 0,
    candidate_features: int = 0,
    contexts: int | None = None,
    silu_on: SiluOn | None = None,
    combine: Combine | None = None,
    norm_eps: float | None = None,
) -> RankingModel:
    """A model with random weights, the same for the same arguments and seed, on the CPU in float32.

    The arguments are the fields of ModelConfig; None leaves one at its default. scale_length, silu_on and combine are
    choices of "hstu" alone. Raises InvalidInput naming the field for what cannot work.

    The weights are drawn so that scores are of the order of 1 and feel every behaviour: a check that two ways of
    computing agree would mean nothing on a model that hardly reads its history.
    """
    of_hstu = {"scale_length": scale_length, "silu_on": silu_on, "combine": combine}
    chosen = {field: value for field, value in of_hstu.items() if value is not None}
    if family == "softmax":
        for field in chosen:
            raise InvalidInput(field, 'is a choice of family "hstu"')
    chosen |= {field: value for field, value in (("contexts", contexts), ("norm_eps", norm_eps)) if value is not None}
    if head_dim is None:
        if not isinstance(dim, int) or not isinstance(heads, int) or heads < 1 or dim % heads:
            raise InvalidInput("heads", f"must divide dim, {dim}, unless head_dim is given")
        head_dim = dim // heads
    config = ModelConfig.from_dict(
        {
            "family": family,
            "layers": layers,
            "dim": dim,
            "heads": heads,
            "head_dim": head_dim,
            "items": items,
            "actions": actions,
            "tasks": tasks,
            "request_features": request_features,
            "candidate_features": candidate_features,
            **chosen,
        }
    )
    model = RankingModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name.rpartition(".")[2], parameter, generator)
    return model.eval()


def _draw(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Values and outputs are drawn wide, queries and keys narrower: attention is spread over all behaviours, and what
    it brings outweighs what a token was before. So one behaviour among n is felt like 1/√n, not like 1/n."""
    noise = torch.randn(parameter.shape, generator=generator)
    fan_in = noise / math.sqrt(parameter.shape[0])
    match name:
        case "table" | "kinds":
            parameter.copy_(noise)
        case "gaps" | "positions" | "dense":
            parameter.copy_(noise * 0.5)
        case _ if name.endswith("norm_weight"):
            parameter.copy_(1.0 + 0.1 * noise)
        case _ if name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        case "uvqk_weight":
            u, v, q, k = fan_in.chunk(4, dim=1)
            parameter.copy_(torch.cat((u, 2.0 * v, 0.7 * q, 0.7 * k), dim=1))
        case "qkv_weight":
            q, k, v = fan_in.chunk(3, dim=1)
            parameter.copy_(torch.cat((q, k, 3.0 * v), dim=1))
        case "output_weight":
            parameter.copy_(6.0 * fan_in)
        case "gate_up_weight" | "down_weight":
            parameter.copy_(3.0 * fan_in)
        case _:
            parameter.copy_(fan_in)
