"""A key keeps its slot while the slot lives, load stays bounded, and every charge is given back once."""

import math
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relaygr.errors import InvalidInput, Unavailable
from relaygr.relay import Evidence, Membership, Placement, Route, Router, RouterConfig

KEYS = [f"user-{number}" for number in range(4000)]

names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12, unique=True)
keys = st.lists(st.text(max_size=12), min_size=1, max_size=30)
messages = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5000), st.booleans()), max_size=60)


def slots(count: int) -> list[str]:
    return [f"slot-{number}" for number in range(count)]


def members(names: list[str]) -> Membership:
    """All of them up."""
    membership = Membership()
    for name in names:
        membership.add(name, f"http://{name}")
        membership.observe(name, Evidence.READY)
    return membership


def router(names: list[str], load_factor: float = 1.25, quiet_tokens: int = 0) -> Router:
    return Router(members(names), RouterConfig(load_factor, quiet_tokens))


def home(router: Router, key: str) -> str:
    """Where the key goes when nothing else is under way."""
    with router.place(key, 1) as route:
        assert route.placement is Placement.PLACED
        return route.slot


@given(names, keys)
def test_without_load_a_key_has_one_slot(names: list[str], keys: list[str]) -> None:
    here = router(names)
    for key in keys:
        assert home(here, key) == home(here, key) == here.order(key)[0]


@given(names.flatmap(lambda names: st.tuples(st.just(names), st.permutations(names))), keys)
def test_the_order_of_slots_does_not_depend_on_when_they_joined(
    joined: tuple[list[str], list[str]], keys: list[str]
) -> None:
    one, other = (router(names) for names in joined)
    for key in keys:
        assert one.order(key) == other.order(key)
        assert set(one.order(key)) == set(joined[0])


@given(names, keys, st.data())
def test_when_a_slot_dies_only_its_keys_move_and_they_return_with_it(
    names: list[str], keys: list[str], data: st.DataObject
) -> None:
    assume(len(names) > 1)
    membership = members(names)
    here = Router(membership)
    dead = data.draw(st.sampled_from(names))
    orders = {key: here.order(key) for key in keys}
    membership.observe(dead, Evidence.REFUSED)
    for key, order in orders.items():
        left = tuple(slot for slot in order if slot != dead)
        assert here.order(key) == left
        assert home(here, key) == left[0]
    membership.observe(dead, Evidence.READY)
    assert {key: here.order(key) for key in keys} == orders


def test_a_dead_slots_keys_spread_over_all_that_stay() -> None:
    membership = members(slots(8))
    here = Router(membership)
    its = [key for key in KEYS if home(here, key) == "slot-3"]
    membership.remove("slot-3")
    landed = Counter(home(here, key) for key in its)
    assert len(landed) == 7
    assert max(landed.values()) < 2 * len(its) / 7


@pytest.mark.parametrize("count", [2, 5, 16])
def test_keys_spread_evenly_over_slots(count: int) -> None:
    here = router(slots(count))
    shares = Counter(home(here, key) for key in KEYS)
    mean = len(KEYS) / count
    assert all(abs(shares[slot] - mean) < 5 * math.sqrt(mean) for slot in slots(count))


def test_every_process_maps_keys_to_the_same_slots() -> None:
    here = router(slots(16))
    assert {key: home(here, key) for key in GOLDEN} == GOLDEN


GOLDEN = {"": "slot-14", "alice": "slot-12", "bob": "slot-3", "user-1": "slot-9", "用户": "slot-5"}


@given(names, messages, st.floats(1, 3), st.integers(0, 20_000))
def test_a_request_takes_the_first_slot_in_its_order_that_is_within_the_bound(
    names: list[str], messages: list[tuple[int, int, bool]], factor: float, quiet: int
) -> None:
    here = router(names, factor, quiet)
    routes: list[Route] = []
    for number, tokens, release in messages:
        before, key = here.loads(), str(number)
        limit = max(factor * (sum(before.values()) + tokens) / len(names), quiet)
        route = here.place(key, tokens)
        order = here.order(key)
        position = order.index(route.slot)
        assert before[route.slot] < limit
        assert all(before[slot] >= limit for slot in order[:position])
        assert route.placement is (Placement.OVERFLOWED if position else Placement.PLACED)
        routes.append(route)
        if release:
            routes.pop(0).release()


