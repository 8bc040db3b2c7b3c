"""A lease keeps pages as they are until it ends, and ends once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.cache import Lease, Lineage, PagePool, Prefix, Tier
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


@given(st.lists(st.tuples(st.sampled_from(["u1", "u2", "u3"]), st.booleans()), max_size=6))
def test_leases_released_together_leave_what_releasing_each_leaves(asked: list[tuple[str, bool]]) -> None:
    pool = PagePool(16)
    pages = {user: kept(pool, 3) for user in ("u1", "u2", "u3")}
    leases = [Lease(pool, user, pages[user], 1.0) for user, _ in asked]
    for lease, (_, early) in zip(leases, asked, strict=True):
        if early:
            lease.release()
    Lease.release_all(leases)
    assert not any(lease.held for lease in leases)
    assert pool.pinned == 0
    pool.check()
