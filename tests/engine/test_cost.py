"""The cost model learns what work takes, stays current, and never forgets what traffic does not show."""

import itertools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.engine.cost import CostModel

Features: TypeAlias = tuple[float, ...]
Shape: TypeAlias = tuple[list[tuple[int, int]], list[tuple[int, int]]]

DEVICES = {
    "fast": (100e-6, 0.1e-6, 0.02e-9, 0.2e-6, 0.03e-9),
    "middling": (100e-6, 2e-6, 1e-9, 5e-6, 2e-9),
    "slow": (50e-6, 10e-6, 30e-9, 10e-6, 10e-9),
}
SHAPES: list[Shape] = [
    *(([(new, cached)], []) for new, cached in ((1, 0), (16, 1), (128, 17), (512, 145), (1391, 657), (2048, 0))),
    *(([], [(rows, tokens)]) for rows in (16, 256) for tokens in (1, 1024, 2048)),
]
ASKED: list[Shape] = [
    *(([(new, cached)], []) for new, cached in ((2048, 0), (512, 1024), (128, 1024), (128, 0), (16, 2000))),
    *(([], [(rows, tokens)]) for rows, tokens in ((128, 2048), (64, 512), (32, 1))),
    ([(128, 512), (16, 2000)], [(128, 528), (64, 1024)]),
]


def seconds(device: Features, features: Features) -> float:
    return sum(price * amount for price, amount in zip(device, features, strict=True))


def noisy(seed: int, spread: float) -> Iterator[float]:
    """Factors around 1."""
    draw = np.random.default_rng(seed)
    while True:
        yield float(np.exp(spread * draw.standard_normal()))


def profiled(device: Features, noise: Iterator[float], repeats: int = 2) -> CostModel:
    model = CostModel()
    shapes = [CostModel.features(*shape) for shape in SHAPES] * repeats
    model.steps.profile([(features, seconds(device, features) * next(noise)) for features in shapes])
    return model


def mixed_traffic(seed: int) -> Callable[[], Features]:
    """Steps of all kinds."""
    draw = np.random.default_rng(seed)

    def step() -> Features:
        appends = [(int(draw.integers(1, 600)), int(draw.integers(0, 2000))) for _ in range(draw.integers(0, 3))]
        scores = [(int(draw.integers(1, 256)), int(draw.integers(0, 2000))) for _ in range(draw.integers(1, 3))]
        return CostModel.features(appends, scores)

    return step


def predicted(model: CostModel, shape: Shape) -> float:
    appends, scores = shape
    return (
        model.step_s
        + sum(model.append_s(*append) for append in appends)
        + sum(model.score_s(*score) for score in scores)
    )


def worst(model: CostModel, device: Features, shapes: list[Shape] = ASKED) -> float:
    """The largest relative error over these shapes."""
    true = [seconds(device, CostModel.features(*shape)) for shape in shapes]
    return max(abs(predicted(model, shape) / actual - 1) for shape, actual in zip(shapes, true, strict=True))


devices = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


@devices
def test_exact_samples_give_the_exact_costs(device: Features) -> None:
    model = profiled(device, noisy(0, 0.0))
    assert model.steps.coefficients == pytest.approx(device, rel=1e-3)
    assert worst(model, device) < 1e-3


@devices
@pytest.mark.parametrize("seed", range(3))
def test_noisy_samples_give_the_costs_within_a_few_percent(device: Features, seed: int) -> None:
    assert worst(profiled(device, noisy(seed, 0.02), repeats=10), device) < 0.03
    assert worst(profiled(device, noisy(seed, 0.1), repeats=10), device) < 0.12


def test_each_coefficient_is_found_where_the_samples_show_it() -> None:
    device, noise, draw = DEVICES["slow"], noisy(1, 0.02), np.random.default_rng(1)
    model = CostModel()
    samples = []
    for _ in range(2000):
        kind = draw.integers(0, 4)
        small, large = int(draw.integers(1, 4)), int(draw.integers(1000, 4000))
        appends = {0: [(1, 0)], 1: [(small, 0)], 2: [(small, large)]}.get(int(kind), [])
        scores = [(large, 1 if draw.random() < 0.5 else large)] if kind == 3 else []
        features = CostModel.features(appends, scores)
        samples.append((features, seconds(device, features) * next(noise)))
    model.steps.profile(samples)
    assert model.steps.coefficients == pytest.approx(device, rel=0.05)