@given(names, messages, st.floats(1, 3))
def test_no_slot_passes_the_bound_by_more_than_one_message(
    names: list[str], messages: list[tuple[int, int, bool]], factor: float
) -> None:
    here = router(names, factor)
    for number, tokens, _ in messages:
        route = here.place(str(number), tokens)
        loads = here.loads()
        assert loads[route.slot] <= factor * sum(loads.values()) / len(names) + tokens


@given(st.integers(1, 12), st.integers(1, 80), st.floats(1, 3))
def test_messages_of_one_size_keep_the_usual_bound(count: int, under_way: int, factor: float) -> None:
    here = router(slots(count), factor)
    for number in range(under_way):
        here.place(f"user-{number % 7}", 1)
    assert max(here.loads().values()) <= math.ceil(factor * under_way / count)


def test_one_hot_key_overflows_in_its_own_order() -> None:
    here = router(slots(4), load_factor=1.0)
    taken = [here.place("hot", 100).slot for _ in range(4)]
    assert tuple(taken) == here.order("hot")


def test_quiet_slots_keep_their_keys() -> None:
    here = router(slots(4), quiet_tokens=1000)
    own = here.order("user")[0]
    assert [here.place("user", 400).slot for _ in range(3)] == [own] * 3
    assert here.place("user", 400).slot == here.order("user")[1]


def test_a_later_message_follows_the_slot_that_was_named_whatever_its_load() -> None:
    here = router(slots(4))
    with here.place("user", 10) as first:
        other = here.order("user")[2]
        for _ in range(5):
            here.follow(other, "user", 1000)
        route = here.follow(other, "user", 10)
        assert (route.slot, route.placement) == (other, Placement.FOLLOWED)
        assert here.follow(first.slot, "user", 10).slot == first.slot


def test_a_draining_slot_is_followed_and_gets_nothing_new() -> None:
    membership = members(slots(3))
    here = Router(membership)
    own, second, _ = here.order("user")
    membership.observe(own, Evidence.DRAINING)
    assert home(here, "user") == second
    with here.follow(own, "user", 10) as followed:
        assert (followed.slot, followed.placement) == (own, Placement.FOLLOWED)
    membership.observe(own, Evidence.REFUSED)
    moved = here.follow(own, "user", 10)
    assert (moved.slot, moved.placement) == (second, Placement.MOVED)


@pytest.mark.parametrize("gone", ["down", "removed", "unknown", "readdressed"])
def test_when_the_named_slot_is_gone_a_message_is_placed_anew_and_says_so(gone: str) -> None:
    membership = members(slots(3))
    here = Router(membership)
    named = here.order("user")[0]
    match gone:
        case "down":
            membership.observe(named, Evidence.REFUSED)
        case "removed":
            membership.remove(named)
        case "readdressed":
            membership.add(named, "http://elsewhere")
        case "unknown":
            named = "nobody"
    route = here.follow(named, "user", 10)
    assert (route.slot, route.placement) == (here.order("user")[0], Placement.MOVED)
    assert here.placements == {Placement.MOVED: 1}


def test_where_no_slot_is_up_a_message_is_unavailable_and_nothing_changes() -> None:
    membership = Membership()
    membership.add("joining", "http://joining")
    here = Router(membership)
    for ask in (here.place, here.peek):
        with pytest.raises(Unavailable, match="no slot is up"):
            ask("user", 10)
    with pytest.raises(Unavailable):
        here.follow("gone", "user", 10)
    assert not here.placements
    assert not any(here.loads().values())


def test_a_route_knows_its_address_and_each_placement_is_counted() -> None:
    membership = members(slots(3))
    here = Router(membership)
    route = here.place("user", 100)
    assert route.address == f"http://{route.slot}"
    here.place("user", 100)
    here.follow(route.slot, "user", 1)
    membership.remove(route.slot)
    here.follow(route.slot, "user", 1)
    assert here.placements == dict.fromkeys(set(Placement) - {Placement.SCATTERED}, 1)


def test_without_affinity_messages_go_anywhere_and_later_ones_do_not_follow() -> None:
    here = Router(members(slots(4)), RouterConfig(affinity=False))
    seen = Counter(here.place("user", 100).slot for _ in range(400))
    assert min(seen[slot] for slot in slots(4)) > 50
    followed = Counter(here.follow("slot-0", "user", 100).slot for _ in range(400))
    assert followed["slot-0"] < 200
    assert here.placements == {Placement.SCATTERED: 800}


