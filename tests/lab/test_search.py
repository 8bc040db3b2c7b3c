"""A search finds the limit it is given, with few tries, and believes nothing that it did not see twice."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.lab.search import Search, bracket, climb, half_step, interleave


def driven(search: Search, holds: Callable[[float, int], bool]) -> tuple[float | None, list[float]]:
    """What a search finds, and what it tried; `holds` gets the value and the number of the try."""
    tried = [next(search)]
    while True:
        try:
            tried.append(search.send(holds(tried[-1], len(tried) - 1)))
        except StopIteration as ended:
            return ended.value, tried


@given(limit=st.floats(1, 1000), off=st.floats(0.8, 1.25))
def test_a_guess_near_the_limit_leads_to_it(limit: float, off: float) -> None:
    found, tried = driven(climb(limit * off, 1.1, tries=8), lambda value, _: value <= limit)
    assert found is not None
    assert limit / 1.1**2 <= found <= limit
    assert len(tried) <= 8


@given(limit=st.floats(1, 1000), off=st.floats(0.01, 100), tries=st.integers(1, 6))
def test_whatever_is_found_has_held_and_tries_are_bounded(limit: float, off: float, tries: int) -> None:
    found, tried = driven(climb(limit * off, tries=tries), lambda value, _: value <= limit)
    assert len(tried) <= tries
    assert found is None or (found in tried and found <= limit)


@pytest.mark.parametrize("off", [2.0, 3.0, 5.0])
def test_a_guess_far_above_the_limit_leads_near_it_all_the_same(off: float) -> None:
    found, tried = driven(climb(100 * off, 1.12, tries=8), lambda value, _: value <= 100)
    assert found is not None
    assert 75 <= found <= 100
    assert tried.count(found) == 2


def test_what_is_not_confirmed_does_not_count() -> None:
    """100 holds once, by luck."""
    seen: list[float] = []

    def holds(value: float, number: int) -> bool:
        seen.append(value)
        return value < 95 or (value == 100 and seen.count(100) == 1)

    found, _ = driven(climb(100, 1.1, tries=6), holds)
    assert found is not None
    assert found < 95


@pytest.mark.parametrize(("answers", "found"), [("yy", 110.0), ("yn", 100.0), ("n", 100.0)])
def test_half_a_step_up_counts_where_it_holds_and_is_confirmed(answers: str, found: float) -> None:
    reached, tried = driven(half_step(100.0, 121.0), lambda _, number: answers[number] == "y")
    assert reached == pytest.approx(found)
    assert len(tried) == len(answers)


def test_where_nothing_holds_nothing_is_found() -> None:
    assert driven(climb(50, tries=4), lambda value, _: False)[0] is None


def test_a_search_ends_at_the_highest_value_there_is() -> None:
    found, tried = driven(climb(90, 1.2, tries=6, highest=100), lambda value, _: True)
    assert found == 100
    assert max(tried) == 100


@given(limit=st.floats(0.5, 2000), guess=st.floats(1, 1000))
def test_a_bracket_is_just_below_the_limit(limit: float, guess: float) -> None:
    found = bracket(lambda value: value <= limit, guess, tries=40)
    assert limit / 1.07 <= found <= limit * 1.0001


def test_searches_take_turns() -> None:
    turns: list[tuple[str, int]] = []

    async def probe(name: str, value: float, turn: int) -> bool:
        turns.append((name, turn))
        return value <= {"a": 10, "b": 20}[name]

    found = asyncio.run(interleave({"a": climb(9, 1.1), "b": climb(25, 1.1)}, probe))
    assert found["a"] == pytest.approx(9.9)
    assert 18 < (found["b"] or 0) <= 20
    assert turns[:4] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
