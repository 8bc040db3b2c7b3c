"""Losses, against their definitions computed one position at a time."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from relaygr.model import RankingModel
from relaygr.train.dataset import UNKNOWN, Dataset
from relaygr.train.forward import forward
from relaygr.train.objectives import item_vectors, losses, query_vectors
from relaygr.train.recipe import Objective, Recipe
from relaygr.train.scoring import ranking_scores
from relaygr.train.sequences import Batch, Sequences
from relaygr.train.split import Targets
from relaygr.train.trainer import fresh_model
from small_data import cyclic, rows_of

RECIPE = Recipe.from_dict(
    {
        "name": "small",
        "model": {"family": "hstu", "layers": 1, "dim": 16, "heads": 2, "scale_length": 8.0},
        "optimiser": {"embedding_scale": 1.0},
    }
)


def prepared() -> tuple[Dataset, RankingModel, Sequences, Batch]:
    """Three users from their first behaviour on, a third of whose labels are not known."""
    rows, data = rows_of(3), cyclic(3)
    rows.labels[::3] = UNKNOWN
    data = Dataset(data.facts, data.catalogue, rows)
    model = fresh_model(RECIPE, data, 0)
    sequences = Sequences(data, model.config, 24)
    lengths = torch.tensor([24, 9, 2]).minimum(torch.from_numpy(data.lengths))
    return data, model, sequences, sequences.windows(torch.from_numpy(data.offsets[:3]), lengths, int(lengths.max()))


def test_ranking_is_the_mean_over_every_position_s_known_labels() -> None:
    data, model, sequences, batch = prepared()
    found = losses(model, sequences, batch, Objective(next_item=0.0, ranking=1.0), 0.0)["ranking"]
    users, places = (np.concatenate(parts) for parts in zip(*_positions(batch), strict=True))
    scores = ranking_scores(model, sequences, data, Targets(users, places), 24).astype(np.float64)
    labels = data.labels[data.offsets[users] + places]
    each = np.logaddexp(0, scores) - np.where(labels > 0, scores, 0)
    assert 0 < (labels == UNKNOWN).sum() < labels.size
    assert found.item() == pytest.approx(each[labels != UNKNOWN].mean(), rel=1e-5)


@pytest.mark.parametrize("negatives", [0, 7])
def test_next_item_is_the_cross_entropy_of_every_position_s_next_item(negatives: int) -> None:
    _, model, sequences, batch = prepared()
    objective = Objective(negatives=negatives, temperature=0.3)
    torch.manual_seed(5)
    found = losses(model, sequences, batch, objective, 0.0)["next_item"]
    torch.manual_seed(5)
    drawn = torch.randint(model.config.items, (negatives,)).tolist() if negatives else list(range(model.config.items))
    queries = query_vectors(model, forward(model, batch.tokens).history).detach()
    items = item_vectors(model).detach()
    each = []
    for user, length in enumerate(batch.lengths.tolist()):
        for place in range(length - 1):
            target = int(batch.tokens[user, place + 1, 0])
            logits = {i: float(queries[user, place] @ items[i]) / 0.3 for i in {*drawn, target}}
            copies = {i: 1 if i == target else drawn.count(i) for i in logits}
            total = sum(copies[i] * math.exp(logit) for i, logit in logits.items())
            each.append(math.log(total) - logits[target])
    assert found.item() == pytest.approx(np.mean(each), rel=1e-4)


def _positions(batch: Batch) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    return [(np.full(n, user), np.arange(n)) for user, n in enumerate(batch.lengths.tolist())]
