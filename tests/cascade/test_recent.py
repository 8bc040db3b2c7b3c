"""Histories as they were last read, as many as fit."""

from behaviours import numbered
from relaygr.cascade.recent import RecentHistories


def test_what_was_kept_last_is_there_and_what_is_forgotten_is_not() -> None:
    recent = RecentHistories(100)
    recent.keep("u1", numbered(10))
    recent.keep("u1", numbered(20))
    assert recent.get("u1") == numbered(20)
    assert recent.get("u2") is None
    recent.forget("u1")
    recent.forget("u1")
    assert recent.get("u1") is None


def test_those_who_were_here_longest_ago_make_room() -> None:
    recent = RecentHistories(100)
    for user in ("u1", "u2", "u3", "u1"):
        recent.keep(user, numbered(40))
    assert recent.get("u2") is None
    assert recent.get("u3") == recent.get("u1") == numbered(40)
    recent.keep("u4", numbered(101))
    assert len(recent) == 0, "more than fits is not kept, and neither is what it displaced"
    for number in range(200):
        recent.keep(f"new {number}", numbered(0))
    assert len(recent) == 100
