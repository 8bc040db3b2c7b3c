"""How many instances: as many as keep devices and leases at their targets. Requests are not counted: a rank on a
prefix and one on a whole history are one request each, and differ a hundredfold in device time."""

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

__all__ = ["BUSY", "LEASED", "RelayAutoscaling", "wanted"]

BUSY: Final = "relaygr_busy"
"""The share of the time since the last report that an instance's device was busy."""
LEASED: Final = "relaygr_leased"
"""The share of an instance's device memory that leases hold."""


def wanted(shares: Mapping[str, Collection[float]], targets: Mapping[str, float], now: int) -> int:
    """Instances at which no share would be above its target, were the same work spread over them; `now` if no instance
    has reported. What is asked for is the most that any of the shares asks for."""
    reported = max((len(values) for values in shares.values()), default=0)
    if not reported:
        return now
    needed = 1
    for name, target in targets.items():
        values = shares.get(name, ())
        if not values:
            continue
        # Those that have not reported yet have as much to do as those that have, as far as anybody knows.
        total = sum(values) / len(values) * max(now, 1)
        needed = max(needed, math.ceil(round(total / target, 6)))
    return needed


class RelayAutoscaling:
    """The policy that Serve's controller asks. Its delays and bounds are Serve's own."""

    def __init__(self, busy_target: float, leased_target: float) -> None:
        self._targets = {BUSY: busy_target, LEASED: leased_target}

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        told = context.aggregated_metrics or {}
        shares = {name: list(told.get(name, {}).values()) for name in self._targets}
        return wanted(shares, self._targets, context.current_num_replicas or context.target_num_replicas), {}
