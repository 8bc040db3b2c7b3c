"""Weights on disk and weights of others."""

import json
import math
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import oracle
from paged import VARIANTS, Pool, random_user, small_model
from relaygr.errors import InvalidInput
from relaygr.model import RankingModel, checkpoint
from relaygr.model.hstu import HstuStack

every_variant = pytest.mark.parametrize("variant", VARIANTS)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_model_comes_back_bit_by_bit(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = small_model(variant).to(dtype)
    checkpoint.save(model, tmp_path / "model")
    loaded = checkpoint.load(str(tmp_path / "model"))
    assert loaded.config == model.config
    assert loaded.version() == model.version()
    assert loaded.layout == model.layout
    assert not loaded.training
    for name, tensor in model.state_dict().items():
        again = loaded.state_dict()[name]
        assert again.dtype == dtype
        assert torch.equal(again, tensor), name
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@every_variant
def test_a_loaded_model_scores_the_same(variant: str, tmp_path: Path) -> None:
    model = small_model(variant)
    checkpoint.save(model, tmp_path / "model")
    user = random_user(np.random.default_rng(0), model, behaviours=50)
    pools = [Pool(m, [user], np.random.default_rng(1)) for m in (model, checkpoint.load(tmp_path / "model"))]
    one, other = (pool.append_all().score()[0] for pool in pools)
    assert np.array_equal(one, other)


def test_the_epoch_travels_and_is_no_part_of_the_version(tmp_path: Path) -> None:
    model = small_model("meta")
    version = model.version()
    model.epoch = 41
    checkpoint.save(model, tmp_path / "model")
    assert checkpoint.load(tmp_path / "model").epoch == 41
    assert model.version() == version


def test_saving_over_a_model_replaces_it(tmp_path: Path) -> None:
    checkpoint.save(small_model("meta", seed=1), tmp_path / "model")
    other = small_model("softmax", seed=2)
    checkpoint.save(other, tmp_path / "model")
    assert checkpoint.load(tmp_path / "model").version() == other.version()


@every_variant
def test_the_version_changes_with_every_dense_weight_and_not_with_the_item_table(variant: str) -> None:
    model = small_model(variant, layers=1)
    versions = {model.version()}
    for tensor in (tensor for name, tensor in model.state_dict().items() if name != "embedding.table"):
        last = tensor.view(-1)[-1:]
        kept = last.clone()
        last.view(torch.int32).bitwise_xor_(1)
        versions.add(model.version())
        last.copy_(kept)
    assert len(versions) == len(model.state_dict())
    before = model.version()
    model.state_dict()["embedding.table"].mul_(2)
    assert model.version() == before


def test_the_version_changes_with_every_field_of_the_config_and_with_the_dtype() -> None:
    model = small_model("meta")
    changes: dict[str, Any] = {
        **{name: value + 1 for name, value in model.config.to_dict().items() if isinstance(value, int | float)},
        **{"family": "softmax", "silu_on": "uvqk", "combine": "gate"},
    }
    assert changes.keys() == model.config.to_dict().keys()
    versions = {model.version()}
    for field, value in changes.items():
        other = small_model("meta")
        other.config = replace(other.config, **{field: value})
        versions.add(other.version())
    versions.add(small_model("meta").double().version())
    assert len(versions) == len(changes) + 2


# Files that are no checkpoint


def parts(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a saved model."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return load_file(path), json.loads(data[8 : 8 + length])["__metadata__"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    checkpoint.save(small_model("meta", layers=1), path)
    return path


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 5000, -1])
def test_a_truncated_file_is_refused(saved: Path, keep: int) -> None:
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(InvalidInput, match="path"):
        checkpoint.load(saved)


@pytest.mark.parametrize("content", [b"", b"hello, world, this is no model", bytes(4096), b"\xff" * 64])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model").write_bytes(content)
    with pytest.raises(InvalidInput, match="path"):
        checkpoint.load(tmp_path / "model")


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(InvalidInput, match="path"):
            checkpoint.load(path)


def test_safetensors_of_someone_else_are_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model")
    with pytest.raises(InvalidInput, match="not a RelayGR checkpoint"):
        checkpoint.load(tmp_path / "model")


@pytest.mark.parametrize(
    "change",
    [
        {"format": "relaygr-999"},
        {"config": "{"},
        {"config": "[]"},
        {"config": "3"},
        {"config": '{"family": "hstu"}'},
        {"config": '{"colour": "red"}'},
        {"epoch": "soon"},
        {"epoch": None},
        {"config": None},
    ],
)
def test_damaged_metadata_is_refused(saved: Path, change: dict[str, str | None]) -> None:
    tensors, metadata = parts(saved)
    merged = {name: value for name, value in {**metadata, **change}.items() if value is not None}
    save_file(tensors, saved, metadata=merged)
    with pytest.raises(InvalidInput, match="path"):
        checkpoint.load(saved)


