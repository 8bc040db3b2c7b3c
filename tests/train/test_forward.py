"""Training computes what serving computes."""

import numpy as np
import pytest
import torch

from oracle import assert_scores
from paged import VARIANTS, Pool, User, random_history, small_model
from relaygr.history import History
from relaygr.model import Candidates, RankingModel
from relaygr.model.tokens import candidate_tokens, history_tokens
from relaygr.train.forward import forward, scores_of

EMPTY = np.empty(0, np.int64)


def tokens_of(
    model: RankingModel, history: History, candidates: list[tuple[int, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """History tokens, and each candidate's at its own position."""
    config = model.config
    past = history_tokens(config, history, EMPTY, 0, len(history))
    own = [candidate_tokens(config, np.array([item]), place) for item, place in candidates]
    return torch.from_numpy(past), torch.from_numpy(np.concatenate(own))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_position_scores_what_serving_scores_behind_that_much_history(variant: str) -> None:
    rng = np.random.default_rng(3)
    model = small_model(variant, request_features=0, candidate_features=0)
    histories = [random_history(rng, n) for n in (1, 2, 17, 150)]
    longest = max(map(len, histories))
    padded = torch.zeros(len(histories), longest, 4, dtype=torch.int64)
    candidates = torch.zeros_like(padded)
    items = rng.integers(0, 2 * model.config.items, (len(histories), longest))
    for u, history in enumerate(histories):
        past, own = tokens_of(model, history, [(int(items[u, i]), i) for i in range(len(history))])
        padded[u, : len(history)], candidates[u, : len(history)] = past, own
    sees = torch.arange(longest).expand(len(histories), -1)
    found = forward(model, padded, candidates, sees).candidates
    assert found is not None
    scores = scores_of(model, found).detach().numpy()
    for u, history in enumerate(histories):
        for i in {0, 1, len(history) // 2, len(history) - 1} & set(range(len(history))):
            user = User(history[:i], EMPTY, Candidates(items[u, i : i + 1]), None)
            served = Pool(model, [user], rng).append_all().score() if i else Pool(model, [user], rng).score()
            assert_scores(scores[u, i : i + 1], served[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_candidates_with_features_score_what_serving_scores(variant: str) -> None:
    rng = np.random.default_rng(4)
    model = small_model(variant)
    history = random_history(rng, 40)
    items = rng.integers(0, 500, 6)
    features = rng.normal(size=(6, 2)).astype(np.float32)
    request = rng.normal(size=3).astype(np.float32)
    past, own = tokens_of(model, history, [(int(item), len(history)) for item in items])
    dense = torch.from_numpy(np.concatenate((np.tile(request, (6, 1)), features), axis=1))
    sees = torch.full((1, 6), len(history))
    found = forward(model, past[None], own[None], sees, dense[None]).candidates
    assert found is not None
    user = User(history, EMPTY, Candidates(items, features), request)
    assert_scores(scores_of(model, found)[0].detach(), Pool(model, [user], rng).append_all().score()[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_weight_that_serving_reads_gets_a_gradient(variant: str) -> None:
    rng = np.random.default_rng(5)
    model = small_model(variant, request_features=0, candidate_features=0).requires_grad_(True)
    history = random_history(rng, 12)
    past, own = tokens_of(model, history, [(int(item), place) for place, item in enumerate(history.items)])
    found = forward(model, past[None], own[None], torch.arange(12)[None], dropout=0.1).candidates
    assert found is not None
    scores_of(model, found).square().sum().backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if name != "embedding.dense":
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
