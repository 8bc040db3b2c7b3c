"""Weights on disk, and weights of others. Safetensors only: no pickled code is ever run.

A checkpoint is one file: the tensors of `RankingModel.state_dict()`, and in the header's metadata the config (JSON)
and the epoch of the tables.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from relaygr.errors import InvalidInput
from relaygr.files import replacing
from relaygr.model.config import Combine, ModelConfig, SiluOn
from relaygr.model.hstu import HstuLayer, HstuStack
from relaygr.model.ranking import RankingModel

__all__ = ["from_meta_stu", "from_nvidia_hstu", "load", "save"]

_FORMAT = "relaygr-1"


def save(model: RankingModel, path: str | Path) -> None:
    """Write the model to `path`, whole or not at all."""
    metadata = {"format": _FORMAT, "config": json.dumps(model.config.to_dict()), "epoch": str(model.epoch)}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    with replacing(Path(path)) as partial:
        save_file(tensors, partial, metadata=metadata)


def load(path: str | Path) -> RankingModel:
    """The model saved at `path`, on the CPU in the dtype it was saved in. InvalidInput if it is no such file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise InvalidInput("path", f"{path} is not a readable safetensors file: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise InvalidInput("path", f"{path} is not a RelayGR checkpoint (format {metadata.get('format')!r})")
    try:
        values, epoch = json.loads(metadata["config"]), int(metadata["epoch"])
        config = ModelConfig.from_dict(dict(values))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput("path", f"{path} does not say what model it holds: {error}") from error
    with torch.device("meta"):  # nothing is allocated on the word of the config alone
        model = RankingModel(config, epoch=epoch)
    expected = model.state_dict()
    for name in sorted(expected.keys() ^ tensors.keys()):
        raise InvalidInput(name, f"is {'missing from' if name in expected else 'no tensor of the model in'} {path}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise InvalidInput(name, f"is {tuple(tensor.shape)}, its config says {tuple(expected[name].shape)}")
        if not tensor.is_floating_point() or tensor.dtype != tensors["head_weight"].dtype:
            raise InvalidInput(name, f"is of {tensor.dtype}; all tensors of a model are of one floating-point dtype")
    model.load_state_dict(tensors, assign=True)
    return model.eval().requires_grad_(False)


def from_meta_stu(state_dict: Mapping[str, torch.Tensor], *, num_heads: int, scale_length: float) -> HstuStack:
    """A stack from the tensors Meta's generative-recommenders saves for its STU layers.

    Reads `_stu_layers.{i}._uvqk_weight` and its siblings, under any prefix.
    """
    names = {
        "input_norm_weight": "_input_norm_weight",
        "input_norm_bias": "_input_norm_bias",
        "uvqk_weight": "_uvqk_weight",
        "uvqk_bias": "_uvqk_beta",
        "output_norm_weight": "_output_norm_weight",
        "output_norm_bias": "_output_norm_bias",
        "output_weight": "_output_weight",
    }
    layers = [
        {field: _take(layer, name, index) for field, name in names.items()}
        for index, layer in enumerate(_layers(state_dict, "_stu_layers"))
    ]
    return _stack(layers, num_heads, scale_length, silu_on="u", combine="concat", norm_eps=1e-6)


def from_nvidia_hstu(state_dict: Mapping[str, torch.Tensor], *, num_heads: int, scale_length: float) -> HstuStack:
    """A stack from the tensors NVIDIA's recsys-examples saves for its HSTU layers.

    Reads `_attention_layers.{i}.*`, under any prefix, in the three layouts that exist, told apart by name:
    fused layers keep `_linear_uvqk_weight` [in, out]; native ones `_linear_uvqk.weight` [out, in]; and native ones with
    `_output_ln_dropout_mul` order its rows [H, (u,v,q,k), d] where all others have [(u,v,q,k), H, d].
    """
    layers = [
        _nvidia_layer(layer, index, num_heads) for index, layer in enumerate(_layers(state_dict, "_attention_layers"))
    ]
    return _stack(layers, num_heads, scale_length, silu_on="uvqk", combine="gate", norm_eps=1e-5)


def _nvidia_layer(layer: Mapping[str, torch.Tensor], index: int, num_heads: int) -> dict[str, torch.Tensor]:
    native = "_linear_uvqk.weight" in layer
    heads_first = "_output_ln_dropout_mul.weight" in layer
    output_norm = "_output_ln_dropout_mul." if heads_first else "_output_layernorm_"
    if native:
        uvqk = _take(layer, "_linear_uvqk.weight", index).T
        output = _take(layer, "_linear_proj.weight", index).T
        bias = layer.get("_linear_uvqk.bias")
    else:
        uvqk = _take(layer, "_linear_uvqk_weight", index)
        output = _take(layer, "_linear_proj_weight", index)
        bias = layer.get("_linear_uvqk_bias")
    if bias is None:  # trained without one
        bias = uvqk.new_zeros(uvqk.shape[1])
    if heads_first:
        uvqk, bias = _parts_first(uvqk, num_heads), _parts_first(bias, num_heads)
    return {
        "input_norm_weight": _take(layer, "_input_layernorm_weight", index),
        "input_norm_bias": _take(layer, "_input_layernorm_bias", index),
        "uvqk_weight": uvqk,
        "uvqk_bias": bias,
        "output_norm_weight": _take(layer, output_norm + "weight", index),
        "output_norm_bias": _take(layer, output_norm + "bias", index),
        "output_weight": output,
    }


def _parts_first(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Last dimension from [H, (u,v,q,k), d] to [(u,v,q,k), H, d]."""
    _check_heads(num_heads, tensor.shape[-1])
    return tensor.reshape(*tensor.shape[:-1], num_heads, 4, -1).transpose(-3, -2).flatten(-3)


def _check_heads(num_heads: int, width: int) -> None:
    if num_heads < 1 or width % (4 * num_heads):
        raise InvalidInput("num_heads", f"{num_heads} does not divide a projection of width {width}")


def _layers(state_dict: Mapping[str, torch.Tensor], folder: str) -> list[dict[str, torch.Tensor]]:
    """The tensors of each layer by the name behind `folder.{i}.`; layers count from 0 without holes."""
    layers: dict[int, dict[str, torch.Tensor]] = {}
    prefixes = set()
    for name, tensor in state_dict.items():
        match = re.fullmatch(rf"(|.*\.){folder}\.(\d+)\.(.+)", name)
        if match:
            prefixes.add(match[1])
            layers.setdefault(int(match[2]), {})[match[3]] = tensor
    if not layers:
        raise InvalidInput("state_dict", f"has no tensor named {folder}.0.*")
    if len(prefixes) > 1:
        raise InvalidInput("state_dict", f"has several stacks of {folder}: {', '.join(sorted(prefixes))}")
    if sorted(layers) != list(range(len(layers))):
        raise InvalidInput("state_dict", f"has layers {sorted(layers)} of {folder}, with holes")
    return [layers[index] for index in range(len(layers))]


def _take(layer: Mapping[str, torch.Tensor], name: str, index: int) -> torch.Tensor:
    if name not in layer:
        raise InvalidInput("state_dict", f"has no {name} in layer {index}")
    return layer[name]


def _stack(
    layers: list[dict[str, torch.Tensor]],
    num_heads: int,
    scale_length: float,
    *,
    silu_on: SiluOn,
    combine: Combine,
    norm_eps: float,
) -> HstuStack:
    if layers[0]["uvqk_weight"].ndim != 2:
        raise InvalidInput("state_dict", "has a uvqk_weight in layer 0 that is not a matrix")
    dim, wide = layers[0]["uvqk_weight"].shape
    _check_heads(num_heads, wide)
    if not scale_length > 0:
        raise InvalidInput("scale_length", "must be positive")
    stack = HstuStack(
        len(layers),
        dim,
        num_heads,
        wide // 4 // num_heads,
        scale_length=scale_length,
        silu_on=silu_on,
        combine=combine,
        norm_eps=norm_eps,
    )
    for index, (module, tensors) in enumerate(zip(stack.layers, layers, strict=True)):
        assert isinstance(module, HstuLayer)
        for field, expected in module.state_dict().items():
            if tensors[field].shape != expected.shape:
                found, wanted = tuple(tensors[field].shape), tuple(expected.shape)
                raise InvalidInput("state_dict", f"has a {field} of shape {found} in layer {index}, not {wanted}")
        module.load_state_dict({field: tensor.detach().clone() for field, tensor in tensors.items()}, assign=True)
    return stack.eval().requires_grad_(False)
