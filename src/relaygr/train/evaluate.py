"""How good a trained model is on the part of a data set that it never learnt from."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from relaygr.errors import InvalidInput
from relaygr.model import RankingModel
from relaygr.train.dataset import UNKNOWN, Dataset
from relaygr.train.recipe import Recipe
from relaygr.train.scoring import next_item_metrics, next_item_ranks, ranking_metrics, ranking_scores
from relaygr.train.sequences import Sequences, device_of
from relaygr.train.split import Targets, split

__all__ = ["DIGITS", "Figures", "check_fits", "evaluate", "labelled", "rounded"]

DIGITS = 4
"""Figures are reported to so many digits."""

Ints = npt.NDArray[np.int64]
Labels = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Figures:
    """Figures on the test part of the split that the model was trained with."""

    split: str
    """Which behaviours those are."""
    length: int
    """Behaviours read, at most."""
    targets: int
    next_item: dict[str, float] | None
    """HR@10, 50, 200 and NDCG@10 among all items but those read; None where next items were not learnt."""
    next_item_other_ties: dict[str, float] | None
    """The same, where behaviours of one time are taken in the opposite order. Then some users have another last
    behaviour, of which this model has learnt; they are left out: `users` are left of `targets`."""
    ranking: Labels | None
    """For each label AUC, normalized entropy, calibration; None where ranking was not learnt."""


def evaluate(
    model: RankingModel,
    recipe: Recipe,
    dataset: Dataset,
    other: Dataset | None = None,
    *,
    length: int | None = None,
    device: torch.device | str = "cpu",
) -> Figures:
    """Judge on the test part. `other` is the same data set under the other rule for ties."""
    check_fits(model, dataset)
    length = length or recipe.sequence.length
    device = device_of(device)
    model = model.to(device)
    parts = split(dataset, recipe.sequence.split)
    sequences = Sequences(dataset, model.config, length, device)
    next_item = ties = ranking = None
    if recipe.objective.next_item:
        next_item = next_item_metrics(next_item_ranks(model, sequences, dataset, parts.test, length))
        if other is not None and recipe.sequence.split == "leave-one-out":
            fresh = _not_learnt(dataset, other, parts.train_stop, split(other, "leave-one-out").test)
            ranks = next_item_ranks(model, Sequences(other, model.config, length, device), other, fresh, length)
            ties = {**next_item_metrics(ranks), "users": len(fresh)} if len(fresh) else None
    if recipe.objective.ranking:
        known = labelled(dataset, parts.test)
        ranking = ranking_metrics(dataset, known, ranking_scores(model, sequences, dataset, known, length))
    return Figures(parts.about, length, len(parts.test), next_item, ties, ranking)


def check_fits(model: RankingModel, dataset: Dataset) -> None:
    """InvalidInput where the model was not made for such a data set."""
    config, facts = model.config, dataset.facts
    if config.items != len(dataset.catalogue):
        raise InvalidInput("data", f"has {len(dataset.catalogue)} items; the model was made for {config.items}")
    if config.actions != facts.actions:
        raise InvalidInput("data", f"has {facts.actions} actions; the model was made for {config.actions}")
    if config.tasks != max(1, len(facts.labels)):
        raise InvalidInput("data", f"has {len(facts.labels)} labels; the model was made for {config.tasks}")


def labelled(dataset: Dataset, targets: Targets) -> Targets:
    """Those whose labels are all known."""
    rows = dataset.offsets[targets.users] + targets.places
    known = (dataset.labels[rows] != UNKNOWN).all(axis=1)
    if not dataset.facts.labels or not known.any():
        raise InvalidInput("data", "has no labels on the behaviours to judge by")
    return Targets(targets.users[known], targets.places[known])


def rounded(figures: Labels) -> Labels:
    """As they are reported."""
    return {label: {name: round(value, DIGITS) for name, value in own.items()} for label, own in figures.items()}


def _not_learnt(dataset: Dataset, other: Dataset, train_stop: Ints, targets: Targets) -> Targets:
    """Targets in the other order that the model has not learnt from in its own."""
    keep = np.ones(len(targets), bool)
    for index, (user, place) in enumerate(zip(targets.users, targets.places, strict=True)):
        at = other.offsets[user] + place
        learnt = dataset.history(int(user), int(train_stop[user]))
        same = (learnt.items == other.items[at]) & (learnt.timestamps == other.timestamps[at])
        keep[index] = not same.any()
    return Targets(targets.users[keep], targets.places[keep])
