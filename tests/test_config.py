"""A config that cannot be is refused when it is made, by the name of the field."""

import ast
import dataclasses
import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr import config as module
from relaygr.config import EngineConfig, parse_bytes
from relaygr.errors import InvalidInput


def test_every_field_has_a_default_and_a_sentence() -> None:
    assert EngineConfig() == EngineConfig()
    classes = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)]
    described = set()
    for node in classes:
        for before, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(before, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                assert isinstance(before.target, ast.Name)
                described.add(before.target.id)
    assert {field.name for field in dataclasses.fields(EngineConfig)} <= described


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().lease_s = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        (0, 0),
        (4096, 4096),
        ("17B", 17),
        ("1KiB", 1024),
        ("512MiB", 512 * 2**20),
        ("4GiB", 4 * 2**30),
        ("4 GiB", 4 * 2**30),
        ("  4GiB ", 4 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2**41),
        ("1KB", 1000),
        ("1MB", 10**6),
        ("3GB", 3 * 10**9),
    ],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_bytes("device_cache", text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", -1, "1 gib", "1Gi", "1e9", "1,5GiB", "1GiB2", "lots", None, True, 1.5e300]
)
def test_a_size_that_cannot_be_read_is_refused_by_name(text: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^host_cache: .*write a size such as"):
        parse_bytes("host_cache", text)


@given(st.integers(0, 2**50), st.sampled_from(("", "B", "KiB", "MiB")))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    factor = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20}[unit]
    assert parse_bytes("device_cache", f"{number}{unit}") == number * factor


def test_sizes_of_the_tiers_are_read_from_their_fields() -> None:
    config = EngineConfig(device_cache="3MiB", host_cache="0")
    assert (config.device_bytes(), config.host_bytes) == (3 * 2**20, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "tpu"),
        ("device", "cuda:one"),
        ("device", "cuda:"),
        ("device", None),
        ("dtype", "float64"),
        ("dtype", None),
        ("on_miss", "fail"),
        ("on_miss", True),
        ("device_cache", "much"),
        ("host_cache", "-1"),
        ("max_history", 0),
        ("max_history", -5),
        ("max_history", 1.5),
        ("max_history", "1000"),
        ("max_history", True),
        ("lease_s", 0.0),
        ("lease_s", -1.0),
        ("lease_s", float("nan")),
        ("lease_s", float("inf")),
        ("lease_s", "2"),
        ("accept_epochs", -1),
        ("accept_epochs", 0.5),
        ("accept_epochs", None),
        ("pre_infer_share", 0.0),
        ("pre_infer_share", 1.01),
        ("pre_infer_share", float("nan")),
        ("pre_infer_share", "0.5"),
        ("lease_share", 0),
        ("lease_share", 2),
        ("lease_share", None),
        ("step_ms", 0),
        ("step_ms", float("nan")),
        ("step_ms", []),
        ("max_ranks", 0),
        ("max_ranks", 2.5),
        ("max_ranks", False),
        ("write_back_queue", 0),
        ("write_back_queue", "64"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}: "):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "cuda:12"),
        ("device", "simulated"),
        ("max_history", 1),
        ("max_history", None),
        ("lease_s", 1),
        ("accept_epochs", 0),
        ("pre_infer_share", 1),
        ("lease_share", 1.0),
        ("lease_share", 1e-9),
        ("max_ranks", 1),
        ("write_back_queue", 1),
        ("on_miss", "truncate"),
        ("dtype", "bfloat16"),
        ("host_cache", "0"),
    ],
)
def test_the_edges_of_what_can_be_are_taken(field: str, value: Any) -> None:
    assert getattr(EngineConfig(**{field: value}), field) == value


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="device_cashe"):
        EngineConfig(device_cashe="1GiB")  # type: ignore[call-arg]