def test_releasing_twice_gives_back_once() -> None:
    here = router(slots(2))
    first, second = here.place("user", 100), here.follow(here.order("user")[0], "user", 7)
    first.release()
    first.release()
    assert here.loads()[second.slot] == 7
    with first:
        pass
    assert sum(here.loads().values()) == 7


def test_a_route_is_released_however_its_block_ends() -> None:
    here = router(slots(2))
    with pytest.raises(KeyError), here.place("user", 100):
        raise KeyError
    assert not any(here.loads().values())


@given(st.text(max_size=12) | st.just("\ud800"), st.integers(0, 10_000))
def test_peek_says_where_place_goes_and_charges_nothing(key: str, tokens: int) -> None:
    here = router(slots(5))
    here.place("other", 500)
    before = here.loads(), here.placements.copy()
    slot = here.peek(key, tokens)
    assert (here.loads(), here.placements) == before
    assert here.place(key, tokens).slot == slot


def test_an_empty_message_still_weighs_something() -> None:
    here = router(slots(2))
    assert here.place("user", 0).tokens == 1
    with pytest.raises(InvalidInput, match=r"^tokens: "):
        here.place("user", -1)


@pytest.mark.parametrize("factor", [0.99, 0, -1, math.nan, math.inf, "1.5", True, None])
def test_a_bad_load_factor_is_refused(factor: float) -> None:
    with pytest.raises(InvalidInput, match=r"^load_factor: "):
        RouterConfig(load_factor=factor)


@pytest.mark.parametrize("quiet", [-1, 0.5, "0", True, None])
def test_bad_quiet_tokens_are_refused(quiet: int) -> None:
    with pytest.raises(InvalidInput, match=r"^quiet_tokens: "):
        RouterConfig(quiet_tokens=quiet)


class Charges(RuleBasedStateMachine):
    """Messages come and go while slots join, fail, drain, leave and return."""

    names = st.sampled_from(slots(4))

    def __init__(self) -> None:
        super().__init__()
        self.membership = members(slots(3))
        self.router = Router(self.membership)
        self.routes: list[tuple[Route, int]] = []

    @rule(key=st.integers(0, 20), tokens=st.integers(1, 1000))
    def place(self, key: int, tokens: int) -> None:
        if self.membership.placeable:
            route = self.router.place(str(key), tokens)
            assert route.slot in self.membership.placeable
            self.routes.append((route, tokens))

    @rule(slot=names, key=st.integers(0, 20), tokens=st.integers(1, 1000))
    def follow(self, slot: str, key: int, tokens: int) -> None:
        if self.membership.follows(slot) or self.membership.placeable:
            followed = self.membership.follows(slot)
            route = self.router.follow(slot, str(key), tokens)
            assert (route.slot == slot) if followed else (route.placement is Placement.MOVED)
            self.routes.append((route, tokens))

    @precondition(lambda self: self.routes)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        route, _ = self.routes.pop(data.draw(st.integers(0, len(self.routes) - 1)))
        route.release()
        if twice:
            route.release()

    @rule(slot=names, evidence=st.sampled_from(Evidence))
    def observe(self, slot: str, evidence: Evidence) -> None:
        self.membership.observe(slot, evidence)

    @rule(slot=names)
    def leave(self, slot: str) -> None:
        self.membership.remove(slot)

    @rule(slot=names, ready=st.booleans())
    def join(self, slot: str, ready: bool) -> None:
        self.membership.add(slot, f"http://{slot}")
        if ready:
            self.membership.observe(slot, Evidence.READY)

    @invariant()
    def a_slots_load_is_what_its_routes_hold(self) -> None:
        held: Counter[str] = Counter()
        for route, tokens in self.routes:
            held[route.slot] += tokens
        assert {slot: tokens for slot, tokens in self.router.loads().items() if tokens} == held

    def teardown(self) -> None:
        for route, _ in self.routes:
            route.release()
        assert not any(self.router.loads().values())


TestChargesAreConserved = Charges.TestCase


def test_slots_that_left_are_forgotten_once_nothing_of_theirs_is_under_way() -> None:
    membership = members(slots(2))
    here = Router(membership)
    route = here.place("user", 10)
    membership.remove(route.slot)
    assert here.loads()[route.slot] == 10
    route.release()
    membership.add("slot-9", "http://slot-9")
    assert route.slot not in here.loads()
