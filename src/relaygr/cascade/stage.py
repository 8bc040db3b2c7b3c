"""What the stages of a cascade say to each other, the protocols they stand behind, and fakes of both."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from relaygr.clock import Clock
from relaygr.engine import Decision, Path, Timings
from relaygr.errors import RelayError
from relaygr.history import History
from relaygr.model import Candidates
from relaygr.relay import Shape

__all__ = [
    "FixedRanking",
    "Offload",
    "PreProcessing",
    "PreProcessingRequest",
    "Prepared",
    "RankCall",
    "RankReply",
    "Ranking",
    "Retrieval",
    "RetrievalRequest",
    "Retrieved",
    "RiskTest",
    "Signal",
    "SignalCall",
    "Stage",
    "in_thread",
    "inline",
]

T = TypeVar("T")
Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)


class Stage(Protocol[Request, Response]):
    """One step of the cascade. It may be cancelled at any await, and keeps nothing of the request then.

    The pipeline times it and ends it when its time is over. It raises errors of `relaygr.errors`.
    """

    async def run(self, request: Request, /) -> Response: ...


class Offload(Protocol):
    """Runs work that would block the event loop, and returns what it returns."""

    async def __call__(self, work: Callable[[], T], /) -> T: ...


async def in_thread(work: Callable[[], T], /) -> T:
    """In a worker thread. A caller that is cancelled leaves at once; the work ends on its own."""
    return await asyncio.to_thread(work)


async def inline(work: Callable[[], T], /) -> T:
    """At once, on the event loop: for tests in virtual time, where threads are not waited for."""
    return work()


# ---- retrieval and pre-processing


@dataclass(frozen=True, eq=False)
class RetrievalRequest:
    """Find items for this user."""

    user: str
    history: History
    k: int
    """The most items wanted."""


@dataclass(frozen=True, eq=False)
class Retrieved:
    """Items, best first. They may have been seen, and may repeat."""

    items: npt.NDArray[np.int64]
    similarities: npt.NDArray[np.float32] | None = None
    """One to an item, or None where the retrieval knows none."""


@dataclass(frozen=True, eq=False)
class PreProcessingRequest:
    """Make candidates of what was retrieved."""

    history: History
    retrieved: Retrieved
    candidates: int
    """The most candidates wanted."""
    at: float
    """When the request came, in seconds since 1970, UTC: the scale of the history's timestamps."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """What ranking is asked."""

    candidates: Candidates | None
    """None where nothing is left to rank."""
    request: npt.NDArray[np.float32] | None
    """The request's features, as many as the model reads; None where it reads none."""


Retrieval: TypeAlias = Stage[RetrievalRequest, Retrieved]
PreProcessing: TypeAlias = Stage[PreProcessingRequest, Prepared]


# ---- ranking, and the signal ahead of it


class Signal(NamedTuple):
    """The reply to a pre-infer signal."""

    decision: Decision
    slot: str | None
    """Where it went; the rank follows it there. None where it reached no one."""


@dataclass(frozen=True, eq=False)
class RankReply:
    """The reply to a rank."""

    scores: npt.NDArray[np.float32]
    """[candidates, tasks], in the order of the candidates."""
    path: Path
    used: int
    """Behaviours ranked on."""
    epoch: int
    slot: str | None
    """Who answered."""
    timings: Timings


class Ranking(Protocol):
    """Whoever pre-infers and ranks: an engine in this process, or instances behind a router.

    `due` and `deadline` are absolute seconds on the pipeline's clock. Both calls may be cancelled at any await and
    raise errors of `relaygr.errors`.
    """

    async def signal(self, user: str, history: History, context: Any, *, due: float) -> Signal:
        """Ask for the prefix of this history, for a rank expected at `due`. Replies at admission, without waiting
        for the prefix."""
        ...

    async def rank(
        self,
        user: str,
        history: History,
        candidates: Candidates,
        context: Any,
        request: npt.NDArray[np.float32] | None,
        *,
        slot: str | None,
        deadline: float,
    ) -> RankReply:
        """Score the candidates, at `slot` while it lives, else wherever the user belongs."""
        ...


class RiskTest(Protocol):
    """From what is known at arrival, whether a signal is worth sending: a trigger that knows where the user's requests
    go. Quick, and without I/O."""

    def decide(self, user: str, shape: Shape) -> Decision:
        """ADMIT: send it. Anything else: do not, and this is the request's decision."""
        ...


# ---- a ranking for tests


@dataclass(frozen=True, eq=False)
class SignalCall:
    """A signal that a FixedRanking got."""

    at: float
    user: str
    history: History
    context: Any
    due: float


@dataclass(frozen=True, eq=False)
class RankCall:
    """A rank that a FixedRanking got."""

    at: float
    user: str
    history: History
    candidates: Candidates
    context: Any
    request: npt.NDArray[np.float32] | None
    slot: str | None
    deadline: float


@dataclass(eq=False)
class FixedRanking:
    """A ranking for tests and simulation: scores are the item ids, replies come after fixed times, calls are kept."""

    clock: Clock
    decision: Decision = Decision.ADMIT
    slot: str = "fixed"
    signal_s: float = 0.0
    """How long a signal's reply takes; `math.inf`: it never comes."""
    rank_s: float = 0.0
    """How long a rank's reply takes; `math.inf`: it never comes."""
    signal_error: BaseException | None = None
    """What signals raise instead of replying."""
    rank_error: RelayError | None = None
    """What ranks raise instead of replying."""
    signals: list[SignalCall] = field(default_factory=list)
    ranks: list[RankCall] = field(default_factory=list)
    under_way: int = 0
    """Calls that have neither ended nor been cancelled."""

    async def signal(self, user: str, history: History, context: Any, *, due: float) -> Signal:
        self.signals.append(SignalCall(self.clock.now(), user, history, context, due))
        await self._after(self.signal_s, self.signal_error)
        return Signal(self.decision, self.slot)

    async def rank(
        self,
        user: str,
        history: History,
        candidates: Candidates,
        context: Any,
        request: npt.NDArray[np.float32] | None,
        *,
        slot: str | None,
        deadline: float,
    ) -> RankReply:
        now = self.clock.now()
        self.ranks.append(RankCall(now, user, history, candidates, context, request, slot, deadline))
        await self._after(self.rank_s, self.rank_error)
        scores = candidates.items.astype(np.float32)[:, None]
        timings = Timings(total=self.rank_s * 1e3, prefix=0.0, score=self.rank_s * 1e3)
        return RankReply(scores, Path.FULL, len(history), 0, slot or self.slot, timings)

    async def _after(self, seconds: float, error: BaseException | None) -> None:
        self.under_way += 1
        try:
            if math.isinf(seconds):
                await asyncio.get_running_loop().create_future()
            elif seconds > 0:
                await asyncio.sleep(seconds)
            if error is not None:
                raise error
        finally:
            self.under_way -= 1
