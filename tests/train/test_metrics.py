"""Figures of quality, against their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.errors import InvalidInput
from relaygr.train.metrics import auc, calibration, hit_rate, ndcg, normalized_entropy

pairs = st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=1, max_size=40)


@given(pairs)
def test_auc_is_the_share_of_pairs_in_the_right_order_ties_counting_half(rows: list[tuple[bool, int]]) -> None:
    labels, scores = np.array([label for label, _ in rows]), np.array([float(score) for _, score in rows])
    wins = [(p > n) + 0.5 * (p == n) for p in scores[labels] for n in scores[~labels]]
    found = auc(labels, scores)
    assert math.isnan(found) if not wins else found == pytest.approx(np.mean(wins))


def test_entropy_is_1_for_the_mean_and_less_for_what_knows_more() -> None:
    labels = np.array([1, 0, 0, 0])
    mean = np.full(4, math.log(1 / 3))
    assert normalized_entropy(labels, mean) == pytest.approx(1.0)
    assert normalized_entropy(labels, np.array([2.0, -2, -2, -2])) < 0.5
    assert math.isnan(normalized_entropy(np.ones(3), np.zeros(3)))


def test_entropy_and_calibration_hold_for_logits_of_any_size() -> None:
    labels, logits = np.array([1, 0]), np.array([800.0, -800.0])
    assert normalized_entropy(labels, logits) == 0.0
    assert calibration(labels, logits) == 1.0


def test_calibration_is_predicted_over_real_positives() -> None:
    assert calibration(np.array([1, 0, 0, 0]), np.zeros(4)) == 2.0
    assert math.isnan(calibration(np.zeros(2), np.zeros(2)))


def test_hits_and_gains_of_ranks() -> None:
    ranks = np.array([1, 3, 10, 11])
    assert hit_rate(ranks, 10) == 0.75
    assert ndcg(ranks, 10) == pytest.approx((1 + 1 / 2 + 1 / math.log2(11)) / 4)


def test_labels_and_scores_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidInput, match="labels"):
        auc(np.ones(3), np.ones(2))
