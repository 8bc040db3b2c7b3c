"""Distributions given by their quantiles."""

import numpy as np
import pytest

from relaygr.errors import InvalidInput
from relaygr.history.quantiles import Quantiles


def test_what_is_drawn_follows_the_distribution() -> None:
    drawn = Quantiles(((0.0, 10), (0.5, 100), (1.0, 1000)), "here").draw(np.random.default_rng(0), 20_000)
    assert drawn.min() >= 10
    assert drawn.max() <= 1000
    assert np.median(drawn) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize(
    "points", [(), ((0.5, 1.0), (0.5, 2.0)), ((0.1, 2.0), (0.9, 1.0)), ((0.1, 0.0),), ((1.5, 1.0),)]
)
def test_points_that_are_no_distribution_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(InvalidInput, match="quantiles"):
        Quantiles(points, "here")


def test_what_is_drawn_of_values_that_were_seen_lies_among_them() -> None:
    seen = np.random.default_rng(0).integers(1, 5000, 700)
    drawn = Quantiles.of(seen, "here").draw(np.random.default_rng(1), 20_000)
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert np.quantile(drawn, share) == pytest.approx(np.quantile(seen, share), rel=0.05, abs=20)
    assert set(Quantiles.of([7], "here").draw(np.random.default_rng(1), 5).round(6).tolist()) == {7.0}
