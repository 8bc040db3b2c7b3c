"""A core to measure on that nobody else slows, on a host that others use, too."""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["quiet_core"]


def pace() -> float:
    """Microseconds of the CPU that a piece of Python takes, the least of some tries: how fast the core is just now."""
    least = float("inf")
    for _ in range(3):
        kept: dict[int, Any] = {}
        began = time.thread_time()
        for number in range(20_000):
            kept[number & 255] = (number, kept)
        least = min(least, time.thread_time() - began)
    return least * 1e6


@contextlib.contextmanager
def quiet_core() -> Iterator[dict[str, Any]]:
    """Stay on the core that is the fastest just now. Where others share the host, half of its cores may be twice as
    slow as the rest, other ones every few seconds: somebody else runs on their other thread."""
    cores = os.sched_getaffinity(0)
    paces: dict[int, float] = {}
    try:
        for core in sorted(cores):
            os.sched_setaffinity(0, {core})
            paces[core] = pace()
        os.sched_setaffinity(0, {min(paces, key=paces.__getitem__)})
        told: dict[str, Any] = {"pace_us": min(paces.values()), "paces_us": sorted(paces.values())}
        yield told
        told["pace_after_us"] = pace()
    finally:
        os.sched_setaffinity(0, cores)
