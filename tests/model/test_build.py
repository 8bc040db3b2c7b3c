"""Fresh models: the same for the same arguments, and never of a shape that cannot work."""

from typing import Any

import numpy as np
import pytest
import torch

from paged import VARIANTS, small_model
from relaygr.errors import InvalidInput
from relaygr.history import History
from relaygr.model import Candidates, ModelConfig, build_model
from relaygr.model.config import MAX_CONTEXT

FINE: dict[str, Any] = {"layers": 1, "dim": 32, "heads": 2, "items": 10, "seed": 0}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_seed_gives_the_same_model_and_another_seed_another(variant: str) -> None:
    torch.manual_seed(1)
    first = small_model(variant, seed=7)
    torch.manual_seed(2)
    again, other = small_model(variant, seed=7), small_model(variant, seed=8)
    assert first.version() == again.version() != other.version()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
        assert not torch.equal(tensor, other.state_dict()[name]), name


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    build_model("hstu", **FINE)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_fresh_model_is_finite_fp32_on_the_cpu_and_in_evaluation() -> None:
    model = build_model("softmax", **FINE)
    assert not model.training
    for tensor in model.state_dict().values():
        assert tensor.dtype == torch.float32
        assert tensor.device.type == "cpu"
        assert tensor.isfinite().all()


def test_defaults_are_those_of_the_config() -> None:
    config = build_model("hstu", **FINE).config
    assert config == ModelConfig(family="hstu", layers=1, dim=32, heads=2, head_dim=16, items=10)
    assert (config.silu_on, config.combine, config.actions, config.tasks) == ("u", "concat", 16, 1)


def test_head_dim_need_not_divide_dim() -> None:
    model = build_model("hstu", **{**FINE, "heads": 3}, head_dim=8)
    assert (model.layout.heads, model.layout.head_dim, model.layout.layers) == (3, 8, 1)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("family", {"family": "rnn"}),
        ("family", {"family": None}),
        ("layers", {"layers": 0}),
        ("layers", {"layers": 2.0}),
        ("dim", {"dim": 0}),
        ("dim", {"dim": "32", "head_dim": 8}),
        ("heads", {"heads": 0}),
        ("heads", {"heads": 0, "head_dim": 8}),
        ("heads", {"heads": 3}),
        ("heads", {"heads": 2.0}),
        ("head_dim", {"head_dim": 0}),
        ("items", {"items": 0}),
        ("items", {"items": True}),
        ("contexts", {"contexts": 0}),
        ("actions", {"actions": 0}),
        ("tasks", {"tasks": -1}),
        ("request_features", {"request_features": -1}),
        ("candidate_features", {"candidate_features": -2}),
        ("scale_length", {"scale_length": 0}),
        ("scale_length", {"scale_length": float("nan")}),
        ("scale_length", {"scale_length": float("inf")}),
        ("norm_eps", {"norm_eps": 0.0}),
        ("norm_eps", {"norm_eps": "small"}),
        ("silu_on", {"silu_on": "v"}),
        ("combine", {"combine": "sum"}),
        ("head_dim", {"family": "softmax", "head_dim": 7}),
        ("scale_length", {"family": "softmax", "scale_length": 10.0}),
        ("silu_on", {"family": "softmax", "silu_on": "u"}),
        ("combine", {"family": "softmax", "combine": "gate"}),
    ],
)
def test_what_cannot_work_is_refused_by_the_name_of_its_field(field: str, change: dict[str, Any]) -> None:
    arguments = {"family": "hstu", **FINE, **change}
    with pytest.raises(InvalidInput) as caught:
        build_model(arguments.pop("family"), **arguments)
    assert caught.value.field == field


def test_a_config_survives_a_dictionary_and_refuses_half_of_one_or_more() -> None:
    config = small_model("nvidia").config
    assert ModelConfig.from_dict(config.to_dict()) == config
    with pytest.raises(InvalidInput, match="colour"):
        ModelConfig.from_dict(config.to_dict() | {"colour": "red"})
    with pytest.raises(InvalidInput, match="heads"):
        ModelConfig.from_dict({name: value for name, value in config.to_dict().items() if name != "heads"})


def test_what_a_model_cannot_read_is_refused_by_the_name_of_its_field() -> None:
    model = small_model("meta", actions=4)
    refused: list[tuple[str, Any]] = [
        ("history", lambda: model.check_history([1, 2])),
        ("actions", lambda: model.check_history(History([1], [4], [0]))),
        ("context", lambda: model.check_context(np.arange(MAX_CONTEXT + 1))),
        ("context", lambda: model.check_context([-1])),
        ("context", lambda: model.check_context([[1]])),
        ("context", lambda: model.check_context([0.5])),
        ("candidates", lambda: model.check_candidates([])),
        ("candidates", lambda: model.check_candidates([-1])),
        ("candidates", lambda: model.check_candidates([1.5])),
        ("features", lambda: model.check_candidates(Candidates([1], [[1.0]]))),
        ("features", lambda: Candidates([1], [[1.0], [2.0]])),
        ("features", lambda: Candidates([1], [1.0])),
        ("features", lambda: Candidates([1, 2], [[1.0], [2.0, 3.0]])),
        ("features", lambda: Candidates([1], [["a", "b"]])),
        ("features", lambda: Candidates([1], [[np.nan, 0.0]])),
        ("features", lambda: Candidates([1], [[1e300, 0.0]])),
        ("request", lambda: model.check_request([1.0])),
        ("request", lambda: model.check_request([[1.0, 2.0, 3.0]])),
        ("request", lambda: model.check_request([1.0, 2.0, np.inf])),
    ]
    for field, call in refused:
        with pytest.raises(InvalidInput) as caught:
            call()
        assert caught.value.field == field


def test_what_a_model_can_read_is_returned_ready_to_use() -> None:
    model = small_model("meta")
    history = History([1], [7], [0])
    assert model.check_history(history) is history
    assert model.check_context(None).tolist() == []
    assert model.check_context([3, 2**62]).tolist() == [3, 2**62]
    assert model.check_candidates([4, 4]).items.tolist() == [4, 4]
    assert model.check_request(None) is None
    request = model.check_request([1, 2, 3])
    assert request is not None
    assert request.dtype == np.float32
