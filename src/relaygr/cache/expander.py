"""The expander's choice: how to have a prefix where it is needed, at the least cost to the device."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

__all__ = ["Option", "Source", "choose"]


class Source(StrEnum):
    """What a prefix is made from."""

    RESIDENT = "RESIDENT"
    """It is in device memory."""
    IN_FLIGHT = "IN_FLIGHT"
    """Someone is making it, or a part of it: wait, then append what is missing."""
    HOST = "HOST"
    """Copy it, or a part of it, from host memory, then append what is missing."""
    DEVICE = "DEVICE"
    """Append what is missing to the part in device memory."""
    NOTHING = "NOTHING"
    """Compute all of it."""


class Option(NamedTuple):
    """One way to a prefix, and its price."""

    source: Source
    base: int
    """Behaviours the source holds."""
    ready: float
    """When the prefix would be there, on the clock."""
    device_s: float
    """Seconds of device time it would take."""
    copied: int = 0
    """Pages that would come from host memory."""


def choose(options: Sequence[Option], needed: float) -> Option:
    """Of the options ready by `needed` the one that takes the least device time, the earliest where they are equal.

    If none is ready by then, the earliest. Where nothing else tells them apart, the one that has the most already.
    `options` is not empty.
    """
    in_time = [option for option in options if option.ready <= needed]
    if in_time:
        return min(in_time, key=lambda option: (option.device_s, option.ready, -option.base))
    return min(options, key=lambda option: (option.ready, -option.base))