@pytest.mark.parametrize(("items", "said"), [(2 * 10**9, r"embedding\.table"), (2**31, "items")])
def test_a_config_that_promises_more_than_there_is_allocates_nothing(saved: Path, items: int, said: str) -> None:
    tensors, metadata = parts(saved)
    config = {**json.loads(metadata["config"]), "items": items}
    save_file(tensors, saved, metadata={**metadata, "config": json.dumps(config)})
    with pytest.raises(InvalidInput, match=said):
        checkpoint.load(saved)


def test_tensors_that_do_not_fit_the_config_are_refused_by_name(saved: Path) -> None:
    tensors, metadata = parts(saved)
    wrong: dict[str, dict[str, torch.Tensor]] = {
        "head_bias": {name: t for name, t in tensors.items() if name != "head_bias"},
        "extra": {**tensors, "extra": torch.ones(1)},
        "norm_weight": {**tensors, "norm_weight": torch.ones(7)},
        "norm_bias": {**tensors, "norm_bias": tensors["norm_bias"].to(torch.int32)},
        "head_weight": {**tensors, "head_weight": tensors["head_weight"].to(torch.int32)},
        "embedding.gaps": {**tensors, "embedding.gaps": tensors["embedding.gaps"].half()},
    }
    for name, changed in wrong.items():
        save_file(changed, saved, metadata=metadata)
        with pytest.raises(InvalidInput) as caught:
            checkpoint.load(saved)
        assert name in str(caught.value) or name == "head_weight"


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize("zipped", [True, False])
def test_loading_never_unpickles(tmp_path: Path, zipped: bool) -> None:
    torch.save({"weight": torch.ones(2), "bomb": Bomb()}, tmp_path / "a", _use_new_zipfile_serialization=zipped)
    (tmp_path / "b").write_bytes(pickle.dumps(Bomb()))
    for name in ("a", "b"):
        with pytest.raises(InvalidInput, match="path"):
            checkpoint.load(tmp_path / name)


# Weights of others, against their published formulas

DIM, HEADS, WIDTH, LAYERS = 24, 3, 8, 2
SCALE = 50.0


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(shape[0])


def plain_layers(concat: bool) -> list[dict[str, torch.Tensor]]:
    """Weights [in, out], the projection as separate u, v, q, k."""
    total = HEADS * WIDTH
    layers = []
    for layer in range(LAYERS):
        seed = 100 * layer
        weights = {name: 2 * draw(DIM, total, seed=seed + i) for i, name in enumerate("uvqk")}
        weights |= {f"{name}_bias": draw(total, seed=seed + 10 + i) for i, name in enumerate("uvqk")}
        weights |= {
            "in_weight": 1 + draw(DIM, seed=seed + 20),
            "in_bias": draw(DIM, seed=seed + 21),
            "out_weight": 1 + draw(total, seed=seed + 22),
            "out_bias": draw(total, seed=seed + 23),
            "output": 2 * draw(3 * total if concat else total, DIM, seed=seed + 24),
        }
        layers.append(weights)
    return layers


def published(layers: list[dict[str, torch.Tensor]], x: torch.Tensor, candidates: int, *, concat: bool) -> torch.Tensor:
    """Meta's STU (concat) or NVIDIA's HSTU layer as they are published, dense and in float64.

    Meta: SiLU on u alone, [u, a, u·LN(a)] through the output, ε 1e-6. NVIDIA: SiLU on all four, u·LN(a), ε 1e-5.
    """
    eps = 1e-6 if concat else 1e-5
    x = x.double()
    visible = oracle.mask(len(x) - candidates, candidates)
    for single in layers:
        w = {name: tensor.double() for name, tensor in single.items()}
        mean, var = x.mean(1, keepdim=True), x.var(1, correction=0, keepdim=True)
        normed = (x - mean) * (var + eps) ** -0.5 * w["in_weight"] + w["in_bias"]
        u, v, q, k = (normed @ w[name] + w[f"{name}_bias"] for name in "uvqk")
        u = u / (1 + torch.exp(-u))
        if not concat:
            v, q, k = (part / (1 + torch.exp(-part)) for part in (v, q, k))
        heads = []
        for h in range(HEADS):
            mine = slice(h * WIDTH, (h + 1) * WIDTH)
            s = q[:, mine] @ k[:, mine].T / math.sqrt(WIDTH)
            heads.append((s / (1 + torch.exp(-s)) / SCALE * visible) @ v[:, mine])
        a = torch.cat(heads, dim=1)
        mean, var = a.mean(1, keepdim=True), a.var(1, correction=0, keepdim=True)
        gated = u * ((a - mean) * (var + eps) ** -0.5 * w["out_weight"] + w["out_bias"])
        x = x + (torch.cat((u, a, gated), dim=1) if concat else gated) @ w["output"]
    return x


