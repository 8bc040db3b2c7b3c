"""Users who come back: whose request comes when, at a rate that more or fewer of them make, never other gaps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from relaygr.history.quantiles import Quantiles

__all__ = ["Arrivals", "Chains", "Requests", "Sessions", "running_sums"]

Arrivals = Literal["poisson", "even"]

_LONGEST_S: Final = 86_400.0
"""Requests that come later than this after a user's first are left out."""


class Requests(NamedTuple):
    """Columns of equal length, each user's in order, users in none."""

    user: npt.NDArray[np.int64]
    at: npt.NDArray[np.float64]
    """Seconds."""
    length: npt.NDArray[np.int64] | None = None
    """Behaviours of the user then, where that is known."""


class Chains(Protocol):
    """A chain is what one user asks for over time: a first request and those that follow, with the gaps between them.
    These are the chains of many users."""

    @property
    def source(self) -> str: ...

    @property
    def seen(self) -> bool:
        """Whether somebody has seen them somewhere; else they were set directly."""
        ...

    def requests(
        self, random: np.random.Generator, rate: float, low: float, high: float, arrivals: Arrivals
    ) -> Requests:
        """All requests from `low` to `high`, in seconds, at this many a second on average.

        They are what would be seen of users who have always come and always will, at any time or evenly.
        """
        ...


@dataclass(frozen=True)
class Sessions:
    """Every user has one session, with gaps between its requests."""

    counts: Callable[[np.random.Generator, int], npt.NDArray[np.int64]]
    mean: float
    """Requests of a user, on average."""
    gaps: Quantiles

    @property
    def source(self) -> str:
        return self.gaps.source

    @property
    def seen(self) -> bool:
        return self.gaps.seen

    @property
    def _span_s(self) -> float:
        """From a user's first request to its last; few take longer."""
        return min(self.gaps.points[-1][1] * 4 * self.mean, _LONGEST_S)

    def requests(
        self, random: np.random.Generator, rate: float, low: float, high: float, arrivals: Arrivals
    ) -> Requests:
        # Users begin at any time of the past from which they may still be here.
        reach = self._span_s - low
        if arrivals == "even":
            begun = np.arange(-reach, high, self.mean / rate)
        else:
            begun = random.uniform(-reach, high, random.poisson(rate / self.mean * (reach + high)))
        each = self.counts(random, len(begun))
        user = np.repeat(np.arange(len(begun)), each)
        steps = self.gaps.draw(random, len(user))
        steps[np.cumsum(each) - each] = 0.0
        since = running_sums(user, steps)
        at = begun[user] + since
        seen = (at >= low) & (at < high) & (since <= _LONGEST_S)
        return Requests(user[seen], at[seen])


def running_sums(user: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Of each user by itself, in the order given."""
    order = np.argsort(user, kind="stable")
    sums = np.cumsum(values[order])
    starts = np.flatnonzero(np.diff(user[order], prepend=-1))
    before = np.where(starts > 0, sums[starts - 1], 0)
    sums = sums - np.repeat(before, np.diff(np.append(starts, len(user))))
    out: npt.NDArray[Any] = np.empty_like(sums)
    out[order] = sums
    return out
