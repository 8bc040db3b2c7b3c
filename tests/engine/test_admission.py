"""A pre-infer is admitted up to each limit exactly, and not one page or moment past it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.engine.admission import Admission, Backlog, Demand
from relaygr.engine.outcomes import Decision

ADMISSION = Admission(total_pages=100, reserve_pages=10, lease_share=0.8, time_share=0.5)
EASY = Demand(pages=1, pinned=0, cost_s=0.001, backlog_s=0.0, horizon_s=1.0)


@pytest.mark.parametrize("pinned", [0, 30, 79, 80])
def test_pins_fill_the_leased_share_exactly(pinned: int) -> None:
    assert ADMISSION.decide(replace(EASY, pinned=pinned, pages=80 - pinned)) is Decision.ADMIT
    assert ADMISSION.decide(replace(EASY, pinned=pinned, pages=81 - pinned)) is Decision.NO_MEMORY


@pytest.mark.parametrize("pinned", [0, 30, 70])
def test_the_last_pages_are_kept_for_ranks_exactly(pinned: int) -> None:
    admission = replace(ADMISSION, reserve_pages=30)
    assert admission.decide(replace(EASY, pinned=pinned, pages=70 - pinned)) is Decision.ADMIT
    assert admission.decide(replace(EASY, pinned=pinned, pages=71 - pinned)) is Decision.NO_MEMORY


def test_a_share_of_whole_pages_is_all_of_them() -> None:
    for percent in range(1, 101):
        admission = Admission(100, 0, percent / 100, 0.5)
        assert admission.decide(replace(EASY, pages=percent)) is Decision.ADMIT
        assert admission.decide(replace(EASY, pages=percent + 1)) is Decision.NO_MEMORY


@pytest.mark.parametrize(("backlog_s", "cost_s"), [(0.0, 0.5), (0.25, 0.25), (0.375, 0.125), (0.5, 0.0)])
def test_the_backlog_fills_the_share_of_time_exactly(backlog_s: float, cost_s: float) -> None:
    assert ADMISSION.decide(replace(EASY, backlog_s=backlog_s, cost_s=cost_s)) is Decision.ADMIT
    more = replace(EASY, backlog_s=backlog_s, cost_s=cost_s + 2**-40)
    assert ADMISSION.decide(more) is Decision.NO_CAPACITY


def test_what_costs_no_device_time_is_not_held_up_by_those_that_do() -> None:
    assert ADMISSION.decide(replace(EASY, cost_s=0.0, backlog_s=100.0)) is Decision.ADMIT
    assert ADMISSION.decide(replace(EASY, cost_s=0.0, backlog_s=100.0, pages=81)) is Decision.NO_MEMORY


def test_memory_is_named_where_both_are_missing() -> None:
    assert ADMISSION.decide(replace(EASY, pages=100, cost_s=100.0)) is Decision.NO_MEMORY


seconds = st.floats(0, 10)


@given(
    st.integers(1, 10_000),
    st.integers(0, 10_000),
    st.floats(0.01, 1.0),
    st.builds(Demand, st.integers(0, 10_000), st.integers(0, 10_000), seconds, seconds, seconds),
)
def test_whoever_is_admitted_leaves_the_reserve_and_stays_within_both_shares(
    total: int, reserve: int, share: float, demand: Demand
) -> None:
    admission = Admission(total, reserve, share, share)
    if admission.decide(demand) is Decision.ADMIT:
        pinned = demand.pinned + demand.pages
        assert pinned <= total - reserve
        assert pinned <= total * share + 1e-6
        assert not demand.cost_s or demand.backlog_s + demand.cost_s <= share * demand.horizon_s
    else:
        assert admission.decide(Demand(0, 0, 0.0, 0.0, 0.0)) is Decision.ADMIT or reserve > total


@given(st.builds(Demand, st.integers(0, 120), st.integers(0, 120), seconds, seconds, seconds))
def test_asking_for_less_is_never_refused_where_more_was_admitted(demand: Demand) -> None:
    if ADMISSION.decide(demand) is Decision.ADMIT:
        for less in (
            replace(demand, pages=demand.pages // 2),
            replace(demand, pinned=demand.pinned // 2),
            replace(demand, cost_s=demand.cost_s / 2),
            replace(demand, backlog_s=demand.backlog_s / 2),
            replace(demand, horizon_s=demand.horizon_s * 2),
        ):
            assert ADMISSION.decide(less) is Decision.ADMIT


@given(st.floats(0.05, 1.0), st.lists(st.tuples(st.floats(0.0, 0.1), st.floats(1e-4, 0.05)), max_size=60))
def test_however_long_admission_goes_on_no_more_than_the_share_is_admitted(
    share: float, calls: list[tuple[float, float]]
) -> None:
    horizon, now, admitted = 0.2, 0.0, 0.0
    backlog, admission = Backlog(share), Admission(100, 10, 1.0, share)
    for gap, cost in calls:
        now += gap
        if admission.decide(Demand(1, 0, cost, backlog.left(now), horizon)) is Decision.ADMIT:
            backlog.add(cost)
            admitted += cost
        assert admitted <= share * (now + horizon) + 1e-9


def test_what_was_admitted_is_forgotten_at_the_rate_of_the_share() -> None:
    backlog = Backlog(0.5)
    backlog.add(0.2)
    assert backlog.left(0.1) == pytest.approx(0.15)
    assert backlog.left(1.0) == 0.0
    backlog.add(0.1)
    assert backlog.left(1.0) == pytest.approx(0.1)
