"""Traffic for experiments: who comes when, how often they come back, how long their histories are.

rate        more requests a second means more users beside each other, never shorter gaps of one user
profile     how users come back: in sessions with gaps as they were seen, or with a share set directly
"""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from relaygr.errors import InvalidInput
from relaygr.history.quantiles import Quantiles
from relaygr.lab.quantiles import GLOBO_GAPS, GLOBO_SESSIONS, LENGTHS
from relaygr.lab.trace import Trace

__all__ = ["PROFILES", "Arrivals", "Chains", "Profile", "Recorded", "Workload", "running_sums"]

Profile = Literal["globo", "refresh", "reuse"]
PROFILES: Final = ("globo", "refresh", "reuse")
Arrivals = Literal["poisson", "even"]

_REFRESH_GAPS: Final = Quantiles(((0.0, 2.0), (1.0, 10.0)), "a feed refreshed every 2 to 10 s: set directly")
_REFRESH_SESSION: Final = 8.0
_TWO: Final = re.compile(r"(\d+)\+(\d+)@(0\.\d+)")
_LONGEST_S: Final = 86_400.0
"""Requests that come later than this after a user's first are left out."""


class Chains(Protocol):
    """Users and how they come back: the seconds from a user's first request to each of its requests."""

    @property
    def source(self) -> str: ...

    @property
    def mean(self) -> float:
        """Requests of a user, on average."""
        ...

    @property
    def span_s(self) -> float:
        """From a user's first request to its last; few take longer."""
        ...

    def draw(self, random: np.random.Generator, users: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Of so many users: whose each request is, and its seconds, each user's in order."""
        ...


@dataclass(frozen=True)
class Sessions:
    """Every user has one session, with gaps between its requests."""

    counts: Callable[[np.random.Generator, int], npt.NDArray[np.int64]]
    mean: float
    gaps: Quantiles

    @property
    def source(self) -> str:
        return self.gaps.source

    @property
    def span_s(self) -> float:
        return min(self.gaps.points[-1][1] * 4 * self.mean, _LONGEST_S)

    def draw(self, random: np.random.Generator, users: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        each = self.counts(random, users)
        user = np.repeat(np.arange(users), each)
        steps = self.gaps.draw(random, len(user))
        steps[np.cumsum(each) - each] = 0.0
        return user, running_sums(user, steps)


class Recorded:
    """Users of a recorded trace of times and users: whole, with the gaps they had."""

    def __init__(self, at: npt.ArrayLike, user: npt.ArrayLike, source: str) -> None:
        times, names = np.asarray(at, np.float64), np.asarray(user)
        if times.ndim != 1 or times.shape != names.shape or not len(times) or not np.isfinite(times).all():
            raise InvalidInput("recorded", "must have as many times as users, at least one, all finite")
        _, users = np.unique(names, return_inverse=True)
        order = np.lexsort((times, users))
        self._since = times[order]
        self._each = np.bincount(users)
        self._starts = np.cumsum(self._each) - self._each
        self._since = self._since - np.repeat(self._since[self._starts], self._each)
        self.source = source
        self.mean = float(self._each.mean())
        self.span_s = min(float(self._since.max()), _LONGEST_S)

    def draw(self, random: np.random.Generator, users: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        chosen = random.integers(0, len(self._each), users)
        each = self._each[chosen]
        user = np.repeat(np.arange(users), each)
        within = np.arange(len(user)) - np.repeat(np.cumsum(each) - each, each)
        return user, self._since[np.repeat(self._starts[chosen], each) + within]


@dataclass(frozen=True)
class Workload:
    """One experiment's traffic: an open loop, the same for the same workload."""

    rate: float
    """Requests a second, on average."""
    seconds: float
    """How long it lasts."""
    profile: Profile = "refresh"
    """How users come back: "globo" (sessions of a news portal), "refresh" (8 requests on average, 2 to 10 s apart) or
    "reuse" (a share of requests, `reuse`, by users who were there before)."""
    reuse: float = 0.0
    """Of the profile "reuse": that share."""
    gap_s: float = 5.0
    """Of the profile "reuse": seconds since a returning user's last request, on average."""
    skew: float = 0.0
    """Of the profile "reuse": how unlike users are. 0: each returns with the same chance; else, numbers of requests are
    spread as the exponential of a normal distribution with this deviation, their mean the same."""
    lengths: str = "kuairand-1k"
    """Behaviours of users: a known distribution, a number, or two: "1024+32768@0.2", the second of a fifth of users."""
    longest: int = 131_072
    """Longer histories are cut to this."""
    new: float = 4.0
    """Behaviours between two requests of a user, on average."""
    candidates: int = 512
    retrieval_ms: float = 60.0
    """Of the stage before ranking, in the middle."""
    pre_processing_ms: float = 20.0
    stage_spread: float = 2.0
    """By what factor one in a hundred takes longer than the middle, in either stage."""
    arrivals: Arrivals = "poisson"
    """When users come first: "poisson", at any time, or "even", one after the other at equal distances."""
    past_s: float = 60.0
    """How much of the past is written, too: what servers may have kept of it."""
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("rate", "seconds", "gap_s"):
            if not 0 < getattr(self, field) < math.inf:
                raise InvalidInput(field, "must be positive and finite")
        for field in ("new", "skew", "retrieval_ms", "pre_processing_ms", "past_s"):
            if not 0 <= getattr(self, field) < math.inf:
                raise InvalidInput(field, "must not be negative, and finite")
        if not 1 <= self.stage_spread < math.inf:
            raise InvalidInput("stage_spread", "must be at least 1 and finite")
        if self.arrivals not in ("poisson", "even"):
            raise InvalidInput("arrivals", f"is {self.arrivals!r}; choose from poisson, even")
        if self.profile not in PROFILES:
            raise InvalidInput("profile", f"is {self.profile!r}; choose from {', '.join(PROFILES)}")
        if not 0 <= self.reuse < 1:
            raise InvalidInput("reuse", "must be at least 0 and below 1")
        if self.skew and self.profile != "reuse":
            raise InvalidInput("skew", f'is set by the profile "reuse" alone, not by {self.profile!r}')
        if self.reuse and self.profile != "reuse":
            raise InvalidInput("reuse", f'is set by the profile "reuse" alone, not by {self.profile!r}')
        for field in ("candidates", "longest"):
            if getattr(self, field) < 1:
                raise InvalidInput(field, "must be at least 1")
        self.length_quantiles  # noqa: B018  (refuse what is unknown here, not later)

    @property
    def length_quantiles(self) -> Quantiles:
        if self.lengths in LENGTHS:
            return LENGTHS[self.lengths]
        two = _TWO.fullmatch(self.lengths)
        if two and int(two[1]) >= 1 and int(two[2]) >= int(two[1]) and 0 < float(two[3]) < 1:
            short, long, share = int(two[1]), int(two[2]), float(two[3])
            points = ((0.0, short), (1 - share - 1e-9, short), (1 - share, long), (1.0, long))
            return Quantiles(points, "set directly")
        if not self.lengths.isdigit() or int(self.lengths) < 1:
            known = ", ".join(LENGTHS)
            raise InvalidInput(
                "lengths", f'is {self.lengths!r}; write a number, two of them as "1024+32768@0.2", or one of {known}'
            )
        return Quantiles.constant(int(self.lengths))

    def trace(self, chains: Chains | None = None) -> Trace:
        """The requests; by `chains` in place of the profile's."""
        random = np.random.default_rng(self.seed)
        chains = chains or self._chains()
        # Users begin at any time of the past from which they may still be here.
        reach = self.past_s + chains.span_s
        expected = self.rate / chains.mean * (reach + self.seconds)
        if self.arrivals == "even":
            begun = np.arange(-reach, self.seconds, chains.mean / self.rate)
        else:
            begun = random.uniform(-reach, self.seconds, random.poisson(expected))
        user, since = chains.draw(random, len(begun))
        at = begun[user] + since
        kept = (at >= -self.past_s) & (at < self.seconds) & (since <= _LONGEST_S)
        order = np.argsort(at[kept], kind="stable")
        at, (_, user) = at[kept][order], np.unique(user[kept][order], return_inverse=True)
        users = int(user.max(initial=-1)) + 1
        visit = (running_sums(user, np.ones(len(user))) - 1).astype(np.int32)
        new = np.where(visit > 0, random.poisson(self.new, len(at)), 0)
        first = np.rint(self.length_quantiles.draw(random, users)).astype(np.int64)
        length = np.minimum(first[user] + running_sums(user, new), self.longest)
        spread = math.log(self.stage_spread) / 2.326  # of a normal distribution, 99 in 100 lie below 2.326
        stages = [
            (median * np.exp(random.normal(0.0, spread, len(at)))).astype(np.float32)
            for median in (self.retrieval_ms, self.pre_processing_ms)
        ]
        return Trace(
            at=at,
            user=user.astype(np.int64),
            visit=visit,
            length=length.astype(np.int32),
            new=new.astype(np.int32),
            candidates=np.full(len(at), self.candidates, np.int32),
            retrieval_ms=stages[0],
            pre_processing_ms=stages[1],
            made=self._made(chains.source),
        )

    def _made(self, arrivals: str) -> dict[str, Any]:
        sources = {"arrivals": arrivals, "lengths": self.length_quantiles.source}
        real = {source for source in sources.values() if "set directly" not in source}
        return {"workload": asdict(self), "sources": sources, "hybrid": len(real) > 1}

    def _chains(self) -> Chains:
        if self.profile == "globo":
            return Sessions(_globo_counts, GLOBO_SESSIONS.mean, GLOBO_GAPS)
        if self.profile == "refresh":
            return Sessions(_refresh_counts, _REFRESH_SESSION, _REFRESH_GAPS)
        # After each request one more follows with the chance `reuse`.
        gaps = Quantiles(((0.0, self.gap_s / 2), (1.0, self.gap_s * 1.5)), "set directly")
        return Sessions(self._reuse_counts, 1 / (1 - self.reuse), gaps)

    def _reuse_counts(self, random: np.random.Generator, users: int) -> npt.NDArray[np.int64]:
        if not self.skew:
            return np.asarray(random.geometric(1 - self.reuse, users), np.int64)
        more = self.reuse / (1 - self.reuse) * random.lognormal(-(self.skew**2) / 2, self.skew, users)
        return 1 + random.poisson(more)


def _globo_counts(random: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    return np.maximum(np.rint(GLOBO_SESSIONS.draw(random, count)).astype(np.int64), 1)


def _refresh_counts(random: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    return np.asarray(random.geometric(1 / _REFRESH_SESSION, count), np.int64)


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
