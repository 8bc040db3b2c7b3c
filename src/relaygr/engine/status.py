"""The state of an engine, and what it has done."""

from dataclasses import dataclass

__all__ = ["EngineCounts", "EngineStatus"]


@dataclass(frozen=True)
class EngineStatus:
    """A snapshot, in plain values."""

    version: str
    epoch: int
    actions: int
    """Of the model: a behaviour's is below this."""
    max_history: int
    page_bytes: int
    device_pages: int
    device_pages_free: int
    device_pages_pinned: int
    device_prefixes: int
    device_evictions: int
    device_shortened: int
    """How often a prefix lost a part of its head, to make room."""
    host_pages: int
    """Those that may be used by now."""
    host_pages_free: int
    host_pages_pinned: int
    host_prefixes: int
    host_evictions: int
    host_shortened: int
    leases: int
    ranks_under_way: int
    builds_under_way: int
    steps_in_flight: int
    copies_in_flight: int
    wait_ms: float
    """What a rank without hurry would wait for the device now."""
    device_busy_s: float
    written_back: int
    write_back_waiting: int
    """Prefixes that wait to be copied to host memory."""
    paths: dict[str, int]
    resident_left_by_earlier: int
    """Of the RESIDENT: those whose prefix an earlier request had left: it was not made by a pre-infer of their own."""
    outcomes: dict[str, int]
    faults: dict[str, int]
    prepared: dict[str, float]
    """What the device has prepared: launches captured, the bytes and the seconds that took."""
    cost_model_version: int
    cost_model_error: float
    """Of the last steps, the median of how far their time was off what was predicted, as a share of it."""
    cost_model: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class EngineCounts:
    """What the engine has done since it was opened, beyond what its status counts."""

    pre_infer_busy_s: float
    """Of the device's busy seconds those of pre-inference; a step that mixed is split by predicted time."""
    sources: dict[str, int]
    """What prefixes were had from, counted whenever a rank or a pre-infer got one."""
    reloads: int
    """Prefixes copied from host memory."""
    write_back_dropped: int
    """Prefixes not copied to host memory, because too many waited."""
