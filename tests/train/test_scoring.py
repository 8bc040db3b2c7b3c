"""Offline scores are those of their definition."""

import numpy as np
import pytest
import torch

from relaygr.model.tokens import history_tokens
from relaygr.train.forward import forward
from relaygr.train.objectives import item_vectors, query_vectors
from relaygr.train.recipe import Recipe
from relaygr.train.scoring import next_item_metrics, next_item_ranks, ranking_scores
from relaygr.train.sequences import Sequences
from relaygr.train.split import Targets, split
from relaygr.train.trainer import fresh_model
from small_data import ITEMS, cyclic

RECIPE = Recipe.from_dict(
    {
        "name": "small",
        "model": {"family": "hstu", "layers": 2, "dim": 16, "heads": 2, "scale_length": 8.0},
        "optimiser": {"embedding_scale": 1.0},
    }
)


def ranks_by_hand(length: int, target: int, *, leave_out_all: bool = False) -> int:
    """Of user `target`'s last item: a loop over all items."""
    data = cyclic()
    model = fresh_model(RECIPE, data, 0)
    place = int(data.lengths[target]) - 1
    history = data.history(target, place, last=length)
    tokens = torch.from_numpy(history_tokens(model.config, history, np.empty(0, np.int64), 0, len(history)))
    with torch.inference_mode():
        query = query_vectors(model, forward(model, tokens[None]).history[0, -1])
        scores = (item_vectors(model) @ query).numpy()
    wanted = int(data.history(target).items[place])
    left_out = data.history(target, place) if leave_out_all else history
    seen = set(left_out.items.tolist()) - {wanted}
    ahead = [item for item in range(ITEMS) if item not in seen and scores[item] > scores[wanted]]
    return len(ahead) + 1


@pytest.mark.parametrize("length", [3, 12, 200])
def test_a_rank_counts_the_items_ahead_that_were_not_read(length: int) -> None:
    data = cyclic()
    model = fresh_model(RECIPE, data, 0)
    found = next_item_ranks(model, Sequences(data, model.config, 200), data, split(data, "leave-one-out").test, length)
    for target in (0, 7, 39):
        assert found[target] == ranks_by_hand(length, target)


def test_what_was_seen_before_may_be_left_out_whatever_is_read() -> None:
    data = cyclic()
    model = fresh_model(RECIPE, data, 0)
    targets, sequences = split(data, "leave-one-out").test, Sequences(data, model.config, 200)
    found = next_item_ranks(model, sequences, data, targets, 3, leave_out_all=True)
    for target in (0, 7, 39):
        assert found[target] == ranks_by_hand(3, target, leave_out_all=True)


def test_of_equal_scores_the_lower_number_is_first() -> None:
    data = cyclic()
    model = fresh_model(RECIPE, data, 0)
    with torch.no_grad():
        model.embedding.table.fill_(1.0)
    targets = split(data, "leave-one-out").test
    found = next_item_ranks(model, Sequences(data, model.config, 5), data, targets, 5)
    for target, rank in enumerate(found):
        history = data.history(target)
        left = set(range(ITEMS)) - set(history.items[-6:-1].tolist())
        assert rank == sum(item < history.items[-1] for item in left) + 1


def test_targets_score_the_same_whoever_they_are_judged_with() -> None:
    data = cyclic()
    model = fresh_model(RECIPE, data, 0)
    sequences = Sequences(data, model.config, 20)
    targets = split(data, "time").test
    together = ranking_scores(model, sequences, data, targets, 20)
    for target in range(0, len(targets), 9):
        alone = Targets(targets.users[target : target + 1], targets.places[target : target + 1])
        np.testing.assert_allclose(ranking_scores(model, sequences, data, alone, 20)[0], together[target], atol=1e-5)


def test_metrics_of_ranks_have_the_names_of_reports() -> None:
    assert next_item_metrics(np.array([1, 11, 60, 300])) == {
        "hr@10": 0.25,
        "hr@50": 0.5,
        "hr@200": 0.75,
        "ndcg@10": 0.25,
    }
