"""A tier against a naive model of it: pages conserved, pinned ones left alone, the least recently used evicted."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from behaviours import numbered
from relaygr.cache import HeldColumns, Lease, Lineage, Pages, Prefix, Tier
from relaygr.history import PAGE, History

USERS = "abcdef"
LINEAGE = Lineage("v", 0, b"", 0, 0)
NONE = np.empty(0, np.int64)


def prefix(user: str, pages: Pages) -> Prefix:
    return Prefix.of(user, LINEAGE, History.empty(), pages)


def fill(tier: Tier, user: str, count: int) -> Prefix:
    """A prefix of this user that nobody has pinned."""
    pages = tier.reserve(count, NONE)
    assert pages is not None
    made = prefix(user, pages)
    tier.install(made)
    tier.pool.unpin(pages)
    return made


def by_user(tier: Tier, worth: Callable[[str], float]) -> Callable[[HeldColumns], npt.NDArray[np.float64]]:
    """What the prefix of each user is worth."""
    return lambda held: np.array([worth(user) for user in tier._held.users])


class TierMachine(RuleBasedStateMachine):
    """Whoever needs pages holds a stamp of each; a page that is handed out gets a new one."""

    @initialize(total=st.integers(0, 14))
    def begin(self, total: int) -> None:
        self.tier = Tier(total)
        self.stamps = [0] * total
        self.order: list[str] = []  # least recently used first
        self.pages: dict[str, list[int]] = {}
        self.builds: list[tuple[str, Pages, list[int]]] = []
        self.leases: list[tuple[Lease, list[int], list[int]]] = []

    def pinned(self) -> set[int]:
        pinned = {page for _, pages, _ in self.builds for page in pages.tolist()}
        return pinned.union(*(pages for _, pages, _ in self.leases))

    def indexed(self) -> set[int]:
        return {page for pages in self.pages.values() for page in pages}

    def victims(self, count: int, pinned: set[int]) -> list[str]:
        """Who must go so that `count` pages are free: the shortest run of those in line."""
        unneeded = [user for user in self.order if not pinned & set(self.pages[user])]
        partly = [user for user in self.order if user not in unneeded and set(self.pages[user]) - pinned]
        gone: list[str] = []
        for user in [*unneeded, *partly]:
            left = {page for other in self.order if other not in gone for page in self.pages[other]}
            if len(self.stamps) - len(left | pinned) >= count:
                break
            gone.append(user)
        return gone

    @rule(user=st.sampled_from(USERS), count=st.integers(0, 6), keep=st.integers(0, 6))
    def reserve(self, user: str, count: int, keep: int) -> None:
        shared = np.array(self.pages.get(user, [])[:keep], np.int64)
        pinned = self.pinned() | set(shared.tolist())
        possible = len(self.stamps) - len(pinned) >= count
        owned_before, gone = self.indexed() | self.pinned(), self.victims(count, pinned)
        evictions, pool = self.tier.evictions, self.tier.pool
        before = [(one.user, one.pages.tolist()) for one in self.tier], pool.free, pool.pinned, evictions
        assert self.tier.can_reserve(count, shared) is possible
        taken = self.tier.reserve(count, shared)
        if not possible:
            assert taken is None
            assert ([(one.user, one.pages.tolist()) for one in self.tier], pool.free, pool.pinned, evictions) == before
            return
        assert taken is not None
        assert len(set(taken.tolist())) == len(taken) == count
        assert not set(taken.tolist()) & pinned
        freed = {page for victim in gone for page in self.pages[victim]} - pinned
        assert set(taken.tolist()) <= set(range(len(self.stamps))) - (owned_before - freed)
        assert self.tier.evictions == evictions + len(gone)
        for victim in gone:
            self.order.remove(victim)
            del self.pages[victim]
        for page in taken.tolist():
            self.stamps[page] += 1
        held = np.concatenate((shared, taken))
        self.builds.append((user, held, [self.stamps[page] for page in held.tolist()]))

    @rule(data=st.data(), keep=st.booleans())
    def end_build(self, data: st.DataObject, keep: bool) -> None:
        if self.builds:
            user, pages, _ = self.builds.pop(data.draw(st.integers(0, len(self.builds) - 1)))
            if keep:
                self.tier.install(prefix(user, pages))
                self.forget(user)
                self.order.append(user)
                self.pages[user] = pages.tolist()
            self.tier.pool.unpin(pages)

    @rule(user=st.sampled_from(USERS))
    def lease(self, user: str) -> None:
        found = self.tier.find(user)
        if found is not None:
            pages = found.pages.tolist()
            lease = Lease(self.tier.pool, user, found.pages, 1.0)
            self.leases.append((lease, pages, [self.stamps[page] for page in pages]))

    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        if self.leases:
            self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))[0].release()

    @rule(user=st.sampled_from(USERS))
    def touch(self, user: str) -> None:
        self.tier.touch(user)
        if user in self.order:
            self.order.remove(user)
            self.order.append(user)

    @rule(user=st.sampled_from(USERS))
    def drop(self, user: str) -> None:
        assert self.tier.drop(user) is (user in self.pages)
        self.forget(user)

    @rule(users=st.sets(st.sampled_from(USERS), max_size=3))
    def drop_some(self, users: set[str]) -> None:
        assert self.tier.drop_where(lambda one: one.user in users) == len(users & set(self.pages))
        for user in users:
            self.forget(user)

    def forget(self, user: str) -> None:
        if user in self.pages:
            self.order.remove(user)
            del self.pages[user]

    @invariant()
    def pages_are_conserved(self) -> None:
        pool, owned, pinned = self.tier.pool, self.indexed() | self.pinned(), self.pinned()
        pool.check()
        assert pool.free == len(self.stamps) - len(owned)
        assert pool.pinned == len(pinned)
        assert pool.available == len(self.stamps) - len(pinned)
        assert pool.unpinned(np.array(sorted(owned), np.int64)) == len(owned - pinned)

    @invariant()
    def what_someone_needs_is_as_they_left_it(self) -> None:
        for _, pages, stamps in self.builds:
            assert [self.stamps[page] for page in pages.tolist()] == stamps
        for _, leased, stamps in self.leases:
            assert [self.stamps[page] for page in leased] == stamps

    @invariant()
    def the_index_is_as_expected(self) -> None:
        assert [one.user for one in self.tier] == self.order
        assert len(self.tier) == len(self.order)
        for user in USERS:
            found = self.tier.find(user)
            assert (found.pages.tolist() if found else None) == self.pages.get(user)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            for _, pages, _ in self.builds:
                self.tier.pool.unpin(pages)
            for lease, _, _ in self.leases:
                lease.release()
            self.tier.drop_where(lambda _: True)
            self.tier.pool.check()
            assert self.tier.pool.free == len(self.stamps)


TestTierAgainstANaiveModel = TierMachine.TestCase
TestTierAgainstANaiveModel.settings = settings(stateful_step_count=40)


def test_the_least_recently_used_goes_first() -> None:
    tier = Tier(6)
    for user in "abc":
        fill(tier, user, 2)
    tier.touch("a")
    fill(tier, "d", 3)
    assert [one.user for one in tier] == ["a", "d"]
    assert tier.evictions == 2


def test_where_worth_is_known_what_is_worth_the_least_goes_first() -> None:
    tier, worth = Tier(6), {"a": 3.0, "b": 1.0, "c": 2.0}
    tier.worth = by_user(tier, lambda user: worth[user])
    for user in "abc":
        fill(tier, user, 2)
    fill(tier, "d", 4)
    assert [one.user for one in tier] == ["a", "d"]


def test_of_many_those_worth_the_most_stay() -> None:
    tier = Tier(200)
    tier.worth = by_user(tier, float)
    for user in range(200):
        fill(tier, str(user), 1)
    for user in range(200, 300):
        fill(tier, str(user), 1)
    assert sorted(int(one.user) for one in tier) == list(range(100, 300))


def test_who_was_lined_up_to_go_and_comes_back_stays() -> None:
    tier = Tier(40)
    tier.worth = by_user(tier, float)
    for user in range(41):
        fill(tier, str(user), 1)
    assert tier.find("0") is None
    tier.seen("1", 1.0)
    tier.touch("2")
    fill(tier, "41", 1)
    assert [user for user in range(5) if tier.find(str(user)) is None] == [0, 3]


def test_who_was_lined_up_for_being_in_both_tiers_stays_when_the_other_lets_go() -> None:
    device, host = Tier(40), Tier(40)
    device.other, host.other = host, device
    device.worth = lambda held: np.where(held.twice, 0.0, 100.0) + np.linspace(0.0, 1.0, len(held.last))
    for user in range(40):
        fill(device, str(user), 1)
    for user in (20, 21, 22):
        fill(host, str(user), 1)
    fill(device, "new", 1)
    assert device.find("20") is None
    host.drop("21")
    fill(device, "newer", 1)
    assert [user for user in (20, 21, 22) if device.find(str(user)) is None] == [20, 22]


def test_where_those_worth_the_least_are_needed_the_next_are_lined_up() -> None:
    tier, weighed = Tier(200), list[int]()

    def worth(held: HeldColumns) -> npt.NDArray[np.float64]:
        weighed.append(len(held.last))
        return np.array([float(user) for user in tier._held.users])

    tier.worth = worth
    leases = [Lease(tier.pool, str(user), fill(tier, str(user), 1).pages, 1.0) for user in range(100)]
    for user in range(100, 201):
        fill(tier, str(user), 1)
    for user in range(201, 216):
        fill(tier, str(user), 1)
    assert sorted(int(one.user) for one in tier) == [*range(100), *range(116, 216)]
    assert len(weighed) == 1  # then they go one after the other
    for lease in leases:
        lease.release()


def test_of_very_many_only_some_are_weighed() -> None:
    tier, weighed = Tier(9000), list[int]()

    def worth(held: HeldColumns) -> npt.NDArray[np.float64]:
        weighed.append(len(held.last))
        return held.tokens

    tier.worth = worth
    for user in range(9000):
        fill(tier, str(user), 1)
    fill(tier, "one more", 1)
    assert weighed == [8192]
    assert len(tier) == 9000


def test_what_is_worth_the_same_goes_once_however_many_have_to() -> None:
    tier = Tier(100)
    tier.worth = lambda held: np.zeros(len(held.last))
    for user in range(100):
        fill(tier, str(user), 1)
    fill(tier, "large", 60)
    assert len(tier) == 41
    assert tier.evictions == 60
    tier.pool.check()


def test_a_tier_knows_who_was_here_when_and_what_the_other_has_too() -> None:
    device, host = Tier(8), Tier(8)
    device.other, host.other = host, device
    fill(device, "a", 2)
    fill(device, "b", 3)
    fill(host, "a", 2)
    device.seen("a", 5.0)
    device.seen("nobody", 6.0)
    assert device._held.columns.last.tolist() == [5.0, -np.inf]
    assert device._held.columns.twice.tolist() == [True, False]
    assert host._held.columns.twice.tolist() == [True]
    host.drop("a")
    assert device._held.columns.twice.tolist() == [False, False]


def test_the_shorter_of_two_prefixes_is_there_twice_and_the_longer_is_not() -> None:
    device, host = Tier(8), Tier(8)
    device.other, host.other = host, device
    whole = History([1, 2, 3], [0, 0, 0], [1, 2, 3])
    for tier, history in ((device, whole), (host, whole[:2])):
        pages = tier.reserve(1, NONE)
        assert pages is not None
        tier.install(Prefix.of("u", LINEAGE, history, pages), 1.0)
    assert not device._held.columns.twice[0]
    assert host._held.columns.twice[0]


def test_what_is_needed_stays_however_little_it_is_worth() -> None:
    tier = Tier(4)
    tier.worth = by_user(tier, lambda user: float(user != "a"))
    lease = Lease(tier.pool, "a", fill(tier, "a", 2).pages, 1.0)
    fill(tier, "b", 2)
    fill(tier, "c", 2)
    assert [one.user for one in tier] == ["a", "c"]
    lease.release()


def test_nothing_is_evicted_while_pages_are_free() -> None:
    tier = Tier(6)
    for user in "abc":
        fill(tier, user, 2)
    tier.drop("b")
    fill(tier, "d", 2)
    assert [one.user for one in tier] == ["a", "c", "d"]
    assert tier.evictions == 0


def test_a_prefix_that_someone_needs_a_part_of_goes_after_those_that_nobody_needs() -> None:
    tier = Tier(6)
    needed = fill(tier, "a", 3)
    fill(tier, "b", 3)
    lease = Lease(tier.pool, "a", needed.pages[:1], 1.0)
    assert tier.reserve(3, NONE) is not None
    assert [one.user for one in tier] == ["a"]
    assert tier.reserve(2, NONE) is not None
    assert len(tier) == 0
    assert tier.reserve(1, NONE) is None
    lease.release()
    assert tier.reserve(1, NONE) is not None
    tier.pool.check()


def test_an_extension_does_not_evict_what_it_extends_while_others_can_go() -> None:
    tier = Tier(6)
    own = fill(tier, "a", 3)
    fill(tier, "b", 3)
    assert tier.reserve(2, own.pages[:2]) is not None
    assert tier.find("a") is own


def test_pages_that_are_shared_are_counted_once_in_what_can_be_reserved() -> None:
    tier = Tier(6)
    own = fill(tier, "a", 4)
    assert tier.can_reserve(2, own.pages)
    assert not tier.can_reserve(3, own.pages)
    lease = Lease(tier.pool, "a", own.pages, 1.0)
    assert tier.can_reserve(2, own.pages)
    assert not tier.can_reserve(3, own.pages)
    lease.release()
    assert tier.can_reserve(6, NONE)


def test_prefixes_without_pages_do_not_pile_up_where_others_are_evicted() -> None:
    tier = Tier(4)
    for user in range(100):
        tier.install(prefix(f"new {user}", NONE))
    fill(tier, "a", 4)
    fill(tier, "b", 4)
    assert [one.user for one in tier] == ["b"]


@pytest.mark.parametrize("total", [0, 1])
def test_a_tier_without_room_refuses_and_holds_nothing(total: int) -> None:
    tier = Tier(total)
    assert tier.reserve(total + 1, NONE) is None
    assert tier.find("a") is None
    assert not tier.drop("a")
    tier.touch("a")
    assert len(tier) == 0
    tier.pool.check()


def everyone(held: HeldColumns) -> npt.NDArray[np.bool_]:
    return np.ones(len(held.last), np.bool_)


def of_tokens(tier: Tier, user: str, count: int) -> Prefix:
    """A prefix that fills so many pages, and that nobody has pinned."""
    pages = tier.reserve(count, NONE)
    assert pages is not None
    made = Prefix.of(user, LINEAGE, numbered(count * PAGE), pages)
    tier.install(made)
    tier.pool.unpin(pages)
    return made


def test_the_head_of_what_is_worth_the_least_goes_first() -> None:
    tier = Tier(128)
    tier.in_parts = everyone
    tier.worth = lambda held: held.last * (PAGE + held.head)
    for rate, user in enumerate("abcdefghijklmnop", 1):
        of_tokens(tier, user, 8)
        tier.seen(user, float(rate))
    of_tokens(tier, "new", 2)
    shortened = {one.user: one.missing for one in tier if one.missing}
    assert shortened == {"a": 6}  # as far as its pages are worth no more than the first of "d": four are weighed
    left = tier.find("a")
    assert left is not None
    assert len(left.pages) == 2
    assert left.length == 8 * PAGE
    assert tier.shortened == 1
    assert tier.evictions == 0
    tier.pool.check()


def test_where_all_are_worth_the_same_each_loses_a_part() -> None:
    tier = Tier(64)
    tier.in_parts = everyone
    tier.worth = lambda held: PAGE + held.head
    for user in range(8):
        of_tokens(tier, str(user), 8)
    for user in range(8, 10):
        of_tokens(tier, str(user), 8)
    assert len(tier) == 10
    assert max(one.missing for one in tier) <= 4
    assert tier.evictions == 0
    for user in range(10, 100):
        of_tokens(tier, str(user), 8)
        tier.pool.check()
    assert tier.evictions > 0
    assert all(len(one.pages) for one in tier)


def test_what_is_worth_nothing_goes_whole_and_before_any_head() -> None:
    tier = Tier(32)
    tier.in_parts = everyone
    tier.worth = lambda held: np.where(held.last > 1, held.last, 0.0) * (PAGE + held.head)
    for rate, user in enumerate("abcd", 1):
        of_tokens(tier, user, 8)
        tier.seen(user, float(rate))
    of_tokens(tier, "e", 8)
    assert [one.user for one in tier] == ["b", "c", "d", "e"]
    assert tier.shortened == 0


def test_of_a_few_no_more_goes_than_has_to() -> None:
    tier = Tier(3 * 64)
    tier.in_parts = everyone
    tier.worth = lambda held: held.last * (PAGE + held.head)
    for user, rate in (("a", 1.0), ("b", 1.5), ("c", 80.0)):
        of_tokens(tier, user, 64)
        tier.seen(user, rate)
    of_tokens(tier, "new", 1)
    assert {one.user: one.missing for one in tier if one.missing} == {"a": 22}


def test_those_that_do_not_go_in_parts_go_whole() -> None:
    tier = Tier(32)
    tier.in_parts = lambda held: held.last == 1.0
    tier.worth = lambda held: (1 + held.last) * (PAGE + held.head)
    for rate, user in enumerate("abcd"):
        of_tokens(tier, user, 8)
        tier.seen(user, float(rate))
    of_tokens(tier, "e", 12)
    assert {one.user: one.missing for one in tier} == {"b": 3, "d": 0, "e": 0}


def test_a_prefix_that_someone_needs_keeps_its_head() -> None:
    tier = Tier(32)
    tier.in_parts = everyone
    tier.worth = lambda held: PAGE + held.head
    made = [of_tokens(tier, user, 8) for user in "abcd"]
    with Lease(tier.pool, "a", made[0].pages[-1:], 1.0), Lease(tier.pool, "c", made[2].pages[:1], 1.0):
        of_tokens(tier, "e", 4)
        assert {one.user for one in tier if one.missing} == {"b", "d"}
        assert tier.find("a") is made[0]
        assert tier.find("c") is made[2]


def test_without_its_head_it_is_not_there_twice_for_the_other_tier_and_the_other_is_for_it() -> None:
    device, host = Tier(8), Tier(8)
    device.other, host.other = host, device
    made = of_tokens(device, "a", 4)
    of_tokens(host, "a", 4)
    assert device._held.columns.twice.tolist() == host._held.columns.twice.tolist() == [True]
    device._shorten(made, 1)
    assert device._held.columns.twice.tolist() == [True]
    assert host._held.columns.twice.tolist() == [False]
    assert device._held.columns.head.tolist() == [PAGE]
    found = host.find("a")
    assert found is not None
    host._shorten(found, 2)
    assert device._held.columns.twice.tolist() == [False]
    assert host._held.columns.twice.tolist() == [True]