def test_copies_are_learned_too() -> None:
    model, noise = CostModel(), noisy(2, 0.02)
    model.copies.profile([((1.0, float(n)), (30e-6 + 5e-6 * n) * next(noise)) for n in (1, 8, 64) for _ in range(10)])
    assert model.copy_s(0) == pytest.approx(30e-6, rel=0.05)
    assert model.copy_s(32) == pytest.approx(190e-6, rel=0.05)


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 20_000)), max_size=3),
            st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 20_000)), max_size=3),
            st.floats(0, 10),
        ),
        max_size=40,
    )
)
def test_no_samples_make_a_cost_negative_or_less_for_more_work(
    samples: list[tuple[list[tuple[int, int]], list[tuple[int, int]], float]],
) -> None:
    model = CostModel()
    model.steps.profile([(CostModel.features(a, s), took) for a, s, took in samples[:10] if took > 0])
    for appends, scores, took in samples[10:]:
        model.steps.observe(CostModel.features(appends, scores), took)
    assert all(np.isfinite(coefficient) and coefficient >= 0 for coefficient in model.steps.coefficients)
    assert 0 <= model.append_s(1, 0) <= model.append_s(2, 0) <= model.append_s(2, 100)
    assert 0 <= model.score_s(1, 0) <= model.score_s(2, 0) <= model.score_s(2, 100)
    assert model.append_s(0, 100) == model.score_s(0, 100) == 0


def test_a_part_of_the_work_that_costs_nothing_is_found_to_cost_nothing() -> None:
    device = (100e-6, 1e-6, 0.0, 2e-6, 0.0)
    model = profiled(device, noisy(3, 0.02), repeats=10)
    assert min(model.steps.coefficients) >= 0.0
    assert worst(model, device) < 0.05


@devices
@pytest.mark.parametrize("kind", ["scores", "appends"])
def test_traffic_of_one_kind_leaves_what_the_profile_knows_of_the_other(device: Features, kind: str) -> None:
    noise, draw = noisy(4, 0.05), np.random.default_rng(4)
    model = profiled(device, noise)
    for _ in range(2000):
        if kind == "scores":
            features = CostModel.features([], [(int(draw.integers(58, 70)), int(draw.integers(900, 1100)))])
        else:
            features = CostModel.features([(int(draw.integers(10, 20)), int(draw.integers(900, 1100)))], [])
        model.steps.observe(features, seconds(device, features) * next(noise))
    assert worst(model, device) < 0.15


@devices
@pytest.mark.parametrize("factor", [0.5, 1.5, 2.0])
def test_a_device_that_becomes_slower_or_faster_is_followed(device: Features, factor: float) -> None:
    noise, step = noisy(5, 0.05), mixed_traffic(5)
    model = profiled(device, noise)
    changed = tuple(factor * price for price in device)
    for _ in range(600):
        features = step()
        model.steps.observe(features, seconds(changed, features) * next(noise))
    shown: list[Shape] = [([(300, 1000)], [(128, 1000)]), ([(500, 0)], [(128, 500)]), ([], [(200, 1500)])]
    assert worst(model, changed, shown) < 0.2
    assert worst(model, device, shown) > 0.3


@devices
def test_a_change_is_followed_within_a_few_hundred_steps_and_back_again(device: Features) -> None:
    step, model = mixed_traffic(6), profiled(device, noisy(6, 0.0))
    doubled = tuple(2 * price for price in device)
    for now in (doubled, device):
        for _ in range(300):
            features = step()
            model.steps.observe(features, seconds(now, features))
        assert worst(model, now, [([(300, 1000)], [(128, 1000)])]) < 0.1


def test_a_few_steps_that_took_far_too_long_change_little() -> None:
    device, step = DEVICES["middling"], mixed_traffic(7)
    model = profiled(device, noisy(7, 0.0))
    for index in range(500):
        features = step()
        model.steps.observe(features, seconds(device, features) * (100.0 if index % 25 == 0 else 1.0))
    assert worst(model, device) < 0.1


def test_nothing_is_learned_from_work_that_took_no_time() -> None:
    model = profiled(DEVICES["fast"], noisy(8, 0.0))
    before, version = model.steps.coefficients, model.version
    for _ in range(100):
        model.steps.observe(CostModel.features([(10, 10)], []), 0.0)
    assert (model.steps.coefficients, model.version) == (before, version)


