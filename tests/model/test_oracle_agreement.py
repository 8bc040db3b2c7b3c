"""Pages, batches and splits change when a score is computed, never what it is."""

import numpy as np
import pytest

from oracle import assert_scores, oracle_scores
from paged import VARIANTS, Pool, random_user, small_model

SHAPES = (
    {"layers": 1, "dim": 32, "heads": 1},
    {"layers": 2, "dim": 32, "heads": 2, "head_dim": 8},
    {"layers": 3, "dim": 48, "heads": 4, "tasks": 3},
    {"layers": 4, "dim": 64, "heads": 2, "tasks": 1, "request_features": 0, "candidate_features": 0},
)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_users_placements_batches_and_splits_agree_with_the_oracle(variant: str, seed: int) -> None:
    rng = np.random.default_rng([seed, 1])
    model = small_model(variant, seed=seed, **SHAPES[seed % len(SHAPES)])
    users = [
        random_user(
            rng,
            model,
            behaviours=(0, 1, int(rng.integers(2, 128)), int(rng.integers(128, 420)))[rng.integers(4)],
            context=int(rng.integers(2) * rng.integers(1, 9)),
            candidates=int(rng.integers(1, 30)),
        )
        for _ in range(rng.integers(1, 5))
    ]
    pool = Pool(model, users, rng, spare=int(rng.integers(0, 6))).append_split(rng, pieces=int(rng.integers(1, 6)))
    order = rng.permutation(len(users)).tolist()
    for u, scores in zip(order, pool.score(order), strict=True):
        user = users[u]
        expected = oracle_scores(model, user.history, user.candidates, context=user.context, request=user.request)
        assert_scores(scores, expected)


@pytest.mark.parametrize(("silu_on", "combine"), [("u", "gate"), ("uvqk", "concat")])
def test_the_choices_of_hstu_are_independent_of_each_other(silu_on: str, combine: str) -> None:
    rng = np.random.default_rng(2)
    model = small_model("meta", silu_on=silu_on, combine=combine)
    user = random_user(rng, model, behaviours=150, context=3, candidates=7)
    scores = Pool(model, [user], rng).append_all().score()[0]
    assert_scores(
        scores, oracle_scores(model, user.history, user.candidates, context=user.context, request=user.request)
    )


@pytest.mark.parametrize("tokens", [127, 128, 129, 256, 1023, 1024, 1025, 2049])
@pytest.mark.parametrize("variant", ["meta", "softmax"])
def test_lengths_around_pages_and_blocks_agree_with_the_oracle(variant: str, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    model = small_model(variant, layers=2, dim=32, heads=1)
    user = random_user(rng, model, behaviours=tokens - 1, context=1, candidates=3)
    expected = oracle_scores(model, user.history, user.candidates, context=user.context, request=user.request)
    pool = Pool(model, [user], rng)
    pool.append([0], [(0, tokens - 1)])
    pool.append([0], [(tokens - 1, tokens)])
    assert_scores(pool.score()[0], expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_window_is_scored_from_its_own_start(variant: str) -> None:
    rng = np.random.default_rng(5)
    model = small_model(variant)
    user = random_user(rng, model, behaviours=300, candidates=4)
    window = type(user)(user.history[130:], user.context, user.candidates, user.request)
    scores = Pool(model, [window], rng).append_split(rng, pieces=3).score()[0]
    assert_scores(scores, oracle_scores(model, user.history[130:], user.candidates, request=user.request))
    assert np.abs(scores - oracle_scores(model, user.history, user.candidates, request=user.request)).max() > 1e-3
