"""Scores of a trained model through the serving engine, by relay: what offline figures are to agree with."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relaygr.config import EngineConfig
from relaygr.engine import Engine
from relaygr.model import RankingModel
from relaygr.train.dataset import Dataset
from relaygr.train.evaluate import labelled, rounded
from relaygr.train.recipe import Recipe
from relaygr.train.scoring import ranking_metrics, ranking_scores
from relaygr.train.sequences import Sequences
from relaygr.train.split import Targets, split

__all__ = ["Compared", "compare", "relayed_scores"]

_AT_ONCE = 8
"""Users who are served side by side."""


async def relayed_scores(
    model: RankingModel,
    dataset: Dataset,
    targets: Targets,
    length: int,
    device: str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[npt.NDArray[np.float32], dict[str, int]]:
    """Logits [targets, tasks], and how many ranks took each path.

    Each target is pre-inferred, then ranked, on the newest `length` behaviours before it; a user's one after another,
    so that what is kept of one is extended for the next.
    """
    scores = np.empty((len(targets), model.config.tasks), np.float32)
    paths = Counter[str]()
    of_user: dict[int, list[int]] = {}
    for index, user in enumerate(targets.users.tolist()):
        of_user.setdefault(user, []).append(index)
    queue = iter(of_user.items())
    config = EngineConfig(device=device, host_cache="0", max_history=length)

    async def serve(engine: Engine) -> None:
        for user, indices in queue:
            name = dataset.names[user]
            for index in indices:
                place = int(targets.places[index])
                history = dataset.history(user, place, last=length)
                item = dataset.items[dataset.offsets[user] + place]
                await engine.pre_infer(name, history)
                ranked = await engine.rank(name, history, np.array([item]))
                scores[index] = ranked.scores[0]
                paths[str(ranked.path)] += 1
                progress(paths.total(), len(targets))

    async with Engine(model, config) as engine, asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(serve(engine))
    return scores, dict(paths)


@dataclass(frozen=True)
class Compared:
    """Ranking figures of the same targets, offline and by relay, as they are reported."""

    targets: int
    offline: dict[str, dict[str, float]]
    relayed: dict[str, dict[str, float]]
    paths: dict[str, int]

    @property
    def agree(self) -> bool:
        """To the last digit; figures that are not numbers agree with each other."""
        return json.dumps(self.offline) == json.dumps(self.relayed)


async def compare(
    model: RankingModel,
    recipe: Recipe,
    dataset: Dataset,
    *,
    length: int | None = None,
    most: int = 2000,
    device: str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Compared:
    """Judge at most so many targets of the test part both ways."""
    length = length or recipe.sequence.length
    targets = labelled(dataset, split(dataset, recipe.sequence.split).test).sample(most)
    sequences = Sequences(dataset, model.config, length, device)
    offline = ranking_scores(model, sequences, dataset, targets, length)
    relayed, paths = await relayed_scores(model, dataset, targets, length, device, progress)
    own, other = (rounded(ranking_metrics(dataset, targets, scores)) for scores in (offline, relayed))
    return Compared(len(targets), own, other, paths)
