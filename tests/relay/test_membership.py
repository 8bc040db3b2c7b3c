"""Health follows the evidence: up at one success, down at some failures or one refusal, draining in between."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.errors import InvalidInput, Unavailable
from relaygr.relay import Evidence, Health, Membership, MembershipConfig, Transition

SLOTS = ["a", "b", "c"]
READY, ANSWERED, DRAINING, FAILED, REFUSED = Evidence

events = st.lists(
    st.tuples(st.sampled_from(SLOTS), st.sampled_from([*Evidence, "add", "move", "remove"])),
    max_size=60,
)


def one(*evidence: Evidence, fail_after: int = 3) -> Membership:
    membership = Membership(MembershipConfig(fail_after))
    membership.add("a", "http://a")
    for each in evidence:
        membership.observe("a", each)
    return membership


@pytest.mark.parametrize(
    ("evidence", "health"),
    [
        ([], Health.JOINING),
        ([ANSWERED], Health.JOINING),
        ([READY], Health.UP),
        ([FAILED, FAILED], Health.JOINING),
        ([FAILED, FAILED, FAILED], Health.DOWN),
        ([READY, FAILED, FAILED], Health.UP),
        ([READY, FAILED, FAILED, FAILED], Health.DOWN),
        ([READY, FAILED, FAILED, READY, FAILED, FAILED], Health.UP),
        ([READY, FAILED, FAILED, ANSWERED, FAILED, FAILED], Health.UP),
        ([READY, REFUSED], Health.DOWN),
        ([READY, REFUSED, READY], Health.UP),
        ([READY, DRAINING], Health.DRAINING),
        ([READY, DRAINING, READY], Health.UP),
        ([READY, DRAINING, FAILED, FAILED, FAILED], Health.DOWN),
        ([READY, DRAINING, REFUSED], Health.DOWN),
        ([READY, REFUSED, DRAINING], Health.DRAINING),
    ],
)
def test_health_follows_the_evidence(evidence: list[Evidence], health: Health) -> None:
    assert one(*evidence).health("a") is health


@pytest.mark.parametrize("stopped", [DRAINING, REFUSED])
def test_answers_to_what_was_accepted_earlier_do_not_bring_a_stopped_slot_back(stopped: Evidence) -> None:
    membership = one(READY, stopped)
    health = membership.health("a")
    assert membership.observe("a", ANSWERED) is None
    assert membership.health("a") is health


@pytest.mark.parametrize("fail_after", [1, 2, 5])
def test_a_slot_goes_down_at_that_many_failures_in_a_row(fail_after: int) -> None:
    membership = one(READY, fail_after=fail_after)
    for _ in range(fail_after - 1):
        assert membership.observe("a", FAILED) is None
    assert membership.observe("a", FAILED) is Transition.FAILED
    assert membership.observe("a", FAILED) is None


def test_transitions_are_told_and_counted() -> None:
    membership = Membership(MembershipConfig(fail_after=1))
    told = [
        membership.add("a", "http://a"),
        membership.add("a", "http://a"),
        membership.observe("a", READY),
        membership.observe("a", READY),
        membership.observe("a", DRAINING),
        membership.observe("a", FAILED),
        membership.observe("a", READY),
        membership.observe("a", REFUSED),
        membership.observe("a", REFUSED),
        membership.add("a", "http://a:2"),
        membership.remove("a"),
        membership.remove("a"),
        membership.observe("a", READY),
    ]
    assert [each for each in told if each] == [
        Transition.ADDED,
        Transition.CAME_UP,
        Transition.STARTED_DRAINING,
        Transition.FAILED,
        Transition.CAME_UP,
        Transition.REFUSED,
        Transition.READDRESSED,
        Transition.REMOVED,
    ]
    assert membership.transitions == {**dict.fromkeys(Transition, 1), Transition.CAME_UP: 2}
    assert membership.version == 8


def test_a_slot_at_another_address_joins_anew() -> None:
    membership = one(READY)
    membership.add("a", "http://other")
    assert (membership.health("a"), membership.address("a"), membership.placeable) == (
        Health.JOINING,
        "http://other",
        (),
    )
    assert not membership.follows("a")


def test_who_is_not_a_member_has_no_address_and_no_health() -> None:
    membership = Membership()
    assert membership.health("a") is None
    assert not membership.follows("a")
    assert "a" not in membership
    with pytest.raises(Unavailable, match="'a' is not a member"):
        membership.address("a")


@given(events, st.integers(1, 4))
def test_what_takes_work_is_what_is_up_and_every_change_has_a_version(
    events: list[tuple[str, str]], fail_after: int
) -> None:
    membership = Membership(MembershipConfig(fail_after))
    moves = 0
    for slot, event in events:
        before, version = (
            [(member.slot, member.health, member.address) for member in membership.members()],
            (membership.version),
        )
        match event:
            case "add":
                known = slot in membership
                told = membership.add(slot, membership.address(slot) if known else f"http://{slot}")
            case "move":
                moves += 1
                told = membership.add(slot, f"http://{slot}:{moves}")
            case "remove":
                told = membership.remove(slot)
            case _:
                told = membership.observe(slot, Evidence(event))
        after = [(member.slot, member.health, member.address) for member in membership.members()]
        assert (told is not None) == (before != after or event == "move") == (membership.version == version + 1)
        states = {member.slot: member.health for member in membership.members()}
        assert list(states) == sorted(states)
        assert membership.placeable == tuple(slot for slot, health in states.items() if health is Health.UP)
        assert all(membership.follows(slot) == (states.get(slot) in (Health.UP, Health.DRAINING)) for slot in SLOTS)
        if event in ("READY", "REFUSED") and slot in membership:
            assert states[slot] is (Health.UP if event == "READY" else Health.DOWN)
    counted = membership.transitions
    assert counted[Transition.ADDED] - counted[Transition.REMOVED] == len(membership)
    assert counted.total() == membership.version


@pytest.mark.parametrize("fail_after", [0, -1, 1.5, "3", True, None])
def test_a_bad_count_of_failures_is_refused(fail_after: int) -> None:
    with pytest.raises(InvalidInput, match=r"^fail_after: "):
        MembershipConfig(fail_after)


def test_a_slot_needs_a_name() -> None:
    with pytest.raises(InvalidInput, match=r"^slot: "):
        Membership().add("", "http://a")