def meta_names(layers: list[dict[str, torch.Tensor]], prefix: str = "") -> dict[str, torch.Tensor]:
    names: dict[str, torch.Tensor] = {}
    for i, w in enumerate(layers):
        at = f"{prefix}_stu_layers.{i}."
        names[at + "_uvqk_weight"] = torch.cat([w[name] for name in "uvqk"], dim=1)
        names[at + "_uvqk_beta"] = torch.cat([w[f"{name}_bias"] for name in "uvqk"])
        names |= {at + "_input_norm_weight": w["in_weight"], at + "_input_norm_bias": w["in_bias"]}
        names |= {at + "_output_norm_weight": w["out_weight"], at + "_output_norm_bias": w["out_bias"]}
        names[at + "_output_weight"] = w["output"]
    return names


def by_head(parts_: list[torch.Tensor]) -> torch.Tensor:
    """u, v, q, k of [..., H·d] each as [..., H, (u,v,q,k), d], flattened."""
    split = [part.reshape(*part.shape[:-1], HEADS, WIDTH) for part in parts_]
    return torch.stack(split, dim=-2).flatten(-3)


def nvidia_names(
    layers: list[dict[str, torch.Tensor]], layout: str, prefix: str = "", *, bias: bool = True
) -> dict[str, torch.Tensor]:
    """Layouts: fused; native; native-mul (with `_output_ln_dropout_mul`)."""
    names: dict[str, torch.Tensor] = {}
    for i, w in enumerate(layers):
        at = f"{prefix}_attention_layers.{i}."
        weights, biases = [w[name] for name in "uvqk"], [w[f"{name}_bias"] for name in "uvqk"]
        if layout == "native-mul":
            uvqk, uvqk_bias = by_head(weights), by_head(biases)
        else:
            uvqk, uvqk_bias = torch.cat(weights, dim=1), torch.cat(biases)
        if layout == "fused":
            names |= {at + "_linear_uvqk_weight": uvqk, at + "_linear_proj_weight": w["output"]}
        else:
            names |= {at + "_linear_uvqk.weight": uvqk.T.contiguous(), at + "_linear_proj.weight": w["output"].T}
        if bias:
            names[at + ("_linear_uvqk_bias" if layout == "fused" else "_linear_uvqk.bias")] = uvqk_bias
        norm = "_output_ln_dropout_mul." if layout == "native-mul" else "_output_layernorm_"
        names |= {at + norm + "weight": w["out_weight"], at + norm + "bias": w["out_bias"]}
        names |= {at + "_input_layernorm_weight": w["in_weight"], at + "_input_layernorm_bias": w["in_bias"]}
    return names


def agrees(stack: HstuStack, layers: list[dict[str, torch.Tensor]], *, concat: bool) -> None:
    for n, m in ((40, 6), (1, 1), (0, 3), (150, 0), (200, 5)):
        x = draw(n + m, DIM, seed=7) * math.sqrt(n + m)
        oracle.assert_scores(stack(x, m), published(layers, x, m, concat=concat))


