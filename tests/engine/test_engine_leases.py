"""What a lease keeps, for how long, and that pre-inference leaves room for ranks."""

import asyncio

import numpy as np
import pytest

from behaviours import numbered
from engines import COSTS, PAGE_BYTES, Bench, WatchedDevice, corrected, in_virtual_time, opened
from relaygr import Path, PreInferOutcome
from relaygr.errors import Unavailable
from relaygr.history import PAGE

CONTEXT = np.array([5, 7, 11])
COMPUTED, RESIDENT, NO_MEMORY = PreInferOutcome.COMPUTED, PreInferOutcome.RESIDENT, PreInferOutcome.NO_MEMORY


async def crowd(bench: Bench, visitors: int = 10) -> None:
    """Ranks of others, long enough that each wants most of the pool."""
    for k in range(visitors):
        await bench.rank(f"visitor {k}", numbered(400, salt=100 + k))


@in_virtual_time
async def test_a_leased_prefix_is_not_evicted_and_an_unleased_one_is() -> None:
    async with opened(spare=3) as bench:
        await bench.pre_infer("u1", numbered(300))
        await crowd(bench)
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT
        await crowd(bench)
        assert (await bench.rank("u1", numbered(300))).path is Path.FULL


@in_virtual_time
async def test_a_resident_prefix_is_leased_to_the_pre_infer_that_finds_it() -> None:
    async with opened(spare=3) as bench:
        await bench.rank("u1", numbered(300))
        assert await bench.pre_infer("u1", numbered(300)) is RESIDENT
        await crowd(bench)
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT


@in_virtual_time
async def test_a_lease_holds_no_page_behind_its_length() -> None:
    async with opened() as bench:
        await bench.rank("u1", numbered(400))
        assert await bench.pre_infer("u1", numbered(256)) is RESIDENT
        assert bench.engine.status().device_pages_pinned == 2


@in_virtual_time
async def test_a_lease_ends_with_its_rank() -> None:
    async with opened() as bench:
        await bench.pre_infer("u1", numbered(300))
        status = bench.engine.status()
        assert (status.leases, status.device_pages_pinned) == (1, 3)
        await bench.rank("u1", numbered(300))
        status = bench.engine.status()
        assert (status.leases, status.device_pages_pinned) == (0, 0)


@in_virtual_time
async def test_a_lease_ends_when_its_time_is_up() -> None:
    async with opened(spare=3, lease_s=0.5) as bench:
        began = bench.now
        await bench.pre_infer("u1", numbered(300))
        await asyncio.sleep(began + 0.499 - bench.now)
        assert bench.engine.status().leases == 1
        await asyncio.sleep(0.002)
        assert (bench.engine.status().leases, bench.engine.status().device_pages_pinned) == (0, 0)
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT
        await crowd(bench)
        assert (await bench.rank("u1", numbered(300))).path is Path.FULL


@in_virtual_time
async def test_each_pre_infer_has_a_lease_of_its_own() -> None:
    async with opened(spare=3) as bench:
        for _ in range(2):
            await bench.pre_infer("u1", numbered(300))
        assert bench.engine.status().leases == 2
        await bench.rank("u1", numbered(300))
        assert bench.engine.status().leases == 1
        await crowd(bench)
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT
        assert bench.engine.status().leases == 0


