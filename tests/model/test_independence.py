"""What a score and a prefix do not depend on.

Two strengths of "does not depend". *Bitwise*, where the shapes of a batch stay and only what is in it changes: what is
read is not there to be seen. *Within rounding*, where shapes change too: matrix products of other sizes may sum in
another order, so the promise is the tolerance that scores have anyway.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from oracle import TOLERANCE, assert_scores
from paged import VARIANTS, Pool, User, bits, random_history, random_user, small_model
from relaygr.model import Candidates, RankingModel

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def three_users(model: RankingModel, seed: int = 0) -> list[User]:
    rng = np.random.default_rng([seed, 3])
    sizes = ((200, 2, 9), (37, 0, 1), (130, 4, 17))
    return [random_user(rng, model, behaviours=n, context=c, candidates=m) for n, c, m in sizes]


def others_changed(model: RankingModel, users: list[User], keep: int) -> list[User]:
    """The same sizes, but all users other than `keep` are other people."""
    rng = np.random.default_rng(77)
    return [
        user
        if u == keep
        else User(
            random_history(rng, len(user.history)),
            rng.integers(0, 50, len(user.context)),
            Candidates(rng.integers(0, 500, len(user.candidates)), rng.normal(size=(len(user.candidates), 2))),
            rng.normal(size=3).astype(np.float32),
        )
        for u, user in enumerate(users)
    ]


@every_variant
def test_other_users_in_the_batch_are_not_seen_at_all(variant: str) -> None:
    model = small_model(variant)
    users = three_users(model)
    for keep in range(len(users)):
        one = Pool(model, users, np.random.default_rng(1)).append_all()
        other = Pool(model, others_changed(model, users, keep), np.random.default_rng(1)).append_all()
        assert torch.equal(bits(one.kv(keep)), bits(other.kv(keep)))
        assert np.array_equal(one.score()[keep], other.score()[keep])
        assert not np.array_equal(one.score()[keep - 1], other.score()[keep - 1])


@every_variant
def test_a_user_scores_the_same_alone_as_in_company_within_rounding(variant: str) -> None:
    model = small_model(variant)
    users = three_users(model)
    rng = np.random.default_rng(1)
    together = Pool(model, users, rng).append_all().score()
    for user, scores in zip(users, together, strict=True):
        assert_scores(Pool(model, [user], rng).append_all().score()[0], scores)


@every_variant
def test_the_order_of_users_in_a_batch_does_not_matter(variant: str) -> None:
    model = small_model(variant)
    pool = Pool(model, three_users(model), np.random.default_rng(1)).append_all()
    forward, backward = pool.score([0, 1, 2]), pool.score([2, 1, 0])
    for scores, again in zip(forward, reversed(backward), strict=True):
        assert_scores(again, scores)


@every_variant
def test_other_candidates_are_not_seen_at_all(variant: str) -> None:
    model = small_model(variant)
    user = three_users(model)[2]
    features = np.random.default_rng(3).normal(size=(17, 2)).astype(np.float32)
    items = user.candidates.items
    before = Pool(model, [replace(user, candidates=Candidates(items, features))], np.random.default_rng(1))
    others, other_features = (items + 1) % 500, features * 2
    others[5], other_features[5] = items[5], features[5]
    after = Pool(model, [replace(user, candidates=Candidates(others, other_features))], np.random.default_rng(1))
    one, other = before.append_all().score()[0], after.append_all().score()[0]
    assert np.array_equal(one[5], other[5])
    assert (np.delete(one, 5, 0) != np.delete(other, 5, 0)).all()


@every_variant
def test_candidate_order_and_duplicates_do_not_matter(variant: str) -> None:
    rng = np.random.default_rng(4)
    model = small_model(variant)
    user = three_users(model)[0]
    items, features = rng.permutation(500)[:23], rng.normal(size=(23, 2)).astype(np.float32)
    chosen = rng.integers(0, 23, 61)  # some several times, some not at all, in any order
    pool = Pool(model, [user], rng).append_all()
    pool.users[0] = replace(user, candidates=Candidates(items, features))
    scores = pool.score()[0]
    pool.users[0] = replace(user, candidates=Candidates(items[chosen], features[chosen]))
    assert_scores(pool.score()[0], scores[chosen])
    pool.users[0] = replace(user, candidates=Candidates(items[7:8], features[7:8]))
    assert_scores(pool.score()[0], scores[7:8])


@every_variant
def test_where_pages_lie_does_not_matter(variant: str) -> None:
    model = small_model(variant)
    users = three_users(model)
    pools = [Pool(model, users, np.random.default_rng(seed), spare=seed).append_all() for seed in range(4)]
    assert len({tuple(map(tuple, pool.owned)) for pool in pools}) == len(pools)
    for pool in pools[1:]:
        for u in range(len(users)):
            assert torch.equal(bits(pool.kv(u)), bits(pools[0].kv(u)))
            assert np.array_equal(pool.score()[u], pools[0].score()[u])


@every_variant
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_poison_in_free_pages_and_behind_the_tail_changes_nothing(variant: str, poison: float) -> None:
    model = small_model(variant)
    users = three_users(model)
    clean, dirty = (Pool(model, users, np.random.default_rng(1)) for _ in range(2))
    clean.pages.zero_()
    dirty.pages.fill_(poison)
    rng = np.random.default_rng(2), np.random.default_rng(2)
    clean.append_split(rng[0], pieces=4)
    dirty.append_split(rng[1], pieces=4)
    for u in range(len(users)):
        assert torch.equal(bits(clean.kv(u)), bits(dirty.kv(u)))
        assert np.array_equal(clean.score()[u], dirty.score()[u])


@every_variant
def test_scoring_writes_nothing(variant: str) -> None:
    model = small_model(variant)
    pool = Pool(model, three_users(model), np.random.default_rng(1)).append_all()
    before = bits(pool.pages)
    pool.score()
    pool.score([1])
    assert torch.equal(bits(pool.pages), before)


@every_variant
def test_append_writes_its_own_slots_and_nothing_else(variant: str) -> None:
    model = small_model(variant)
    pool = Pool(model, three_users(model), np.random.default_rng(1))
    pool.append([0, 2], [(0, 100), (0, 60)])
    before = bits(pool.pages)
    pool.append([2, 0], [(60, 134), (100, 130)])
    changed = (bits(pool.pages) != before).flatten(4).any(-1)  # [page, layer, k|v, token]
    expected = torch.zeros_like(changed)
    for u, low, high in ((2, 60, 134), (0, 100, 130)):
        for token in range(low, high):
            expected[pool.owned[u][token // 128], :, :, token % 128] = True
    assert torch.equal(changed, expected)


@every_variant
def test_what_follows_a_prefix_is_not_seen_by_its_kv(variant: str) -> None:
    model = small_model(variant)
    user = three_users(model)[0]
    history = user.history[:140]
    tails = [random_history(np.random.default_rng(seed), 60) for seed in (1, 2)]
    pools = []
    for tail in tails:
        longer = history.append(tail.items, tail.actions, tail.timestamps + 10**9)
        pool = Pool(model, [replace(user, history=longer)], np.random.default_rng(1)).append_all()
        pools.append(pool)
    prefix = len(user.context) + 140
    assert torch.equal(bits(pools[0].kv(0, 0, prefix)), bits(pools[1].kv(0, 0, prefix)))
    assert not torch.equal(pools[0].kv(0, prefix), pools[1].kv(0, prefix))


@every_variant
def test_kv_of_a_prefix_is_bitwise_unchanged_by_appends_behind_it(variant: str) -> None:
    model = small_model(variant)
    pool = Pool(model, three_users(model)[:1], np.random.default_rng(1))
    pool.append([0], [(0, 75)])
    first = pool.kv(0, 0, 75)
    pool.append([0], [(75, 76)])
    pool.append([0], [(76, 202)])
    assert torch.equal(bits(pool.kv(0, 0, 75)), bits(first))


@every_variant
def test_how_a_history_was_cut_into_appends_matters_to_rounding_alone(variant: str) -> None:
    model = small_model(variant)
    users = three_users(model)
    whole = Pool(model, users, np.random.default_rng(1)).append_all()
    for seed in range(3):
        rng = np.random.default_rng(seed)
        split = Pool(model, users, rng).append_split(rng, pieces=7)
        for u in range(len(users)):
            kv = whole.kv(u)
            assert (split.kv(u) - kv).abs().max() <= TOLERANCE * max(1.0, float(kv.abs().max()))
            assert_scores(split.score()[u], whole.score()[u])