PREFIXES = ["", "_hstu_block.", "module.model._hstu_block."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_metas_weights_give_metas_formula(prefix: str) -> None:
    layers = plain_layers(concat=True)
    names = meta_names(layers, prefix) | {"unrelated.weight": torch.ones(1)}
    agrees(checkpoint.from_meta_stu(names, num_heads=HEADS, scale_length=SCALE), layers, concat=True)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("layout", ["fused", "native", "native-mul"])
def test_nvidias_weights_give_nvidias_formula_in_every_layout(layout: str, prefix: str) -> None:
    layers = plain_layers(concat=False)
    stack = checkpoint.from_nvidia_hstu(nvidia_names(layers, layout, prefix), num_heads=HEADS, scale_length=SCALE)
    agrees(stack, layers, concat=False)


@pytest.mark.parametrize("layout", ["fused", "native", "native-mul"])
def test_a_projection_trained_without_bias_has_a_bias_of_zero(layout: str) -> None:
    layers = plain_layers(concat=False)
    names = nvidia_names(layers, layout, bias=False)
    for w in layers:
        w.update({f"{name}_bias": torch.zeros(HEADS * WIDTH) for name in "uvqk"})
    agrees(checkpoint.from_nvidia_hstu(names, num_heads=HEADS, scale_length=SCALE), layers, concat=False)


def test_layers_are_read_in_the_order_of_their_numbers() -> None:
    layers = [plain_layers(concat=True)[i % 2] for i in range(12)]
    names = dict(reversed(meta_names(layers).items()))
    stack = checkpoint.from_meta_stu(names, num_heads=HEADS, scale_length=SCALE)
    x = draw(20, DIM, seed=7)
    oracle.assert_scores(stack(x, 4), published(layers, x, 4, concat=True))


def test_weights_of_others_are_copied() -> None:
    names = meta_names(plain_layers(concat=True))
    stack = checkpoint.from_meta_stu(names, num_heads=HEADS, scale_length=SCALE)
    x = draw(9, DIM, seed=1)
    before = stack(x, 2)
    for tensor in names.values():
        tensor.zero_()
    assert torch.equal(stack(x, 2), before)


@pytest.mark.parametrize("layout", ["meta", "fused", "native", "native-mul"])
def test_what_is_missing_or_misshapen_is_named(layout: str) -> None:
    concat = layout == "meta"
    full = meta_names(plain_layers(concat)) if concat else nvidia_names(plain_layers(concat), layout)
    read = checkpoint.from_meta_stu if concat else checkpoint.from_nvidia_hstu
    for name in full:
        if "uvqk" in name and name.endswith("bias"):
            continue  # NVIDIA's may be absent
        with pytest.raises(InvalidInput) as caught:
            read({key: t for key, t in full.items() if key != name}, num_heads=HEADS, scale_length=SCALE)
        told = str(caught.value)
        if not name.endswith(("_linear_uvqk.weight", "_output_ln_dropout_mul.weight")):  # these tell layouts apart
            assert name.split(".", 2)[2] in told
        assert f"in layer {name.split('.')[1]}" in told
    for name, tensor in full.items():
        with pytest.raises(InvalidInput, match=r"shape|width|matrix"):
            read({**full, name: torch.cat((tensor, tensor))}, num_heads=HEADS, scale_length=SCALE)


def test_other_problems_with_weights_of_others_are_named() -> None:
    names = meta_names(plain_layers(concat=True))
    others = nvidia_names(plain_layers(concat=False), "native-mul")
    for num_heads in (0, -1, 5):
        with pytest.raises(InvalidInput, match="num_heads"):
            checkpoint.from_meta_stu(names, num_heads=num_heads, scale_length=SCALE)
        with pytest.raises(InvalidInput, match="num_heads"):
            checkpoint.from_nvidia_hstu(others, num_heads=num_heads, scale_length=SCALE)
    for scale_length in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidInput, match="scale_length"):
            checkpoint.from_meta_stu(names, num_heads=HEADS, scale_length=scale_length)
    with pytest.raises(InvalidInput, match="_stu_layers"):
        checkpoint.from_meta_stu(others, num_heads=HEADS, scale_length=SCALE)
    with pytest.raises(InvalidInput, match="_attention_layers"):
        checkpoint.from_nvidia_hstu({}, num_heads=HEADS, scale_length=SCALE)
    with pytest.raises(InvalidInput, match="several stacks"):
        checkpoint.from_meta_stu(names | meta_names(plain_layers(True), "b."), num_heads=HEADS, scale_length=SCALE)
    with pytest.raises(InvalidInput, match="holes"):
        checkpoint.from_meta_stu(
            {name.replace("layers.1", "layers.2"): t for name, t in names.items()}, num_heads=HEADS, scale_length=SCALE
        )


def test_a_stack_refuses_rows_and_counts_that_do_not_fit() -> None:
    stack = checkpoint.from_meta_stu(meta_names(plain_layers(True)), num_heads=HEADS, scale_length=SCALE)
    for x, m, field in ((torch.ones(3, DIM + 1), 1, "x"), (torch.ones(DIM), 1, "x"), (torch.ones(3, DIM), 4, "num_")):
        with pytest.raises(InvalidInput, match=field):
            stack(x, m)
    assert stack(torch.ones(0, DIM), 0).shape == (0, DIM)


def test_a_ranking_model_is_a_module_of_named_tensors_alone() -> None:
    model = small_model("meta")
    assert isinstance(model, RankingModel)
    assert set(dict(model.named_parameters())) == set(model.state_dict())
