"""Behaviours for tests: any, or numbered ones that say where in the history they stand."""

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from relaygr.history import PAGE, History

__all__ = ["LAST", "histories", "lengths", "numbered", "split"]

LAST = 2**63 - 1
"""The last second there is."""


@st.composite
def lengths(draw: st.DrawFn, most: int = 4 * PAGE) -> int:
    """Lengths up to `most`, often at the edges of pages."""
    edges = st.builds(lambda page, off: page * PAGE + off, st.integers(0, most // PAGE), st.integers(-1, 1))
    return max(0, min(most, draw(st.one_of(edges, st.integers(0, most)))))


@st.composite
def histories(draw: st.DrawFn, most: int = 4 * PAGE) -> History:
    """Histories of up to `most` behaviours, over the whole range of every column."""
    n = draw(lengths(most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    top = draw(st.sampled_from((2, 1000, LAST)))
    times = np.sort(rng.integers(-top, top, n, endpoint=True))
    return History(rng.integers(0, top, n), rng.integers(0, min(top, 2**31 - 1), n, dtype=np.int32), times)


def numbered(length: int, first: int = 0, salt: int = 0) -> History:
    """Behaviours first … first + length of one endless history, a different one for each salt."""
    at = np.arange(first, first + length, dtype=np.int64)
    return History(at * 7919 + salt, (at % 16).astype(np.int32), at // 3, start=first)


def split(history: History, cuts: list[int]) -> list[tuple[Any, Any, Any]]:
    """The history's columns, cut into consecutive parts."""
    bounds = [0, *sorted(min(cut, len(history)) for cut in cuts), len(history)]
    parts = [history[low:high] for low, high in pairwise(bounds)]
    return [(part.items, part.actions, part.timestamps) for part in parts]
