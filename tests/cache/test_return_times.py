"""What is kept for whom follows from when users have come back, and from nothing else."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.cache.return_times import _EDGES, _WIDTHS, ReturnTimes, _best_rates, _bins, _hazard


def sessions(times: ReturnTimes, *, users: int, visits: int, gap: tuple[float, float], seed: int = 0) -> float:
    """Users who come so often, their gaps drawn evenly; returns when the last visit was."""
    draw = random.Random(seed)
    events = []
    for user in range(users):
        at = draw.uniform(0, 60)
        for _ in range(visits):
            events.append((at, f"u{user}"))
            at += draw.uniform(*gap)
    for at, name in sorted(events):
        times.visit(name, at)
    return max(events)[0]


def rates(times: ReturnTimes, end: float, ages: list[float]) -> list[float]:
    """Of users who were here so long ago."""
    found = times.rates(end - np.array(ages), end)
    assert found is not None
    return [float(rate) for rate in found]


def test_nothing_is_concluded_from_nothing() -> None:
    times = ReturnTimes()
    assert times.rates(np.array([0.0]), 1.0) is None
    times.visit("u", 1.0)
    assert times.rates(np.array([1.0]), 5.0) is None


def test_who_is_due_is_worth_more_than_who_was_just_here_and_who_is_overdue_nothing() -> None:
    times = ReturnTimes()
    end = sessions(times, users=200, visits=8, gap=(2.0, 10.0))
    now, due, gone = rates(times, end, [0.1, 6.0, 60.0])
    assert due > 1.3 * now > 0
    assert gone == pytest.approx(0.0, abs=1e-3)


def test_where_returns_are_soon_or_never_the_newest_are_worth_the_most() -> None:
    times, draw, at = ReturnTimes(), random.Random(1), 0.0
    for user in range(600):
        at += 0.2
        times.visit(f"u{user}", at)
        if draw.random() < 0.5:
            at += draw.uniform(0.0, 0.3)
            times.visit(f"u{user}", at)
    now, later, latest = rates(times, at, [0.05, 5.0, 50.0])
    assert now > later >= latest


def test_a_rate_is_about_one_return_for_each_gap() -> None:
    times = ReturnTimes()
    end = sessions(times, users=300, visits=30, gap=(4.0, 6.0))
    assert rates(times, end, [0.0])[0] == pytest.approx(1 / 5.0, rel=0.15)


def test_much_traffic_is_learned_from_a_part_of_its_users() -> None:
    few, many = ReturnTimes(), ReturnTimes()
    ends = [sessions(few, users=100, visits=8, gap=(2.0, 10.0)), sessions(many, users=4000, visits=8, gap=(2.0, 10.0))]
    one, other = (rates(times, end, [0.1, 6.0]) for times, end in zip((few, many), ends, strict=True))
    assert other == pytest.approx(one, rel=0.3)


def test_a_forgotten_user_is_one_who_was_never_here() -> None:
    times = ReturnTimes()
    end = sessions(times, users=100, visits=8, gap=(2.0, 10.0))
    times.visit("u", end)
    times.forget("u")
    assert rates(times, end, [end - times.last("u")]) == [0.0]


def test_memory_of_users_is_bounded() -> None:
    times = ReturnTimes(remembered=10)
    end = sessions(times, users=100, visits=8, gap=(2.0, 10.0))
    for user in range(20):
        times.visit(f"new {user}", end)
    forgotten, known = rates(times, end + 6.0, [end + 6.0 - times.last(user) for user in ("new 0", "new 19")])
    assert forgotten == 0.0 != known


def test_ages_lie_between_their_edges() -> None:
    ages = np.array([-1.0, 0.0, 0.05, 0.11, 0.14, 5.0, 1e9, np.inf])
    assert _bins(ages).tolist() == [0, 0, 0, 1, 2, 15, 50, 50]


@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.sampled_from(["even", "exponential", "far", "edges"]))
def test_what_is_learned_is_what_its_definition_says(seed: int, count: int, kind: str) -> None:
    """Returns for each second waited at an age; and over every time to wait from then on, the best."""
    draw = np.random.default_rng(seed)
    drawn = {
        "even": draw.uniform(2.0, 10.0, count),
        "exponential": draw.exponential(5.0, count),
        "far": draw.exponential(2e4, count),
        "edges": draw.choice(_EDGES[:-1], count),
    }
    length, over = drawn[kind], draw.random(count) < 0.7
    waited = np.clip(length[:, None] - _EDGES[:-1], 0.0, _WIDTHS).sum(axis=0)
    returned = np.array([np.sum(_bins(length[over]) == age) for age in range(len(_WIDTHS))])
    hazard = _hazard(length, over)
    assert hazard * np.maximum(waited, 1e-9) == pytest.approx(returned, rel=1e-5, abs=1e-5)
    found = _best_rates(hazard)
    for age in range(len(_WIDTHS)):
        still, spent, best = 1.0, 0.0, 0.0
        for rate, width in zip(hazard[age:], _WIDTHS[age:], strict=True):
            lasts = float(np.exp(-rate * width))
            spent += still * ((1.0 - lasts) / rate if rate * width > 1e-12 else width)
            still *= lasts
            best = max(best, (1.0 - still) / spent)
        assert found[age] == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert found[-1] == 0.0


def test_places_that_are_nobody_s_count_for_nothing() -> None:
    times, draw = ReturnTimes(), random.Random(0)
    for number in range(20_000):
        user = f"u{draw.randrange(3000)}"
        if draw.random() < 0.1:
            times.forget(user)
        else:
            times.visit(user, number / 100)
        if number % 500 == 0:
            assert times._used.tolist() == [each is not None for each in times._users]
    assert times._stride > 1, "and where users were thinned out"
