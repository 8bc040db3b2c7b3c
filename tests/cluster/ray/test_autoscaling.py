"""How many instances device time and leases ask for."""

import math
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from relaygr.cluster.ray.autoscaling import BUSY, LEASED, RelayAutoscaling, wanted

TARGETS = {BUSY: 0.6, LEASED: 0.5}


def test_busy_devices_ask_for_more_and_idle_ones_for_fewer() -> None:
    assert wanted({BUSY: [0.9, 0.9]}, TARGETS, 2) == 3
    assert wanted({BUSY: [0.6, 0.6]}, TARGETS, 2) == 2
    assert wanted({BUSY: [0.1, 0.1, 0.1, 0.1]}, TARGETS, 4) == 1


def test_leases_ask_too_and_the_one_that_asks_for_more_is_heard() -> None:
    assert wanted({BUSY: [0.1, 0.1], LEASED: [0.9, 0.7]}, TARGETS, 2) == 4
    assert wanted({BUSY: [1.0, 1.0], LEASED: [0.1, 0.1]}, TARGETS, 2) == 4


def test_without_reports_nothing_changes_and_those_who_have_not_reported_count_as_busy_as_the_others() -> None:
    assert wanted({}, TARGETS, 3) == 3
    assert wanted({BUSY: [], LEASED: []}, TARGETS, 3) == 3
    assert wanted({BUSY: [0.9]}, TARGETS, 3) == 5


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0.05, 1.0))
def test_at_the_number_asked_for_the_target_is_kept_and_with_one_fewer_it_is_not(
    busy: list[float], share: float
) -> None:
    now = len(busy)
    number = wanted({BUSY: busy}, {BUSY: share}, now)
    assert sum(busy) / number <= share * (1 + 1e-5) + 1e-9
    if number > 1:
        assert sum(busy) / (number - 1) > share * (1 - 1e-5) - 1e-5
    assert number <= math.ceil(now / share) + 1


def test_the_policy_reads_what_instances_report_and_not_how_many_requests_there_are() -> None:
    policy = RelayAutoscaling(busy_target=0.5, leased_target=0.5)
    context = SimpleNamespace(
        aggregated_metrics={BUSY: {"a": 0.9, "b": 0.9}, LEASED: {"a": 0.0, "b": 0.0}, "running_requests": {"a": 1e6}},
        current_num_replicas=2,
        target_num_replicas=2,
        total_num_requests=1e6,
    )
    assert policy(context) == (4, {})
    context.aggregated_metrics = None
    assert policy(context) == (2, {})
