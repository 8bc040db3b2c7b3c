"""How steps and copies run on the device that holds the pages: the seam inside the torch executor."""

import asyncio
from typing import Protocol

import numpy as np
import numpy.typing as npt

from relaygr.engine.hot_rows import HotRowCache
from relaygr.engine.step import PageCopy, Progress, Served, Step, StepResult
from relaygr.engine.trays import Trays
from relaygr.model import RankingModel

__all__ = ["Runner", "split_scores"]


class Runner(Protocol):
    """Runs steps in the order of their launch, and copies beside them. Called from the event loop, but for `serve`."""

    depth: int
    """Steps worth having in flight at once."""

    def serve(self, served: Served, hot: HotRowCache | None, progress: Progress) -> None:
        """Make ready to run this model; may take long, and is called off the event loop.

        `hot`: of a model whose table lies in host memory, what the device holds of it.
        """
        ...

    def trays(self, model: RankingModel) -> Trays | None:
        """`Served.trays` of this model."""
        ...

    def launch(self, step: Step) -> "asyncio.Future[StepResult]": ...

    def copy(self, copy: PageCopy) -> "asyncio.Future[float]": ...

    def facts(self) -> dict[str, float]:
        """What it has prepared, by name, for people to look at."""
        ...

    def close(self) -> None:
        """Nothing is in flight."""
        ...


def split_scores(step: Step, packed: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
    """Each of the step's score rows' part of the scores of all."""
    ends = np.cumsum([len(row.candidates) for row in step.scores])
    return np.split(packed, ends[:-1])
