"""What the engine answers. Enums are their own labels in logs and metrics."""

from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Decision", "Path", "PreInferOutcome", "Ranked", "Timings"]


class Path(StrEnum):
    """The costliest step one rank needed, cheapest first; TRUNCATED stands apart."""

    RESIDENT = "RESIDENT"
    """The prefix was in device memory."""
    WAITED = "WAITED"
    """Someone else was making it."""
    RELOADED = "RELOADED"
    """It came from host memory."""
    EXTENDED = "EXTENDED"
    """New behaviours were appended to what was cached."""
    FULL = "FULL"
    """All of it was computed."""
    TRUNCATED = "TRUNCATED"
    """There was no time: the newest behaviours alone were used."""

    def costlier(self, other: "Path") -> "Path":
        """The costlier of the two."""
        return max(self, other, key=_COSTS.index)


_COSTS = list(Path)


class PreInferOutcome(StrEnum):
    """What became of a pre-infer."""

    COMPUTED = "COMPUTED"
    EXTENDED = "EXTENDED"
    RELOADED = "RELOADED"
    RESIDENT = "RESIDENT"
    JOINED = "JOINED"
    """The same prefix was already being made."""
    NO_MEMORY = "NO_MEMORY"
    """Refused: too much of the device cache is leased."""
    NO_CAPACITY = "NO_CAPACITY"
    """Refused: pre-inference has more work queued than its share of device time can finish by the deadline. Or given up
    later, for a rank that it would have made late."""
    FAILED = "FAILED"
    """Not there by its deadline, or the device failed."""


class Decision(StrEnum):
    """What was decided about a pre-infer before any work was done."""

    ADMIT = "ADMIT"
    NOT_AT_RISK = "NOT_AT_RISK"
    RESIDENT = "RESIDENT"
    NO_MEMORY = "NO_MEMORY"
    NO_CAPACITY = "NO_CAPACITY"
    UNAVAILABLE = "UNAVAILABLE"


class Timings(NamedTuple):
    """Where a rank's time went, in milliseconds."""

    total: float
    prefix: float
    """From arrival until the step that scored was launched: waiting, and making the prefix."""
    score: float
    """In the step that scored."""


class Ranked(NamedTuple):
    """A rank's answer."""

    scores: npt.NDArray[np.float32]
    """[candidates, tasks], in the order of the candidates. They may lie in the memory of a whole step: copy those that
    are kept for long."""
    path: Path
    used: int
    """Behaviours ranked on."""
    epoch: int
    """Epoch of the tables the prefix was made with; behind the model's only where accept_epochs allows it."""
    timings: Timings
