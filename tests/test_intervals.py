"""Intervals over users: what is computed by weights is what repeating the users gives."""

import numpy as np
import pytest

import intervals
from relaygr.train.metrics import auc

RANDOM = np.random.default_rng(0)
USERS = np.sort(RANDOM.integers(0, 20, 400)) * 7
SCORES = RANDOM.integers(0, 30, 400) / 7  # with ties
LABELS = (RANDOM.random(400) < 0.2 + SCORES / 8).astype(np.int8)


def test_a_draw_is_the_figure_of_its_users_each_as_often_as_drawn() -> None:
    draws = intervals.Draws(USERS, 25, seed=3)
    aucs, means = draws.aucs(LABELS, SCORES), draws.means(SCORES)
    assert len(aucs) == len(means) == 26
    for draw in range(26):
        rows = np.repeat(np.arange(400), draws.weights(draw))
        assert aucs[draw] == pytest.approx(auc(LABELS[rows], SCORES[rows]))
        assert means[draw] == pytest.approx(SCORES[rows].mean())
    assert aucs[0] == pytest.approx(auc(LABELS, SCORES))


def test_within_users_only_their_own_targets_are_compared() -> None:
    draws = intervals.Draws(USERS, 25, seed=3)
    shifted = SCORES + 1000 * RANDOM.permutation(141)[USERS]  # ties within users stay as they are
    np.testing.assert_allclose(draws.aucs_within(LABELS, shifted), draws.aucs_within(LABELS, SCORES))
    labels = np.where(USERS[0] == USERS, 1, LABELS)  # a user with one kind does not count
    kept = USERS[0] != USERS
    expected = np.average(
        [auc(LABELS[user == USERS], SCORES[user == USERS]) for user in np.unique(USERS[kept])],
        weights=[(user == USERS).sum() for user in np.unique(USERS[kept])],
    )
    assert draws.aucs_within(labels, SCORES)[0] == pytest.approx(expected)


def test_users_are_drawn_whole_and_as_many_as_there_are() -> None:
    draws = intervals.Draws(USERS, 5)
    for draw in range(1, 6):
        of_user = [set(draws.weights(draw)[user == USERS]) for user in np.unique(USERS)]
        assert all(len(counts) == 1 for counts in of_user)
        assert sum(counts.pop() for counts in of_user) == len(np.unique(USERS))


def test_an_interval_has_most_of_the_draws() -> None:
    draws = np.concatenate(([0.5], np.linspace(0, 1, 1001)))
    assert intervals.interval(draws) == {"value": 0.5, "low": 0.025, "high": 0.975}
