"""Numbers that come from configuration or from the wire."""

from relaygr.errors import InvalidInput
from relaygr.shown import shown

__all__ = ["integer", "number"]


def number(field: str, value: object) -> float:
    """`value`, if it is a finite number; InvalidInput naming `field` otherwise."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidInput(field, f"must be a number, not {shown(value)}")
    if not float("-inf") < value < float("inf"):
        raise InvalidInput(field, f"must be finite, not {shown(value)}")
    return value


def integer(field: str, value: object, *, at_least: int) -> int:
    """`value`, if it is an integer of at least this much; InvalidInput naming `field` otherwise."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(field, f"must be an integer, not {shown(value)}")
    if value < at_least:
        raise InvalidInput(field, f"must be at least {at_least}, not {value}")
    return value
