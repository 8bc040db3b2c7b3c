"""A lease keeps pages as they are until it ends, and ends once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.cache import Lease, Lineage, PagePool, Prefix, Tier
from relaygr.cache.pages import _MOST_OVER
from relaygr.history import History

NOTHING_SHARED = np.empty(0, np.int64)


def kept(pool: PagePool, count: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Pages that an index owns and nobody has pinned."""
    pages = pool.take(count)
    pool.own(pages)
    pool.unpin(pages)
    return pages


def test_leased_pages_are_pinned_until_the_block_is_left() -> None:
    pool = PagePool(8)
    pages = kept(pool, 3)
    lease = Lease(pool, "u", pages, 1.0)
    held = [lease.held]
    with lease as same:
        assert same is lease
        assert (pool.pinned, pool.unpinned(pages)) == (3, 0)
    assert [*held, lease.held] == [True, False]
    assert (pool.pinned, pool.free) == (0, 5)
    pool.check()


def test_an_error_in_the_block_ends_the_lease_and_comes_out() -> None:
    pool = PagePool(8)
    pages = kept(pool, 3)
    with pytest.raises(KeyError, match="gone"), Lease(pool, "u", pages, 1.0):
        raise KeyError("gone")
    assert pool.pinned == 0
    pool.check()


def test_releasing_twice_is_harmless_to_another_lease_of_the_same_pages() -> None:
    pool = PagePool(8)
    pages = kept(pool, 3)
    first, second = Lease(pool, "u", pages, 1.0), Lease(pool, "u", pages, 1.0)
    with first:
        first.release()
        first.release()
    assert not first.held
    assert second.held
    assert pool.unpinned(pages) == 0
    second.release()
    assert pool.unpinned(pages) == 3
    pool.check()


@given(st.floats(allow_nan=False), st.lists(st.floats(allow_nan=False)))
def test_a_lease_is_extended_and_never_shortened(expires: float, times: list[float]) -> None:
    pool = PagePool(1)
    lease = Lease(pool, "u", pool.take(1), expires)
    for time in times:
        lease.extend(time)
    assert lease.expires == max([expires, *times])


def test_leased_pages_outlive_their_prefix_and_are_free_when_the_lease_ends() -> None:
    tier = Tier(4)
    pages = tier.pool.take(3)
    tier.install(Prefix.of("u", Lineage("v", 0, b"", 0, 0), History.empty(), pages))
    lease = Lease(tier.pool, "u", pages[:2], 1.0)
    tier.pool.unpin(pages)
    assert tier.drop("u")
    assert tier.pool.free == 2
    assert tier.reserve(3, NOTHING_SHARED) is None
    lease.release()
    assert tier.pool.free == 4
    tier.pool.check()


@given(st.lists(st.tuples(st.sampled_from(["u1", "u2", "u3"]), st.integers(1, 3), st.booleans()), max_size=40))
def test_leases_of_the_same_pages_pin_them_until_the_last_has_ended(steps: list[tuple[str, int, bool]]) -> None:
    """Whoever leases all of a prefix, or its first pages, in whatever order, and however seldom pins are asked for."""
    pool = PagePool(16)
    whole = {user: kept(pool, 3) for user in ("u1", "u2", "u3")}
    parts = {(user, count): pages[:count] for user, pages in whole.items() for count in (1, 2)}
    parts |= {(user, 3): pages for user, pages in whole.items()}
    leases: list[tuple[set[int], Lease]] = []
    for number, (user, count, ask) in enumerate(steps):
        if len(leases) > count:
            _, lease = leases.pop(number % len(leases))
            lease.release()
            lease.release()
        pages = parts[user, count]
        leases.append((set(pages.tolist()), Lease(pool, user, pages, 1.0)))
        if ask:
            assert pool.pinned == len(set[int]().union(*(pages for pages, _ in leases)))
            pool.check()
    for _, lease in leases:
        lease.release()
    for pages in whole.values():
        pool.disown(pages)
    assert (pool.pinned, pool.free) == (0, 16)
    pool.check()


def test_pages_that_lost_their_index_are_free_as_soon_as_anybody_asks() -> None:
    def dropped() -> PagePool:
        pool = PagePool(4)
        pages = kept(pool, 3)
        lease = Lease(pool, "u", pages, 1.0)
        lease.release()
        pool.disown(pages)
        return pool

    assert dropped().free == 4
    assert dropped().available == 4
    assert len(dropped().take(4)) == 4


def test_what_is_let_go_of_together_is_bounded() -> None:
    """Or whoever asks for pins then would wait for all of them."""
    pool = PagePool(200_000)
    bounds = []
    whole = [kept(pool, 1000) for _ in range(100)]
    for user, pages in enumerate(whole):
        Lease(pool, f"u{user}", pages, 1.0).release()
        bounds.append(pool._pages_over)
    assert 1000 < max(bounds) <= _MOST_OVER
    assert pool.pinned == 0
    pool.check()
