"""Every page is free or owned, a pinned one is never handed out, and slots are claimed once."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.cache import PagePool, Pages
from relaygr.history import PAGE

TOTAL = 12


def pages(*numbers: int) -> Pages:
    return np.array(numbers, np.int64)


def test_taken_pages_are_distinct_and_pinned() -> None:
    pool = PagePool(TOTAL)
    taken = pool.take(5)
    assert taken.dtype == np.int64
    assert len(set(taken.tolist())) == 5
    assert set(taken.tolist()) <= set(range(TOTAL))
    assert (pool.free, pool.pinned, pool.available) == (TOTAL - 5, 5, TOTAL - 5)
    assert pool.unpinned(taken) == 0
    pool.unpin(taken)
    assert (pool.free, pool.pinned, pool.available) == (TOTAL, 0, TOTAL)
    pool.check()


def test_no_pages_can_be_taken_from_any_pool() -> None:
    for total in (0, 1):
        pool = PagePool(total)
        nothing = pool.take(0)
        assert len(nothing) == 0
        pool.pin(nothing)
        pool.unpin(nothing)
        assert pool.free == total
        pool.check()


def test_more_than_is_free_cannot_be_taken_and_nothing_changes() -> None:
    pool = PagePool(3)
    held = pool.take(2)
    with pytest.raises(RuntimeError, match="2 pages taken where 1 are free"):
        pool.take(2)
    assert (pool.free, pool.pinned) == (1, 2)
    pool.check()
    pool.unpin(held)
    assert pool.free == 3


def test_a_page_is_free_when_its_last_owner_lets_go_and_not_before() -> None:
    pool = PagePool(4)
    page = pool.take(1)
    pool.own(page)
    pool.pin(page)
    for let_go in (pool.unpin, pool.disown, pool.unpin):
        assert pool.free == 3
        let_go(page)
        pool.check()
    assert pool.free == 4


def test_owned_pages_that_nobody_pins_are_available_and_not_free() -> None:
    pool = PagePool(4)
    kept = pool.take(3)
    pool.own(kept)
    pool.unpin(kept)
    assert (pool.free, pool.available, pool.unpinned(kept)) == (1, 4, 3)
    pool.pin(kept[:1])
    assert (pool.free, pool.available, pool.unpinned(kept)) == (1, 3, 2)


class Naive:
    """The pool as counts of owners and pins in a dictionary each."""

    def __init__(self) -> None:
        self.pool = PagePool(TOTAL)
        self.pins: Counter[int] = Counter()
        self.owns: Counter[int] = Counter()

    def held(self, counts: Counter[int]) -> list[int]:
        return sorted(page for page, count in counts.items() if count)

    def check(self) -> None:
        self.pool.check()
        owned = {*self.held(self.pins), *self.held(self.owns)}
        pinned = self.held(self.pins)
        assert self.pool.free == TOTAL - len(owned)
        assert self.pool.pinned == len(pinned)
        assert self.pool.available == TOTAL - len(pinned)
        everything = np.arange(TOTAL, dtype=np.int64)
        assert self.pool.unpinned(everything) == TOTAL - len(pinned)
        assert np.flatnonzero(~self.pool.unneeded(everything)).tolist() == pinned
        for count in range(TOTAL + 1):
            assert self.pool.none_pinned(everything[:count]) == (not pinned or pinned[0] >= count)


@given(st.data())
def test_free_and_owned_make_the_total_whatever_is_done(data: st.DataObject) -> None:
    naive = Naive()
    for _ in range(data.draw(st.integers(1, 30), label="operations")):
        can = {
            "take": list(range(naive.pool.free + 1)),
            "pin": sorted({*naive.held(naive.pins), *naive.held(naive.owns)}),
            "unpin": naive.held(naive.pins),
            "own": sorted({*naive.held(naive.pins), *naive.held(naive.owns)}),
            "disown": naive.held(naive.owns),
        }
        operation = data.draw(st.sampled_from([name for name, choices in can.items() if choices]))
        if operation == "take":
            before = {*naive.held(naive.pins), *naive.held(naive.owns)}
            chosen = naive.pool.take(data.draw(st.sampled_from(can["take"]))).tolist()
            assert not before & set(chosen), "a page with an owner was handed out"
            naive.pins.update(chosen)
        else:
            chosen = data.draw(st.lists(st.sampled_from(can[operation]), unique=True))
            getattr(naive.pool, operation)(pages(*chosen))
            counts = naive.pins if operation in ("pin", "unpin") else naive.owns
            (counts.update if operation in ("pin", "own") else counts.subtract)(chosen)
        naive.check()


@given(st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=8))
def test_slots_are_claimed_as_a_prefix_grows(growth: list[int]) -> None:
    total = sum(growth)
    pool = PagePool(-(-total // PAGE) + 1)
    own = pool.take(-(-total // PAGE))
    done = 0
    for more in growth:
        pool.fill(own, done, done + more)
        done += more
        expected = [min(PAGE, max(0, done - first)) for first in range(0, len(own) * PAGE, PAGE)]
        assert [pool.filled(int(page)) for page in own] == expected


@given(st.integers(0, 4 * PAGE), st.integers(0, 4 * PAGE))
def test_a_claim_leaves_pages_it_does_not_touch_alone(low: int, high: int) -> None:
    pool = PagePool(4)
    own = pool.take(4)
    pool.fill(own, low, high)
    for index, page in enumerate(own):
        touched = low < high and low < (index + 1) * PAGE and high > index * PAGE
        assert pool.filled(int(page)) == (min(PAGE, high - index * PAGE) if touched else 0)


def test_a_freed_page_has_no_claimed_slots() -> None:
    pool = PagePool(1)
    page = pool.take(1)
    pool.fill(page, 0, 100)
    pool.pin(page)
    pool.unpin(page)
    assert pool.filled(int(page[0])) == 100
    pool.unpin(page)
    assert pool.filled(int(page[0])) == 0
    assert pool.filled(int(pool.take(1)[0])) == 0


def test_the_check_finds_a_page_let_go_of_too_often() -> None:
    pool = PagePool(3)
    page = pool.take(1)
    pool.unpin(page)
    pool.disown(page)
    with pytest.raises(RuntimeError, match="too often"):
        pool.check()


def test_the_check_finds_a_pin_that_ended_as_an_owner() -> None:
    pool = PagePool(3)
    pool.disown(pool.take(1))
    with pytest.raises(RuntimeError, match="too often"):
        pool.check()


def test_the_check_finds_an_owner_that_ended_as_a_pin() -> None:
    pool = PagePool(3)
    page = pool.take(1)
    pool.own(page)
    pool.unpin(page)
    pool.unpin(page)
    with pytest.raises(RuntimeError):
        pool.check()


def test_a_pool_that_grows_keeps_what_is_owned_and_hands_out_the_new_pages() -> None:
    pool = PagePool(2)
    mine = pool.take(2)
    pool.own(mine)
    pool.unpin(mine)
    pool.fill(mine, 0, 130)
    pool.grow(5)
    pool.check()
    assert (pool.total, pool.free, pool.available, pool.pinned) == (5, 3, 5, 0)
    more = pool.take(3)
    assert sorted([*mine.tolist(), *more.tolist()]) == [0, 1, 2, 3, 4]
    assert pool.filled(int(mine[1])) == 2
    pool.unpin(more)
    pool.disown(mine)
    pool.check()
    assert pool.free == 5
