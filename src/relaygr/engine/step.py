"""What an executor runs, and the seam between the loop and the device."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from relaygr.cache import Pages
from relaygr.config import EngineConfig
from relaygr.engine.trays import Trays
from relaygr.history import PAGE, History
from relaygr.model.batch import AppendRow, ScoreRow
from relaygr.model.candidates import Candidates
from relaygr.model.config import ModelConfig

__all__ = [
    "Capacity",
    "Direction",
    "Executor",
    "Model",
    "PageCopy",
    "PageSpoiled",
    "Progress",
    "Served",
    "Step",
    "StepResult",
    "no_progress",
]

Progress = Callable[[str, int, int], None]
"""Called, on any thread, with what is being done, how much of it is done, and of how much."""


def no_progress(what: str, done: int, of: int) -> None:
    """For those who do not care."""


class Model(Protocol):
    """What the engine itself needs of a model; executors know more."""

    config: ModelConfig
    epoch: int

    def version(self) -> str: ...
    def check_history(self, history: Any) -> History: ...
    def check_context(self, context: Any) -> npt.NDArray[np.int64]: ...
    def check_candidates(self, candidates: Any) -> Candidates: ...
    def check_request(self, request: Any) -> npt.NDArray[np.float32] | None: ...


@dataclass(frozen=True, eq=False)
class Served:
    """A model as the executor runs it, with the two parts of its version."""

    model: Model
    version: str
    epoch: int
    grain: int = PAGE
    """Tokens, whole pages of them, that an append of it keeps all of the device busy with: behind many others, a little
    more than a multiple takes nearly as long as the next."""
    trays: Trays | None = None
    """Where what is scored is laid out ahead of the step that runs it, if its launches are captured."""


class Step(NamedTuple):
    """One launch: page copies, then appends, then scores, in this order, all of one model."""

    served: Served
    appends: Sequence[AppendRow]
    """A user's may be two: the head of what was kept, and then what is new."""
    scores: Sequence[ScoreRow]
    page_copies: Sequence[tuple[int, int]] = ()
    """(from, to) inside the device tier: pages about to be rewritten while someone still reads them."""
    reloads: Sequence["PageCopy"] = ()
    """Copies under way whose pages its scores read: the device sees to it that they do so behind the copy."""


class StepResult(NamedTuple):
    scores: list[npt.NDArray[np.float32]]
    """[candidates, tasks] for each of the step's score rows."""
    seconds: float
    """Device time the step took."""


class PageSpoiled(Exception):
    """A step failed because a page does not hold what was written to it: what is cached of its users is lost."""


class Direction(StrEnum):
    """Of a copy between tiers, seen from the device."""

    IN = "IN"
    OUT = "OUT"


@dataclass(frozen=True, eq=False)
class PageCopy:
    """Pages to move between the tiers: source[i] to target[i]."""

    direction: Direction
    source: Pages
    target: Pages
    nearly: Callable[[], None] | None = None
    """Called on the event loop when about `nearly_at` of it is done: what reads its pages may be launched behind it."""
    nearly_at: float = 1.0


class Capacity(NamedTuple):
    """Pages of each tier, and how large one is."""

    device: int
    host: int
    page_bytes: int


class Executor(Protocol):
    """A device: it owns the contents of pages and runs steps on them.

    Steps run in the order of their launch, one after the other; copies run beside them. A future fails when the work
    did not happen or may not have: what it should have written is then undefined. Called from the event loop alone.
    """

    @property
    def depth(self) -> int:
        """Steps worth having in flight at once."""
        ...

    @property
    def host_pages(self) -> int:
        """Pages of the host tier that may be used now; it only grows, up to what `open` said."""
        ...

    def facts(self) -> dict[str, float]:
        """What it has prepared, by name, for people to look at."""
        ...

    def open(self, model: Model, config: EngineConfig) -> Capacity:
        """Allocate both tiers for this model's pages. Raises InvalidInput if that cannot be."""
        ...

    async def prepare(self, model: Model) -> Served:
        """The model as it is run here: moved and cast. Raises InvalidInput if it cannot be served here.

        Not called while another is being prepared, never cancelled, and over before `close`.
        """
        ...

    def launch(self, step: Step) -> "asyncio.Future[StepResult]": ...

    def copy(self, copy: PageCopy) -> "asyncio.Future[float]":
        """Move pages; the result is the seconds it took."""
        ...

    def close(self) -> None:
        """Free everything. Nothing is in flight."""
        ...
