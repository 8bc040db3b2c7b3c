"""Figures of a trained model."""

import numpy as np
import pytest

from relaygr.errors import InvalidInput
from relaygr.train.dataset import UNKNOWN, Dataset
from relaygr.train.evaluate import evaluate, labelled
from relaygr.train.recipe import Recipe
from relaygr.train.split import split
from relaygr.train.trainer import fresh_model
from small_data import cyclic, rows_of

RECIPE = Recipe.from_dict(
    {
        "name": "tiny",
        "model": {"family": "hstu", "layers": 1, "dim": 16, "heads": 2},
        "sequence": {"length": 12},
        "objective": {"ranking": 1.0},
    }
)


def tied(ties: int, order: str = "file") -> Dataset:
    """With the last so many behaviours of every user at one time."""
    rows, data = rows_of(), cyclic()
    last = np.flatnonzero(np.append(rows.users[1:] != rows.users[:-1], True))
    for back in range(ties):
        rows.timestamps[last - back] = rows.timestamps[last]
    return Dataset(data.facts, data.catalogue, rows, ties=order)  # type: ignore[arg-type]


def test_under_the_other_rule_for_ties_what_was_learnt_from_is_no_target() -> None:
    """Of two tied, the other rule's target chose the checkpoint; of three, the model has learnt from it."""
    model = fresh_model(RECIPE, cyclic(), 0)
    two = evaluate(model, RECIPE, tied(2), tied(2, "reversed"))
    assert two.next_item_other_ties is not None
    assert two.next_item_other_ties["users"] == two.targets
    assert evaluate(model, RECIPE, tied(3), tied(3, "reversed")).next_item_other_ties is None


def test_without_ties_both_rules_give_the_same_figures() -> None:
    figures = evaluate(fresh_model(RECIPE, cyclic(), 0), RECIPE, cyclic(), cyclic(ties="reversed"))
    assert figures.next_item is not None
    assert figures.next_item_other_ties == {**figures.next_item, "users": figures.targets}


def test_only_what_was_learnt_is_judged() -> None:
    recipe = RECIPE.with_values(objective={"ranking": 0.0})
    assert evaluate(fresh_model(recipe, cyclic(), 0), recipe, cyclic()).ranking is None


def test_targets_without_labels_are_not_ranked() -> None:
    rows, data = rows_of(), cyclic()
    rows.labels[::2] = UNKNOWN
    targets = split(data, "leave-one-out").test
    some = Dataset(data.facts, data.catalogue, rows)
    assert 0 < len(labelled(some, targets)) < len(targets)
    rows.labels[:] = UNKNOWN
    with pytest.raises(InvalidInput, match="labels"):
        labelled(Dataset(data.facts, data.catalogue, rows), targets)
