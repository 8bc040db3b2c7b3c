"""Answers say what happened, in words that logs and metrics use too."""

from enum import StrEnum
from functools import reduce
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.engine.outcomes import Decision, Path, PreInferOutcome, Ranked, Timings

CHEAPEST_FIRST = [Path.RESIDENT, Path.WAITED, Path.RELOADED, Path.EXTENDED, Path.FULL]


@pytest.mark.parametrize("enum", [Path, PreInferOutcome, Decision])
def test_every_outcome_is_its_own_label(enum: type[StrEnum]) -> None:
    assert [member.value for member in enum] == [member.name for member in enum]


def test_the_outcomes_are_those_that_callers_rely_on() -> None:
    assert set(Path) == {"RESIDENT", "WAITED", "RELOADED", "EXTENDED", "FULL", "TRUNCATED"}
    assert set(PreInferOutcome) == {
        *("COMPUTED", "EXTENDED", "RELOADED", "RESIDENT", "JOINED", "NO_MEMORY", "NO_CAPACITY", "FAILED")
    }
    assert set(Decision) == {"ADMIT", "NOT_AT_RISK", "RESIDENT", "NO_MEMORY", "NO_CAPACITY", "UNAVAILABLE"}


def test_a_refusal_by_admission_is_an_outcome_of_the_same_name() -> None:
    for refusal in (Decision.NO_MEMORY, Decision.NO_CAPACITY):
        assert PreInferOutcome(refusal.value).name == refusal.name


def test_the_costlier_of_two_paths_is_the_one_that_did_more() -> None:
    for cheap, costly in pairwise(CHEAPEST_FIRST):
        assert cheap.costlier(costly) is costly
        assert costly.costlier(cheap) is costly


def test_a_truncated_rank_stays_truncated() -> None:
    for path in Path:
        assert path.costlier(Path.TRUNCATED) is Path.TRUNCATED
        assert Path.TRUNCATED.costlier(path) is Path.TRUNCATED


@given(st.lists(st.sampled_from(Path), min_size=1, max_size=4))
def test_the_costliest_of_several_does_not_depend_on_their_order(paths: list[Path]) -> None:
    assert len({reduce(Path.costlier, order) for order in permutations(paths)}) == 1
    assert reduce(Path.costlier, paths) in paths


def test_an_answer_cannot_be_changed() -> None:
    ranked = Ranked(np.zeros((1, 1), np.float32), Path.FULL, 3, 0, Timings(1.0, 0.5, 0.5))
    with pytest.raises(AttributeError):
        ranked.used = 4  # type: ignore[misc]
    with pytest.raises(AttributeError):
        ranked.timings.total = 4.0  # type: ignore[misc]
