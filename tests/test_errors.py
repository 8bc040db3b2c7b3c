import pickle

import pytest

from relaygr import errors
from relaygr.errors import DeadlineExceeded, InvalidInput, Overloaded, RelayError, Unavailable


def test_every_error_is_a_relay_error() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), RelayError), name


def test_invalid_input_is_a_value_error_that_names_its_field() -> None:
    error = InvalidInput("timestamps", "go backwards at behaviour 3")
    assert isinstance(error, ValueError)
    assert error.field == "timestamps"
    assert error.problem == "go backwards at behaviour 3"
    assert str(error) == "timestamps: go backwards at behaviour 3"


def test_invalid_input_crosses_processes_whole() -> None:
    error = pickle.loads(pickle.dumps(InvalidInput("items", "must not be negative")))
    assert type(error) is InvalidInput
    assert (error.field, error.problem, str(error)) == (
        "items",
        "must not be negative",
        "items: must not be negative",
    )


@pytest.mark.parametrize("kind", [RelayError, Overloaded, DeadlineExceeded, Unavailable])
def test_other_errors_cross_processes_and_are_not_the_callers_fault(kind: type[RelayError]) -> None:
    error = pickle.loads(pickle.dumps(kind("why")))
    assert type(error) is kind
    assert str(error) == "why"
    assert not isinstance(error, ValueError)