@in_virtual_time
async def test_a_rank_that_fails_to_be_in_time_ends_its_lease_too() -> None:
    async with opened() as bench:
        await bench.pre_infer("u1", numbered(300))
        task = asyncio.create_task(bench.rank("u1", numbered(300)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(1e-3)
        assert (bench.engine.status().leases, bench.engine.status().device_pages_pinned) == (0, 0)


@in_virtual_time
async def test_a_step_launched_before_its_lease_expired_is_unharmed() -> None:
    """The lease runs out while the rank scores and others wait for its pages."""
    async with opened(spare=3, lease_s=0.01) as bench:
        await bench.pre_infer("u1", numbered(300))
        scoring = asyncio.create_task(bench.rank("u1", numbered(300), candidates=20_000))
        await asyncio.sleep(1e-3)
        others = [asyncio.create_task(bench.rank(f"other {k}", numbered(400, salt=k + 1))) for k in range(4)]
        await asyncio.sleep(0.012)
        assert (bench.engine.status().leases, scoring.done()) == (0, False)
        assert (await scoring).path is Path.RESIDENT
        await asyncio.gather(*others)


@in_virtual_time
async def test_an_append_launched_before_its_lease_expired_is_unharmed() -> None:
    """Nobody wants the build any more; its pages go to others only after its step."""
    async with opened(spare=3, lease_s=0.01) as bench:
        bench.device.hangs_s = lambda work: 0.02 if len(bench.device.launched) == 1 else 0.0
        pre_infer = asyncio.create_task(bench.pre_infer("u1", numbered(300)))
        await asyncio.sleep(1e-3)
        others = [asyncio.create_task(bench.rank(f"other {k}", numbered(400, salt=k + 1))) for k in range(3)]
        assert await pre_infer is PreInferOutcome.FAILED
        await asyncio.sleep(1e-3)
        status = bench.engine.status()
        assert (status.leases, status.steps_in_flight, status.device_pages_pinned) == (0, 1, 7)
        await asyncio.gather(*others)


@in_virtual_time
async def test_new_behaviours_are_appended_in_place_behind_a_lease() -> None:
    async with opened() as bench:
        await bench.pre_infer("u1", numbered(200))
        free = bench.engine.status().device_pages_free
        ranked = await bench.rank("u1", numbered(250))
        assert (ranked.path, bench.device.appended, bench.device.page_copies) == (Path.EXTENDED, 250, 0)
        assert bench.engine.status().device_pages_free == free


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("new", [1, 20])
@in_virtual_time
async def test_two_futures_of_one_history_do_not_overwrite_each_other(new: int, depth: int) -> None:
    async with opened(device=WatchedDevice(depth=depth)) as bench:
        base = numbered(200)
        await bench.pre_infer("u1", base)
        one = base.append([1] * new, [0] * new, [9999] * new)
        two = base.append([2] * new, [0] * new, [9999] * new)
        ranked = await asyncio.gather(*(bench.rank("u1", history) for history in (one, two, base, one, two)))
        assert [answer.path for answer in ranked[:3]] == [Path.EXTENDED, Path.EXTENDED, Path.RESIDENT]
        assert bench.device.page_copies == 1
        assert bench.device.appended == 200 + 2 * new


@pytest.mark.parametrize("reloaded", [False, True])
@pytest.mark.parametrize("at", [130, 260])
@in_virtual_time
async def test_what_is_rewritten_below_a_lease_is_copied_first(at: int, reloaded: bool) -> None:
    """The context shifts behaviours against pages, so a correction begins in the middle of a leased page."""
    async with opened(host=20) as bench:
        old, new = numbered(400), corrected(numbered(400), at)
        await bench.rank("u1", old, context=CONTEXT)
        if reloaded:
            await bench.push_out("u1")
            assert (await bench.rank("u1", old, context=CONTEXT)).path is Path.RELOADED
        assert await bench.pre_infer("u1", old, context=CONTEXT) is RESIDENT
        bench.device.forget()
        later = asyncio.create_task(bench.rank("u1", old, context=CONTEXT, within=0.5))
        await asyncio.sleep(0)
        first = asyncio.create_task(bench.rank("u1", new, context=CONTEXT, within=0.1))
        assert (await later).path is Path.RESIDENT
        assert (await first).path is Path.EXTENDED
        assert (bench.device.page_copies, bench.device.appended) == (1, 400 - at // PAGE * PAGE)


@in_virtual_time
async def test_a_rewrite_that_fails_leaves_the_reloaded_prefix_as_it_was() -> None:
    async with opened(host=20) as bench:
        old, new = numbered(400), corrected(numbered(400), 130)
        await bench.rank("u1", old, context=CONTEXT)
        await bench.push_out("u1")
        await bench.rank("u1", old, context=CONTEXT)
        bench.device.fails = lambda work: True
        with pytest.raises(Unavailable):
            await bench.rank("u1", new, context=CONTEXT)
        bench.device.fails = lambda work: False
        assert (await bench.rank("u1", old, context=CONTEXT)).path is Path.RESIDENT


@in_virtual_time
async def test_pre_inference_is_admitted_up_to_the_last_page_and_no_further() -> None:
    async with opened(spare=5) as bench:
        users = [f"user {k}" for k in range(5)]
        for user in users:
            assert await bench.pre_infer(user, numbered(PAGE)) is COMPUTED
        before = bench.state()
        assert await bench.pre_infer("one more", numbered(1)) is NO_MEMORY
        assert bench.state() == before
        assert await bench.pre_infer(users[0], numbered(PAGE)) is RESIDENT, (
            "it takes no page that is not leased already"
        )
        assert await bench.pre_infer(users[0], numbered(PAGE + 1)) is NO_MEMORY
        await bench.rank(users[1], numbered(PAGE))
        assert await bench.pre_infer("one more", numbered(1)) is COMPUTED


@pytest.mark.parametrize(("share", "admitted"), [(0.5, 6), (0.25, 3), (1.0, 7)])
@in_virtual_time
async def test_leases_take_no_more_than_their_share(share: float, admitted: int) -> None:
    """Of twelve pages, five of which are kept for a rank."""
    async with opened(spare=7, lease_share=share) as bench:
        assert bench.engine.status().device_pages == 12
        outcomes = [await bench.pre_infer(f"user {k}", numbered(PAGE)) for k in range(9)]
        assert outcomes == [COMPUTED] * admitted + [NO_MEMORY] * (9 - admitted)


@in_virtual_time
async def test_the_longest_rank_runs_while_leases_fill_what_they_may() -> None:
    async with opened(spare=5) as bench:
        for k in range(5):
            await bench.pre_infer(f"user {k}", numbered(PAGE))
        context = np.arange(64)
        for k in range(3):
            history = numbered(400, salt=k)
            assert (await bench.rank("u1", history, context=context)).path is Path.FULL
            assert (await bench.rank("u1", corrected(history, 130), context=context)).path is Path.EXTENDED
        for k in range(5):
            assert (await bench.rank(f"user {k}", numbered(PAGE))).path is Path.RESIDENT


@in_virtual_time
async def test_admission_counts_what_ranks_hold() -> None:
    async with opened(spare=2) as bench:
        rank = asyncio.create_task(bench.rank("u1", numbered(400)))
        await asyncio.sleep(1e-4)
        assert await bench.pre_infer("u2", numbered(1)) is NO_MEMORY
        await rank
        assert await bench.pre_infer("u2", numbered(1)) is COMPUTED


@in_virtual_time
async def test_pre_inference_is_refused_past_its_share_of_device_time() -> None:
    async with opened(pre_infer_share=0.5, step_ms=1.0) as bench:
        cost = 256 * COSTS.token
        fits = asyncio.create_task(bench.pre_infer("u1", numbered(256), within=2.1 * cost))
        await asyncio.sleep(0)
        before = bench.state()
        assert await bench.pre_infer("u2", numbered(256), within=2.1 * cost) is PreInferOutcome.NO_CAPACITY
        assert bench.state() == before
        assert await bench.pre_infer("cat", numbered(256), within=4.2 * cost) is COMPUTED
        assert await fits is COMPUTED
        assert await bench.pre_infer("dan", numbered(256), within=1.9 * cost) is PreInferOutcome.NO_CAPACITY


@in_virtual_time
async def test_a_pre_infer_that_waits_for_another_is_admitted_for_its_device_time_once() -> None:
    async with opened(pre_infer_share=0.5) as bench:
        cost = 128 * COSTS.token
        calls = [bench.pre_infer("u1", numbered(length), within=4.4 * cost) for length in (128, 256)]
        assert await asyncio.gather(*calls) == [COMPUTED, PreInferOutcome.EXTENDED]
        assert await bench.pre_infer("u2", numbered(128, salt=1), within=4.4 * cost) is COMPUTED, "one more fits"
        assert await bench.pre_infer("cat", numbered(128, salt=2), within=3.6 * cost) is PreInferOutcome.NO_CAPACITY


@in_virtual_time
async def test_a_rank_that_waits_for_pages_is_not_overtaken_by_less_urgent_ones() -> None:
    """Small ranks keep coming: together they always hold a page that the long one needs."""
    async with opened(spare=0, max_history=400) as bench:
        assert bench.engine.status().device_pages * PAGE_BYTES == bench.engine.config.device_bytes()
        stream = []

        async def small(k: int) -> None:
            await bench.rank(f"small {k}", numbered(128, salt=k + 1), candidates=1000)

        stream.append(asyncio.create_task(small(0)))
        stream.append(asyncio.create_task(small(1)))
        await asyncio.sleep(1e-4)
        long = asyncio.create_task(bench.rank("long", numbered(400), context=np.arange(64), within=0.1))
        for k in range(2, 200):
            await asyncio.sleep(1e-3)
            stream.append(asyncio.create_task(small(k)))
        assert (await long).used == 400
        await asyncio.gather(*stream)
