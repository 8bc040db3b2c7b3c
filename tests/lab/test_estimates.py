"""Intervals contain what they say as often as they say."""

import numpy as np
import pytest

from relaygr.lab.estimates import percentile_interval, share_interval


@pytest.mark.parametrize("percent", [50.0, 90.0, 99.0])
def test_the_interval_of_a_percentile_holds_the_true_one_95_times_in_100(percent: float) -> None:
    random = np.random.default_rng(0)
    true, held = float(np.quantile(random.exponential(size=10**6), percent / 100)), 0
    for _ in range(400):
        low, high = percentile_interval(random.exponential(size=700).tolist(), percent)
        held += low <= true <= (np.inf if high is None else high)
    assert 0.92 <= held / 400 <= 0.99


def test_too_few_values_have_no_upper_end() -> None:
    low, high = percentile_interval([1.0, 2.0, 3.0], 99)
    assert high is None
    assert low <= 3.0


@pytest.mark.parametrize(("hits", "of", "low", "high"), [(0, 100, 0.0, 0.037), (50, 100, 0.404, 0.596), (0, 0, 0, 1)])
def test_the_interval_of_a_share(hits: int, of: int, low: float, high: float) -> None:
    assert share_interval(hits, of) == pytest.approx((low, high), abs=1e-3)
