"""A window keeps the newest behaviours, and its start moves seldom."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from behaviours import numbered
from relaygr.errors import InvalidInput
from relaygr.history import PAGE, History, SteppedWindow


@st.composite
def windows(draw: st.DrawFn) -> SteppedWindow:
    step = draw(st.integers(1, 3)) * PAGE
    return SteppedWindow(cap=step + draw(st.integers(0, 4 * PAGE)), step=step)


totals = st.integers(0, 12 * PAGE)


@given(windows(), totals)
def test_a_window_holds_the_newest_and_all_that_fit(window: SteppedWindow, total: int) -> None:
    kept = window.apply(numbered(total))
    assert kept.start == window.start(total)
    assert kept.start + len(kept) == total
    assert kept == numbered(total)[kept.start :]
    assert len(kept) <= window.cap
    assert len(kept) == total or len(kept) > window.cap - window.step


@given(windows(), totals)
def test_a_start_moves_in_whole_steps_and_as_late_as_it_can(window: SteppedWindow, total: int) -> None:
    start = window.start(total)
    assert start % window.step == 0
    assert start <= window.start(total + 1) <= start + window.step
    assert start == 0 or total - (start - window.step) > window.cap


@given(windows(), totals)
def test_a_start_stays_for_a_whole_step(window: SteppedWindow, total: int) -> None:
    first = window.cap + 1 + (total // window.step) * window.step
    assert window.start(first) == window.start(first - 1) + window.step
    assert {window.start(first + more) for more in range(window.step)} == {window.start(first)}


@given(windows(), totals, st.integers(0, 4 * PAGE))
def test_enough_of_the_newest_gives_the_window_of_the_whole(window: SteppedWindow, total: int, more: int) -> None:
    whole = numbered(total)
    newest = whole[max(0, total - window.cap - more) :]
    assert window.apply(newest) == window.apply(whole)
    assert window.apply(newest).start == window.apply(whole).start
    assert window.apply(newest).digest() == window.apply(whole).digest()


@given(windows(), totals)
def test_applying_a_window_twice_is_applying_it_once(window: SteppedWindow, total: int) -> None:
    once = window.apply(numbered(total))
    assert window.apply(once) == once
    assert window.apply(once).start == once.start


@given(windows(), totals, st.integers(0, PAGE))
def test_a_prefix_lives_until_the_start_moves(window: SteppedWindow, total: int, more: int) -> None:
    before, after = window.apply(numbered(total)), window.apply(numbered(total + more))
    if before.start == after.start:
        assert after.digest(len(before)) == before.digest()
    else:
        moved = after.start - before.start
        assert after.page_hashes()[: (len(before) - moved) // PAGE] == before.page_hashes()[moved // PAGE :]


def test_too_little_is_left_as_it_is() -> None:
    newest = numbered(1000)[900:]
    kept = SteppedWindow(cap=512, step=256).apply(newest)
    assert kept == newest
    assert kept.start == 900


def test_what_fits_is_not_cut() -> None:
    window = SteppedWindow(cap=300, step=128)
    assert [len(window.apply(numbered(n))) for n in (0, 299, 300, 301, 428, 429)] == [0, 299, 300, 173, 300, 173]
    assert window.apply(History.empty()) == History.empty()


@pytest.mark.parametrize(
    ("cap", "step", "field"),
    [
        (512, 0, "step"),
        (512, -128, "step"),
        (512, 100, "step"),
        (512, 128.0, "step"),
        (100, 128, "cap"),
        (512.5, 128, "cap"),
        ("512", 128, "cap"),
        (512, None, "step"),
    ],
)
def test_a_window_that_cannot_be_is_refused_by_name(cap: Any, step: Any, field: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}: "):
        SteppedWindow(cap=cap, step=step)