def test_the_version_goes_up_when_the_costs_do_change_and_only_then() -> None:
    model = profiled(DEVICES["fast"], noisy(9, 0.0))
    step, versions, costs = mixed_traffic(9), [model.version], [model.steps.coefficients]
    for _ in range(200):
        model.steps.observe(step(), 1.0)
        versions.append(model.version)
        costs.append(model.steps.coefficients)
    assert versions == sorted(versions)
    assert versions[-1] > versions[0]
    for before, after in zip(range(200), range(1, 201), strict=True):
        assert (versions[before] == versions[after]) == (costs[before] == costs[after])
    model.copies.profile([((1.0, 1.0), 1.0)])
    assert model.version == versions[-1] + 1


def test_before_a_profile_everything_is_free() -> None:
    model = CostModel()
    assert (model.step_s, model.append_s(100, 100), model.score_s(100, 100), model.copy_s(100)) == (0, 0, 0, 0)
    model.steps.profile([])
    assert model.steps.coefficients == (0.0,) * 5


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=4),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=4),
)
def test_a_steps_cost_is_the_sum_of_its_parts(appends: list[tuple[int, int]], scores: list[tuple[int, int]]) -> None:
    model = CostModel()
    model.steps.coefficients = DEVICES["slow"]
    whole = seconds(DEVICES["slow"], CostModel.features(appends, scores))
    assert predicted(model, (appends, scores)) == pytest.approx(whole)


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_an_append_in_chunks_costs_what_it_costs_at_once(first: int, second: int, cached: int) -> None:
    model = CostModel()
    model.steps.coefficients = DEVICES["slow"]
    chunks = model.append_s(first, cached) + model.append_s(second, cached + first)
    assert chunks == pytest.approx(model.append_s(first + second, cached))


def test_a_step_that_a_clock_took_for_nothing_counts_like_one_of_a_nanosecond() -> None:
    def learned(odd_s: float) -> tuple[float, ...]:
        model = profiled(DEVICES["slow"], itertools.repeat(1.0))
        for seconds_ in (*[1e-3] * 400, odd_s):
            model.steps.observe(CostModel.features([], [(100, 1000)]), seconds_)
        model.steps._fit()
        return model.steps.coefficients

    assert learned(1e-160) == learned(1e-9)


@given(st.integers(1, 40), st.integers(0, 40))
def test_pairs_are_those_of_a_causal_append(new: int, cached: int) -> None:
    _, tokens, pairs, _, _ = CostModel.features([(new, cached)], [])
    assert tokens == new
    assert pairs == sum(1 for query in range(cached, cached + new) for _ in range(query + 1))


@given(st.integers(0, 3000), st.integers(0, 64), st.integers(1, 300), st.floats(-0.01, 0.5))
def test_the_longest_cut_is_the_longest_that_fits(length: int, context: int, candidates: int, limit: float) -> None:
    model = CostModel()
    model.steps.coefficients = DEVICES["slow"]

    def fits(cut: int) -> bool:
        return model.append_s(context + cut, 0) + model.score_s(candidates, context + cut) <= limit

    cut = model.longest_cut(length, context, candidates, limit)
    assert 0 <= cut <= length
    assert cut == 0 or fits(cut)
    assert cut == length or not fits(cut + 1)


def test_what_many_prefixes_cost_is_what_each_does() -> None:
    model, lengths = profiled(DEVICES["middling"], noisy(0, 0.0)), [0, 1, 128, 5000]
    many = model.prefix_s(np.array(lengths, np.float64))
    assert many.tolist() == pytest.approx([model.append_s(length, 0) for length in lengths])


def test_how_far_steps_are_off_is_known_and_forgotten() -> None:
    cost = CostModel()
    for _ in range(300):
        cost.observe_step((1.0, 0.0, 0.0, 0.0, 0.0), 1e-3, 1e-3)
    assert cost.off == 0.0
    for number in range(300):
        cost.observe_step((1.0, 0.0, 0.0, 0.0, 0.0), 1e-3, 1.2e-3 if number % 2 else 0.8e-3)
    assert cost.off == pytest.approx(0.2, abs=0.01)
    for _ in range(300):
        cost.observe_step((1.0, 0.0, 0.0, 0.0, 0.0), 1e-3, 1e-3)
    assert cost.off < 0.01
