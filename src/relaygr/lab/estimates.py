"""Percentiles and shares, and how far off they may be."""

import math
from collections.abc import Sequence
from typing import Final

__all__ = ["percentile", "percentile_interval", "share_interval"]

_Z: Final = 1.959964
"""Of 95 in 100."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least `percent` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def percentile_interval(values: Sequence[float], percent: float) -> tuple[float, float | None]:
    """Between which values the percentile lies, 95 times in 100, whatever the distribution: two of the values given.

    None where there are too few of them for an upper one.
    """
    ordered, share = sorted(values), percent / 100
    count = len(ordered)
    low, high = _ranks(count, share)
    return ordered[low], ordered[high] if high < count else None


def _ranks(count: int, share: float) -> tuple[int, int]:
    """Places in the order of `count` values that enclose the quantile: of how many lie below it, the middle 95%."""
    below, seen, low, high = 0.0, 0, 0, count
    for seen in range(count + 1):
        log = math.lgamma(count + 1) - math.lgamma(seen + 1) - math.lgamma(count - seen + 1)
        below += math.exp(log + seen * math.log(share) + (count - seen) * math.log1p(-share))
        if below <= 0.025:
            low = seen
        if below >= 0.975:
            high = seen
            break
    return min(low, count - 1), high


def share_interval(hits: int, of: int) -> tuple[float, float]:
    """Between which shares the true one lies, 95 times in 100 (Wilson)."""
    if not of:
        return 0.0, 1.0
    share = hits / of
    centre = share + _Z**2 / (2 * of)
    spread = _Z * math.sqrt(share * (1 - share) / of + _Z**2 / (4 * of**2))
    scale = 1 + _Z**2 / of
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
