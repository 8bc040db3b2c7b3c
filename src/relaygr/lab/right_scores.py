"""Whether servers of a simulated device answered the right scores: those of the history as it was, computed at once."""

from pathlib import Path
from typing import Any, Final

import numpy as np

from relaygr.cascade import PipelineConfig
from relaygr.engine.simulated import SimulatedModel, simulated_scores
from relaygr.history import History, LmdbStore

__all__ = ["RightScores"]

STEP: Final = 1024
"""Where windows may begin: in steps of this size."""


class RightScores:
    """Remembers answers, one of `every`, and looks at them when all behaviours are stored: users only ever got more, so
    that what was ranked on is the beginning of what they have now."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._heard = 0
        self._answers: list[dict[str, Any]] = []

    def hear(self, user: str, reply: dict[str, Any]) -> None:
        """An answer of /v1/recommend."""
        self._heard += 1
        if reply["items"] and self._heard % self._every == 0:
            self._answers.append({"user": user, **reply})

    def look(self, store: Path) -> dict[str, int]:
        """How many were looked at, and how many of them had a wrong score."""
        with LmdbStore(store, readonly=True) as histories:
            users = {answer["user"] for answer in self._answers}
            now = {user: histories.read(user) for user in users}
        wrong = sum(not _right(answer, now[answer["user"]]) for answer in self._answers)
        return {"looked_at": len(self._answers), "wrong": wrong}


def _right(answer: dict[str, Any], history: History) -> bool:
    items = np.array([item["item"] for item in answer["items"]], np.int64)
    scores = np.array([item["score"] for item in answer["items"]], np.float32)
    return any(
        np.array_equal(simulated_scores(SimulatedModel(), read, items)[:, 0], scores)
        for read in _readings(history, answer["used"], answer["path"])
    )


def _readings(history: History, used: int, path: str) -> list[History]:
    """What may have been ranked on: a window of a beginning that has as many behaviours; cut short, its newest ones."""
    if path == "TRUNCATED":
        return [history[end - used : end] for end in range(used, len(history) + 1)]
    window = PipelineConfig().window
    ends = (start + used for start in range(0, len(history) - used + 1, STEP))
    windows = (window.apply(history[:end]) for end in ends)
    return [read for read in windows if len(read) == used]
