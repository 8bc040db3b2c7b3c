"""Copies to host memory are queued for users who come back, within a bound."""

import random
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.cache import Lineage, Prefix, WriteBackQueue
from relaygr.cache.write_back import MIN_RETURN_RATE, ReturnRate
from relaygr.history import History


def prefix(user: str) -> Prefix:
    return Prefix.of(user, Lineage("v", 0, b"", 0, 0), History.empty(), np.empty(0, np.int64))


def offer(queue: WriteBackQueue, what: Prefix) -> bool:
    return queue.offer(what, return_rate=1.0, saves_s=1.0)


operations = st.one_of(
    st.tuples(st.just("offer"), st.sampled_from("abcdef")),
    st.tuples(st.just("forget"), st.sampled_from("abcdef")),
    st.tuples(st.sampled_from(("take", "take", "clear")), st.just("")),
)


@given(st.integers(1, 4), st.lists(operations, max_size=40))
def test_the_newest_offer_of_each_user_waits_in_order_and_the_oldest_is_dropped(
    bound: int, done: list[tuple[str, str]]
) -> None:
    queue, naive, dropped = WriteBackQueue(bound), OrderedDict[str, Prefix](), 0
    for operation, user in done:
        if operation == "offer":
            offered = prefix(user)
            assert offer(queue, offered)
            naive.pop(user, None)
            naive[user] = offered
            if len(naive) > bound:
                naive.popitem(last=False)
                dropped += 1
        elif operation == "forget":
            queue.forget(user)
            naive.pop(user, None)
        elif operation == "clear":
            queue.clear()
            naive.clear()
        else:
            assert queue.take() is (naive.popitem(last=False)[1] if naive else None)
        assert len(queue) == len(naive) <= bound
        assert queue.dropped == dropped


@pytest.mark.parametrize(
    ("return_rate", "saves_s", "worth_it"),
    [
        (MIN_RETURN_RATE, 1e-6, True),
        (np.nextafter(MIN_RETURN_RATE, 0.0), 1e-6, False),
        (1.0, 0.0, False),
        (1.0, -1.0, False),
        (0.0, 1.0, False),
    ],
)
def test_only_what_is_worth_a_copy_is_queued(return_rate: float, saves_s: float, worth_it: bool) -> None:
    queue = WriteBackQueue(4)
    assert queue.offer(prefix("u"), return_rate=return_rate, saves_s=saves_s) is worth_it
    assert len(queue) == worth_it
    assert queue.dropped == 0


def test_a_refused_offer_pushes_nothing_out() -> None:
    queue, waiting = WriteBackQueue(1), prefix("u")
    offer(queue, waiting)
    assert not queue.offer(prefix("v"), return_rate=0.0, saves_s=1.0)
    assert queue.take() is waiting


def test_users_who_never_return_are_soon_not_worth_a_copy_and_those_who_do_still_are() -> None:
    rates = ReturnRate()
    for user in range(100):
        rates.visit(f"passing {user}")
    for _ in range(20):
        for user in range(5):
            rates.visit(f"regular {user}")
    rates.visit("new")
    assert rates.expected("new") < MIN_RETURN_RATE
    assert rates.expected("regular 0") > 0.8


def test_before_anything_is_known_a_copy_is_worth_it() -> None:
    rates = ReturnRate()
    assert rates.expected("unknown") >= MIN_RETURN_RATE
    rates.visit("once")
    assert rates.expected("once") >= MIN_RETURN_RATE


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_the_share_of_returns_is_learned(share: float) -> None:
    draw, rates = random.Random(1), ReturnRate()
    for user in range(30_000):
        rates.visit(str(user))
        if draw.random() < share:
            rates.visit(str(user))
    assert rates.expected("somebody new") == pytest.approx(share, rel=0.1)


def test_newer_visits_count_more_than_old_ones() -> None:
    rates = ReturnRate()
    for user in range(20_000):
        rates.visit(f"once {user}")
    for user in range(20_000):
        rates.visit(f"back {user}")
        rates.visit(f"back {user}")
    assert rates.expected("somebody new") > 0.7


@given(st.lists(st.sampled_from("abc"), max_size=60), st.sampled_from("abcd"))
def test_a_share_is_between_nothing_and_all(visits: list[str], user: str) -> None:
    rates = ReturnRate(remembered=2)
    for visitor in visits:
        rates.visit(visitor)
        assert 0.0 <= rates.expected(user) <= 1.0


def test_a_share_stays_below_one_when_more_return_than_were_seen_lately() -> None:
    rates = ReturnRate()
    for _ in range(2):
        for user in range(9_999):
            rates.visit(str(user))
    assert rates.expected("somebody new") <= 1.0


def test_the_longest_gone_are_forgotten_first_and_a_forgotten_user_is_new() -> None:
    rates = ReturnRate(remembered=2)
    for _ in range(3):
        rates.visit("a")
    for user in range(50):
        rates.visit(f"passing {user}")  # pushes out "a"
    new = rates.expected("nobody has seen")
    assert rates.expected("a") == new
    rates.visit("b")
    rates.visit("b")
    assert rates.expected("b") != new
    rates.forget("b")
    rates.forget("never here")
    assert rates.expected("b") == rates.expected("nobody has seen")
