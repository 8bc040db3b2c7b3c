"""Work under way: ranks, pre-infers, and the prefixes being built for them."""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from relaygr.cache import Lease, Leased, Lineage, Prefix
from relaygr.engine.outcomes import Path, PreInferOutcome, Ranked
from relaygr.engine.step import PageCopy, Served
from relaygr.history import History, KnownHistory
from relaygr.model.batch import ScoreRow
from relaygr.model.candidates import Candidates

__all__ = ["Build", "BuildState", "PreInfer", "Rank"]


class BuildState(StrEnum):
    RELOADING = "RELOADING"
    """Its pages are being copied from host memory."""
    APPENDING = "APPENDING"
    """Its tokens are being run, chunk by chunk."""
    DONE = "DONE"
    FAILED = "FAILED"
    ABANDONED = "ABANDONED"
    """Nobody wants it any more; what was launched still runs to its end."""


@dataclass(eq=False, slots=True)
class Rank:
    """One rank call."""

    served: Served
    user: str
    history: History | KnownHistory
    context: npt.NDArray[np.int64]
    lineage: Lineage
    candidates: Candidates
    request: npt.NDArray[np.float32] | None
    deadline: float
    """When the call ends; infinite if the caller set none."""
    due: float
    """What the schedule orders by: the deadline, or arrival plus a second where that is earlier."""
    order: int
    arrived: float
    future: "asyncio.Future[Ranked]"
    path: Path = Path.RESIDENT
    row: ScoreRow | None = None
    """What the device is to score, once its prefix is known."""
    epoch: int = 0
    """Of the tables that the prefix was made with, known as soon as that."""
    lease: Leased | None = None
    """Of the prefix's pages."""
    build: "Build | None" = None
    """What makes its prefix, or a part of it; its scores count only if that ended well."""
    launched: float | None = None
    """When the step that scores it was launched."""
    scored: bool = False
    """Whether its caller got scores."""
    attempts: int = 0
    load: tuple[int, int] = (0, 0)
    """How many candidates it has, and on how many tokens they are scored."""
    cost_s: float = 0.0
    """Device time that takes."""
    keep: bool = True
    """Whether what it makes is cached, and others may join it; not after its user was evicted."""
    history_needed: bool = False
    """Its caller was asked for the behaviours, and will call again with them."""

    @property
    def over(self) -> bool:
        """The caller has its answer, or has gone."""
        return self.future.done()

    def hopeless(self, now: float) -> bool:
        """Whether scoring it would end behind its deadline, as far as that can be foretold."""
        return now + self.cost_s > self.deadline


@dataclass(eq=False, slots=True)
class PreInfer:
    """One pre-infer call."""

    served: Served
    user: str
    history: History | KnownHistory
    context: npt.NDArray[np.int64]
    lineage: Lineage
    deadline: float
    future: "asyncio.Future[PreInferOutcome]"
    admitted_s: float = 0.0
    """Device time it was admitted for, before it waited for another's build."""

    @property
    def over(self) -> bool:
        return self.future.done()


@dataclass(eq=False, slots=True)
class Build:
    """One prefix in the making. Its pages are pinned by it until it ends and nothing launched touches them.

    tokens  0 ────────── base ────────── done ──── launched ────────── prefix.tokens
               cached            ran       in flight        to run

    Where the head of what was cached is missing, that is run first, 0 … head, and then what is behind the base.
    """

    served: Served
    prefix: Prefix
    history: History
    context: npt.NDArray[np.int64]
    base: int
    """Tokens its pages hold from the start, or once reloaded; but for the head."""
    made: Path
    """FULL, EXTENDED or RELOADED: what it is to whoever asked for it first."""
    due: float
    order: int
    head: int = 0
    """Tokens before those of the base that were not kept; whole pages."""
    state: BuildState = BuildState.APPENDING
    launched: int = 0
    done: int = 0
    in_flight: int = 0
    """Steps and copies that touch its pages now."""
    page_copy: tuple[int, int] | None = None
    """(from, to): the page to copy before the first chunk, because someone still reads what it would overwrite."""
    reload: PageCopy | None = None
    """The copy from host memory that brings its base, while it is under way."""
    nearly_reloaded: bool = False
    """Whether that is so far that what reads its pages may be launched behind it."""
    source: Lease | None = None
    """Pages it is copied from, in either tier, until the copy is done."""
    keep: bool = True
    """Whether others may join it, and it is cached when done."""
    freed: bool = False
    """Whether its own pins are gone."""
    pre_infer: bool = False
    """Whether it counts as pre-inference: asked for ahead of its rank."""
    ranks: list[Rank] = field(default_factory=list)
    """Those who score on exactly this prefix."""
    waiting: list["Rank | PreInfer"] = field(default_factory=list)
    """Those who need more than this prefix: they are resolved again when it has ended, well or not."""
    calls: list[tuple[PreInfer, PreInferOutcome]] = field(default_factory=list)
    """Pre-infers to answer when it is done, and with what."""
    claims: int = 0
    cost_s: float = 0.0
    """Device time it still needs."""

    @property
    def wanted(self) -> bool:
        return bool(self.claims) or not all(work.over for work in (*self.ranks, *self.waiting))

    def until(self, low: int) -> int:
        """Where the tokens end that can be run in one chunk from `low` on."""
        return self.head if low < self.head else self.prefix.tokens

    def behind(self, high: int) -> int:
        """Where it goes on behind a chunk up to `high`: behind its head is what was kept."""
        return self.base if high == self.head else high

    def due_for(self, rank: Rank) -> float:
        """When it is due once this rank waits for it. A pre-infer has said when its rank is expected: that one, if no
        other is, hands it its own deadline. A rank that needs it only on the way does not."""
        exact = self.prefix.length == len(rank.history)
        alone = self.claims <= 1 and not self.ranks and not self.waiting
        return rank.due if exact and alone else min(self.due, rank.due)

    def hopeless(self, now: float) -> bool:
        """Whether it would be there for nobody: ranks alone want it, and it is given up when their deadlines come."""
        if self.claims or self.waiting or not self.ranks:
            return False
        return now + self.cost_s > max(rank.deadline - rank.cost_s for rank in self.ranks)

    @property
    def scoring_s(self) -> float:
        """Device time that its ranks will need behind it; none where they are ready to be scored."""
        return 0.0 if self.all_launched else sum([rank.cost_s for rank in self.ranks if not rank.over])

    @property
    def ended(self) -> bool:
        return self.state in (BuildState.DONE, BuildState.FAILED, BuildState.ABANDONED)

    @property
    def runnable(self) -> bool:
        return self.state is BuildState.APPENDING and self.launched < self.prefix.tokens

    @property
    def all_launched(self) -> bool:
        """Everything that makes it was launched: a step launched now finds it whole, if all goes well."""
        there = self.state in (BuildState.APPENDING, BuildState.DONE)
        return (there or self.nearly_reloaded) and self.launched == self.prefix.tokens
