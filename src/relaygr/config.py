"""Configuration of components: every field has a default and a sentence."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from relaygr.errors import InvalidInput
from relaygr.shown import shown

__all__ = ["EngineConfig", "OnMiss", "Reuse", "Tables", "parse_bytes"]

OnMiss = Literal["full", "truncate"]
Reuse = Literal["none", "whole", "extend"]
Tables = Literal["auto", "device", "host"]

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(field: str, text: str | int) -> int:
    """A number of bytes from "512MiB", "4 GiB", "0" or a plain integer; InvalidInput naming `field` otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2] not in _UNITS:
        raise InvalidInput(field, f'is {shown(text)}; write a size such as "512MiB", "4GiB" or "0"')
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True)
class EngineConfig:
    """One engine on one device."""

    device: str = "cpu"
    """Where the model runs: "cpu", or "cuda", "cuda:1" …; "simulated": an instance without a model, to try servers and
    clients on. Scores are made up and steps take what a GPU would."""
    dtype: str = "float32"
    """What the model and its pages are cast to: "float32", "bfloat16", "float16"."""
    device_cache: str = "1GiB"
    """Memory for KV pages on the device: "60GiB", or on a GPU a share of what is free there, "80%"."""
    host_cache: str = "4GiB"
    """Memory for KV pages in this machine's DRAM; "0": none."""
    on_miss: OnMiss = "full"
    """What a rank does when its prefix cannot be there in time: "full" tries all the same, and raises DeadlineExceeded
    when late; "truncate" ranks on the newest behaviours that fit, and says so."""
    reuse: Reuse = "extend"
    """What is used of the prefixes that other calls left: "extend" appends what is missing to them; "whole" takes those
    that lack nothing; "none": nothing is kept, no pre-infer admitted, every rank computes all of its history."""
    max_history: int | None = None
    """The longest history taken; that much memory is always kept for ranks. None: half of what device_cache holds."""
    lease_s: float = 2.0
    """How long a pre-inferred prefix is kept for a rank that has not come."""
    accept_epochs: int = 0
    """By how many epochs the tables of a cached prefix may be behind the model's. The answer names the epoch used."""
    pre_infer_share: float = 0.7
    """The share of device time that pre-inference may take."""
    lease_share: float = 0.8
    """The share of the device cache that may be pinned when a pre-infer is admitted."""
    step_ms: float = 10.0
    """About the longest one step on the device should take: what an urgent rank may have to wait behind."""
    max_ranks: int = 4096
    """Ranks under way at once; one more raises Overloaded."""
    write_back_queue: int = 64
    """Prefixes waiting to be copied to host memory; past that they are dropped, oldest first."""
    tables: Tables = "auto"
    """Where embedding tables lie: "device", "host" (pinned, with the rows in demand on the device), or "auto": on the
    device while they take less than half of its free memory."""
    canary: bool = False
    """Keep a checksum of every page and check it before the page is read. Slow; for finding faults."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"cpu|cuda(:\d+)?|simulated", str(self.device), re.ASCII):
            raise InvalidInput("device", f"is {shown(self.device)}; choose from cpu, cuda, cuda:1 and so on, simulated")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise InvalidInput("dtype", f"is {shown(self.dtype)}; choose from float32, bfloat16, float16")
        if self.on_miss not in ("full", "truncate"):
            raise InvalidInput("on_miss", f"is {shown(self.on_miss)}; choose from full, truncate")
        if self.reuse not in ("none", "whole", "extend"):
            raise InvalidInput("reuse", f"is {shown(self.reuse)}; choose from none, whole, extend")
        if self.tables not in ("auto", "device", "host"):
            raise InvalidInput("tables", f"is {shown(self.tables)}; choose from auto, device, host")
        for field in ("lease_s", "step_ms"):
            if not 0 < self._number(field, int | float) < math.inf:
                raise InvalidInput(field, "must be positive and finite")
        for field in ("pre_infer_share", "lease_share"):
            if not 0 < self._number(field, int | float) <= 1:
                raise InvalidInput(field, "must be above 0 and at most 1")
        for field in ("max_ranks", "write_back_queue"):
            if self._number(field, int) < 1:
                raise InvalidInput(field, "must be at least 1")
        if not isinstance(self.canary, bool):
            raise InvalidInput("canary", f"must be true or false, not {shown(self.canary)}")
        if self._number("accept_epochs", int) < 0:
            raise InvalidInput("accept_epochs", "must not be negative")
        if self.max_history is not None and self._number("max_history", int) < 1:
            raise InvalidInput("max_history", "must be at least 1")
        self.device_bytes(lambda: 0)  # refuse unreadable sizes here, not later
        self.host_bytes  # noqa: B018

    def _number(self, field: str, kind: Any) -> Any:
        value = getattr(self, field)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidInput(field, f"must be {'an integer' if kind is int else 'a number'}, not {shown(value)}")
        return value

    def device_bytes(self, free: Callable[[], int] | None = None) -> int:
        """Bytes of the device cache; `free` tells how many are free, where that is a share of them."""
        text = str(self.device_cache).strip()
        if not text.endswith("%"):
            return parse_bytes("device_cache", self.device_cache)
        try:
            share = float(text[:-1]) / 100
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise InvalidInput("device_cache", f'is {shown(self.device_cache)}; write "4GiB", or a share such as "80%"')
        if free is None:
            raise InvalidInput("device_cache", f"is {shown(self.device_cache)}; this device needs a size")
        return int(share * free())

    @property
    def host_bytes(self) -> int:
        return parse_bytes("host_cache", self.host_cache)
