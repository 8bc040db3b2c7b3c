"""What is kept of the users who were here last."""

from behaviours import numbered
from relaygr.cascade.recent import EACH, RecentHistories
from relaygr.history import History


def read(recent: RecentHistories, user: str, history: History) -> None:
    recent.keep(user, history, recent.begin())


def test_the_last_history_of_a_user_is_kept_until_it_is_forgotten() -> None:
    recent = RecentHistories(1000)
    read(recent, "u1", numbered(10))
    read(recent, "u1", numbered(20))
    assert recent.get("u1") == numbered(20)
    assert recent.get("u2") is None
    recent.forget("u1")
    recent.forget("u1")
    assert recent.get("u1") is None


def test_those_who_were_here_longest_ago_make_room() -> None:
    recent = RecentHistories(100 + 2 * EACH)
    for user in ("u1", "u2", "u1", "u3"):
        read(recent, user, numbered(40))
    assert recent.get("u2") is None
    assert recent.get("u3") == recent.get("u1") == numbered(40)
    read(recent, "u4", numbered(101 + EACH))
    assert len(recent) == 0, "more than fits is not kept, and neither is what it displaced"


def test_users_without_behaviours_take_room_too() -> None:
    recent = RecentHistories(100 * EACH)
    for number in range(200):
        read(recent, f"new {number}", numbered(0))
    assert len(recent) == 100


def test_a_read_that_took_long_does_not_displace_what_came_after_it() -> None:
    recent = RecentHistories(1000)
    slow = recent.begin()
    read(recent, "u1", numbered(20))
    recent.keep("u1", numbered(10), slow)
    assert recent.get("u1") == numbered(20)


def test_a_read_that_began_before_its_user_was_forgotten_is_not_kept() -> None:
    recent = RecentHistories(1000)
    slow = recent.begin()
    recent.forget("u1")
    recent.keep("u1", numbered(10), slow)
    assert recent.get("u1") is None
    read(recent, "u1", numbered(12))
    assert recent.get("u1") == numbered(12)
