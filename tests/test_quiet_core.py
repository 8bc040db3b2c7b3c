"""Benchmarks stay on the fastest core, and only while they measure."""

import os

import pytest

import quiet_core as module
from quiet_core import quiet_core


@pytest.mark.parametrize("fails", [False, True])
def test_the_fastest_core_is_stayed_on_for_as_long_as_that(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    before = os.sched_getaffinity(0)
    fastest = max(before)
    monkeypatch.setattr(module, "pace", lambda: 1.0 if os.sched_getaffinity(0) == {fastest} else 2.0)
    try:
        with quiet_core() as host:
            assert os.sched_getaffinity(0) == {fastest}
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    else:
        assert host["pace_after_us"] == 1.0
    assert host["paces_us"] == [1.0] + [2.0] * (len(before) - 1)
    assert os.sched_getaffinity(0) == before


def test_all_cores_may_be_used_again_where_their_pace_could_not_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> float:
        raise RuntimeError("no clock")

    before = os.sched_getaffinity(0)
    monkeypatch.setattr(module, "pace", fail)
    with pytest.raises(RuntimeError, match="no clock"), quiet_core():
        raise AssertionError
    assert os.sched_getaffinity(0) == before


def test_a_pace_is_told() -> None:
    assert module.pace() > 0
