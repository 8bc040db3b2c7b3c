"""Traffic for experiments: who comes when, how often they come back, how long their histories are.

rate        more requests a second means more users beside each other, never shorter gaps of one user
profile     how users come back: in sessions with gaps as they were seen, or with a share set directly
"""

import hashlib
import math
import re
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from relaygr.errors import InvalidInput
from relaygr.history.quantiles import Quantiles
from relaygr.lab.chains import Arrivals, Chains, Sessions, running_sums
from relaygr.lab.quantiles import GLOBO_GAPS, GLOBO_SESSIONS, LENGTHS
from relaygr.lab.recorded import Recorded
from relaygr.lab.trace import Trace

__all__ = ["PROFILES", "RECORDED", "STAGES", "STAGE_SPREAD", "STORE", "Profile", "Workload"]

Profile = Literal["globo", "refresh", "reuse"]
PROFILES: Final = ("globo", "refresh", "reuse")
RECORDED: Final = "recorded"
"""Lengths that are the recorded users' own."""
STORE: Final = "store"
"""Lengths that are those of a store's users."""

STAGES: Final = 0.6, 0.2
"""Retrieval and pre-processing take these shares of what budgets leave to them, in the middle, where it is not said
what; and so many times that at P99."""
STAGE_SPREAD: Final = 1.25

_REFRESH_GAPS: Final = Quantiles(
    ((0.0, 2.0), (1.0, 10.0)), "a feed refreshed every 2 to 10 s: set directly", seen=False
)
_REFRESH_SESSION: Final = 8.0
_TWO: Final = re.compile(r"(\d+)\+(\d+)@(0\.\d+)")


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
    """Behaviours of users when they first come: a known distribution, a number, or two: "1024+32768@0.2", the second of
    a fifth of users; "recorded": those of `recorded`; "store": those of `stored`."""
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
    recorded: Recorded | None = None
    """Users who come back as they did, in place of the profile's."""
    stored: Quantiles | None = None
    """Behaviours of the users of a store."""

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
        for field in ("reuse", "gap_s", "skew"):
            if getattr(self, field) != getattr(Workload, field) and self.profile != "reuse":
                raise InvalidInput(field, f'is set by the profile "reuse" alone, not by {self.profile!r}')
        if self.recorded is not None and self.profile != Workload.profile:
            raise InvalidInput("profile", f"is {self.profile!r}; recorded users come back as they did")
        if self.recorded is not None and self.arrivals != "poisson":
            raise InvalidInput("arrivals", f"are {self.arrivals!r}; recorded users come at any time: poisson")
        for field in ("candidates", "longest"):
            if getattr(self, field) < 1:
                raise InvalidInput(field, "must be at least 1")
        if self.stored is not None and self.lengths != STORE:
            raise InvalidInput("lengths", f"is {self.lengths!r}, but those of a store's users are given, too")
        self.length_quantiles  # noqa: B018  (refuse what is unknown here, not later)

    @property
    def length_quantiles(self) -> Quantiles:
        if self.lengths in LENGTHS:
            return LENGTHS[self.lengths]
        if self.lengths == RECORDED:
            own = None if self.recorded is None else self.recorded.lengths
            if own is None:
                raise InvalidInput("lengths", "are to be the recorded ones, but no column length was recorded")
            return own
        if self.lengths == STORE:
            if self.stored is None:
                raise InvalidInput("lengths", "are to be those of a store's users, but no store is given: store:NAME")
            return self.stored
        two = _TWO.fullmatch(self.lengths)
        if two and int(two[1]) >= 1 and int(two[2]) >= int(two[1]) and 0 < float(two[3]) < 1:
            short, long, share = int(two[1]), int(two[2]), float(two[3])
            points = ((0.0, short), (1 - share - 1e-9, short), (1 - share, long), (1.0, long))
            return Quantiles(points, "set directly", seen=False)
        if not self.lengths.isdigit() or int(self.lengths) < 1:
            known = ", ".join((*LENGTHS, RECORDED, f"{STORE}:FOLDER", f"{STORE}:redis://host:6379/0"))
            raise InvalidInput(
                "lengths", f'is {self.lengths!r}; write a number, two of them as "1024+32768@0.2", or one of {known}'
            )
        return Quantiles.constant(int(self.lengths))

    @property
    def sources(self) -> dict[str, str]:
        """Where facts are from: of who comes when, and of how long histories are."""
        return {"users": self._chains().source, "lengths": self.length_quantiles.source}

    @property
    def hybrid(self) -> bool:
        """Whether facts of two sources are joined that nobody has seen together."""
        return len({each.source for each in (self._chains(), self.length_quantiles) if each.seen}) > 1

    @property
    def returning(self) -> bool:
        """Whether anybody comes twice."""
        return self.recorded.returning if self.recorded is not None else self.profile != "reuse" or self.reuse > 0

    def told(self) -> dict[str, Any]:
        """In plain values: what it was drawn from that is one's own by a digest, and left out where there is none."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        recorded, stored = told.pop("recorded"), told.pop("stored")
        if recorded is not None:
            told["recorded"] = recorded.digest
        if stored is not None:
            told["stored"] = hashlib.sha256(repr(stored.points).encode()).hexdigest()[:16]
        return told

    def trace(self) -> Trace:
        """The requests."""
        random = np.random.default_rng(self.seed)
        drawn = self._chains().requests(random, self.rate, -self.past_s, self.seconds, self.arrivals)
        order = np.argsort(drawn.at, kind="stable")
        at, (_, came, user) = drawn.at[order], np.unique(drawn.user[order], return_index=True, return_inverse=True)
        visit = (running_sums(user, np.ones(len(user))) - 1).astype(np.int32)
        new = np.where(visit > 0, random.poisson(self.new, len(at)), 0)
        if self.lengths == RECORDED and drawn.length is not None:
            first = drawn.length[order][came]
        else:
            first = np.rint(self.length_quantiles.draw(random, len(came))).astype(np.int64)
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
            made={"workload": self.told(), "sources": self.sources, "hybrid": self.hybrid},
        )

    def _chains(self) -> Chains:
        if self.recorded is not None:
            return self.recorded
        if self.profile == "globo":
            return Sessions(_globo_counts, GLOBO_SESSIONS.mean, GLOBO_GAPS)
        if self.profile == "refresh":
            return Sessions(_refresh_counts, _REFRESH_SESSION, _REFRESH_GAPS)
        # After each request one more follows with the chance `reuse`.
        gaps = Quantiles(((0.0, self.gap_s / 2), (1.0, self.gap_s * 1.5)), "set directly", seen=False)
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
