"""The margin is the quantile of what it saw, forgets slowly, and starts from its prior."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.relay.margin import Margin

Draw = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]

DISTRIBUTIONS: dict[str, Draw] = {
    "constant": lambda draw, size: np.full(size, 1.3),
    "lognormal": lambda draw, size: np.exp(0.4 * draw.standard_normal(size)),
    "uniform": lambda draw, size: draw.uniform(0.5, 2.0, size),
    "exponential": lambda draw, size: 0.2 + draw.exponential(0.8, size),
    "heavy tail": lambda draw, size: 1.0 + draw.pareto(2.5, size),
    "two modes": lambda draw, size: np.where(draw.random(size) < 0.9, 1.0, 4.0) * draw.uniform(0.9, 1.1, size),
}
BIN = 1.021


def seen(margin: Margin, ratios: npt.NDArray[np.float64]) -> Margin:
    for ratio in ratios.tolist():
        margin.observe(ratio)
    return margin


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("shape", DISTRIBUTIONS)
def test_the_margin_is_close_to_the_true_quantile(shape: str, quantile: float) -> None:
    draw = np.random.default_rng(7)
    margin = seen(Margin(quantile), DISTRIBUTIONS[shape](draw, 20_000))
    true = DISTRIBUTIONS[shape](draw, 200_000)
    error = 4 * math.sqrt(quantile * (1 - quantile) / 2000)
    low, high = np.quantile(true, [quantile - error, min(quantile + error, 1.0)])
    assert low / BIN <= margin.value <= high * BIN


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("prior", [1.0, 1.5, 10.0])
def test_at_first_the_margin_is_its_prior(quantile: float, prior: float) -> None:
    assert prior <= Margin(quantile, prior=prior).value <= prior * BIN


def test_the_prior_fades() -> None:
    margin = Margin(0.99, prior=8.0)
    ratios = np.random.default_rng(1).uniform(0.9, 1.1, 2000)
    values = [seen(margin, part).value for part in np.split(ratios, 10)]
    assert values == sorted(values, reverse=True)
    assert values[-1] < 1.2


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_a_change_is_followed_within_a_few_memories(factor: float) -> None:
    draw, lognormal = np.random.default_rng(2), DISTRIBUTIONS["lognormal"]
    margin = seen(Margin(0.9, memory=500), lognormal(draw, 3000))
    before = margin.value
    seen(margin, factor * lognormal(draw, 2500))
    assert margin.value == pytest.approx(factor * before, rel=0.25)


def test_a_few_far_outliers_do_not_move_it() -> None:
    margin = seen(Margin(0.9), np.random.default_rng(3).uniform(0.9, 1.1, 2000))
    before = margin.value
    seen(margin, np.full(20, 1e9))
    assert margin.value <= before * BIN


def test_counts_stay_finite_however_long_it_runs() -> None:
    margin = seen(Margin(0.9, memory=1), np.full(5000, 1.0))
    assert 1.0 <= margin.value <= BIN


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60), st.floats(0.01, 0.999))
def test_whatever_it_sees_it_stays_a_positive_number_and_the_same_again(ratios: list[float], quantile: float) -> None:
    one, other = (seen(Margin(quantile, memory=20), np.array(ratios)) for _ in range(2))
    assert one.value == other.value
    assert 1 / 64 <= one.value <= 64 * BIN


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_ratio_is_ignored(ratio: float) -> None:
    margin, untouched = Margin(0.5, prior_weight=1), Margin(0.5, prior_weight=1)
    seen(margin, np.full(100, ratio))
    seen(margin, np.full(10, 2.0))
    seen(untouched, np.full(10, 2.0))
    assert margin.value == untouched.value


@given(st.lists(st.floats(0.05, 20), min_size=1, max_size=60), st.floats(0.1, 0.9), st.floats(0.0, 0.09))
def test_a_higher_quantile_is_never_less(ratios: list[float], quantile: float, more: float) -> None:
    low, high = (seen(Margin(each), np.array(ratios)) for each in (quantile, quantile + more))
    assert low.value <= high.value
