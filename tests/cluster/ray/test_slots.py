"""Slots: a replica that comes takes the name of one that went."""

from hypothesis import given
from hypothesis import strategies as st

from relaygr.cluster.ray.slots import Held, Slots


def claim(slots: Slots, holder: str, dead: frozenset[str] = frozenset()) -> str:
    return slots.claim(holder, f"http://{holder}:1", 1, lambda name: name not in dead).slot


def test_replicas_take_the_lowest_free_number_and_keep_it() -> None:
    slots = Slots()
    assert [claim(slots, holder) for holder in ("a", "b", "c")] == ["slot-0", "slot-1", "slot-2"]
    assert claim(slots, "b") == "slot-1"
    assert [held.slot for held in slots.table()] == ["slot-0", "slot-1", "slot-2"]


def test_the_one_that_comes_after_a_death_takes_the_dead_one_s_slot() -> None:
    slots = Slots()
    for holder in ("a", "b", "c"):
        claim(slots, holder)
    assert claim(slots, "d", dead=frozenset("b")) == "slot-1"
    assert {held.slot: held.holder for held in slots.table()} == {"slot-0": "a", "slot-1": "d", "slot-2": "c"}


def test_a_slot_that_was_given_away_is_free_while_its_holder_still_lives() -> None:
    slots = Slots()
    for holder in ("a", "b"):
        claim(slots, holder)
    slots.release("a")
    slots.release("a")
    assert claim(slots, "c") == "slot-0"


def test_one_that_leaves_is_told_of_until_another_has_its_slot() -> None:
    slots = Slots()
    for holder in ("a", "b"):
        claim(slots, holder)
    slots.leave("a")
    assert [held.holder for held in slots.table()] == ["a", "b"]
    assert claim(slots, "c") == "slot-0"
    assert [held.holder for held in slots.table()] == ["c", "b"]
    slots.release("a")  # it went at last, and takes nothing with it
    assert [held.holder for held in slots.table()] == ["c", "b"]
    slots.leave("b")
    slots.release("b")
    assert [held.holder for held in slots.table()] == ["c"]


def test_what_was_forgotten_is_announced_again_and_a_slot_has_one_holder() -> None:
    slots = Slots()
    assert slots.announce(Held("slot-3", "a", "http://a:1", 1))
    assert slots.announce(Held("slot-3", "a", "http://a:1", 1))
    assert not slots.announce(Held("slot-3", "b", "http://b:1", 2))
    assert slots.table() == (Held("slot-3", "a", "http://a:1", 1),)
    assert claim(slots, "b") == "slot-0"


@given(st.lists(st.tuples(st.sampled_from(["claim", "die", "leave", "release"]), st.integers(0, 7)), max_size=60))
def test_no_two_that_live_ever_hold_one_slot_and_no_number_is_left_out_longer_than_needed(
    steps: list[tuple[str, int]],
) -> None:
    slots, dead, living, names = Slots(), set[str](), dict[str, str](), 0
    gone: set[str] = set()
    for what, which in steps:
        if what == "claim":
            names += 1
            taken = claim(slots, f"r{names}", frozenset(dead))
            assert taken not in living.values()
            assert int(taken.removeprefix("slot-")) <= len(living)
            living[f"r{names}"] = taken
        elif living:
            holder = sorted(living)[which % len(living)]
            del living[holder]
            if what == "die":
                dead.add(holder)
            else:
                {"leave": slots.leave, "release": slots.release}[what](holder)
            gone.add(holder)
    table = {held.holder: held.slot for held in slots.table()}
    assert {holder: slot for holder, slot in table.items() if holder not in gone} == living
