"""What users import is small, and stays as it is."""

import dataclasses
import inspect
from enum import StrEnum

import pytest

import relaygr
from relaygr.model import checkpoint

NAMES = [
    "Candidates",
    "Decision",
    "Engine",
    "EngineConfig",
    "History",
    "Path",
    "PreInferOutcome",
    "Ranked",
    "SteppedWindow",
    "build_model",
    "errors",
]
ENUMS = {
    "Decision": "ADMIT NOT_AT_RISK RESIDENT NO_MEMORY NO_CAPACITY UNAVAILABLE",
    "Path": "RESIDENT WAITED RELOADED EXTENDED FULL TRUNCATED",
    "PreInferOutcome": "COMPUTED EXTENDED RELOADED RESIDENT JOINED NO_MEMORY NO_CAPACITY FAILED",
}
BUILD_MODEL = """
    family layers dim heads items seed actions tasks head_dim scale_length request_features candidate_features
    silu_on combine norm_eps
"""
ERRORS = ["DeadlineExceeded", "HistoryNeeded", "InvalidInput", "Overloaded", "RelayError", "Unavailable"]


def test_the_exported_names_are_these() -> None:
    assert sorted(relaygr.__all__) == NAMES
    assert sorted(relaygr.errors.__all__) == ERRORS


@pytest.mark.parametrize("name", NAMES)
def test_what_is_exported_is_there(name: str) -> None:
    assert getattr(relaygr, name) is not None


@pytest.mark.parametrize("name", ENUMS)
def test_outcomes_are_enums_whose_values_are_their_names(name: str) -> None:
    enum = getattr(relaygr, name)
    assert issubclass(enum, StrEnum)
    assert {member.name for member in enum} == set(ENUMS[name].split())
    assert all(member.value == member.name for member in enum)


def test_errors_are_relay_errors_and_bad_input_is_a_value_error() -> None:
    assert all(issubclass(getattr(relaygr.errors, name), relaygr.errors.RelayError) for name in ERRORS)
    assert issubclass(relaygr.errors.InvalidInput, ValueError)


@pytest.mark.parametrize("call", ["pre_infer", "rank", "swap_model", "evict"])
def test_the_engine_is_called_with_await(call: str) -> None:
    assert inspect.iscoroutinefunction(getattr(relaygr.Engine, call))


def test_the_engine_takes_the_arguments_that_others_rely_on() -> None:
    def arguments(call: str) -> list[str]:
        return list(inspect.signature(getattr(relaygr.Engine, call)).parameters)[1:]

    assert arguments("pre_infer") == ["user", "history", "context", "deadline"]
    assert arguments("rank") == ["user", "history", "candidates", "context", "request", "deadline"]
    assert arguments("swap_model") == ["model"]
    assert arguments("evict") == ["user"]
    assert arguments("status") == []


def test_models_are_built_and_read_with_the_arguments_that_others_rely_on() -> None:
    def arguments(call: object) -> list[str]:
        assert callable(call)
        return list(inspect.signature(call).parameters)

    assert set(arguments(relaygr.build_model)) >= set(BUILD_MODEL.split())
    assert arguments(checkpoint.save) == ["model", "path"]
    assert arguments(checkpoint.load) == ["path"]
    for read in (checkpoint.from_meta_stu, checkpoint.from_nvidia_hstu):
        assert arguments(read) == ["state_dict", "num_heads", "scale_length"]


def test_the_config_has_the_fields_and_defaults_that_others_rely_on() -> None:
    config = relaygr.EngineConfig()
    assert (config.device, config.dtype, config.device_cache, config.host_cache) == ("cpu", "float32", "1GiB", "4GiB")
    assert (config.on_miss, config.accept_epochs) == ("full", 0)
    names = {field.name for field in dataclasses.fields(config)}
    assert {"max_history", "lease_s"} <= names


def test_an_answer_has_the_fields_that_others_rely_on() -> None:
    assert relaygr.Ranked._fields == ("scores", "path", "used", "epoch", "timings")
