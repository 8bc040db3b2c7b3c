"""Every call ends by its deadline; what cannot be there in time is late, or cut to what can."""

import asyncio

import numpy as np
import pytest

from behaviours import numbered
from engines import COSTS, WatchedDevice, in_virtual_time, opened
from relaygr import Path, PreInferOutcome
from relaygr.errors import DeadlineExceeded
from relaygr.history import PAGE


@in_virtual_time
async def test_a_rank_in_time_is_answered_and_a_late_one_ends_at_its_deadline() -> None:
    async with opened() as bench:
        needs = COSTS.step + 300 * COSTS.token + 3 * COSTS.candidate
        assert (await bench.rank("u1", numbered(300), within=needs + 1e-6)).path is Path.FULL
        began = bench.now
        with pytest.raises(DeadlineExceeded):
            await bench.rank("u2", numbered(300), within=needs - 1e-6)
        assert bench.now == pytest.approx(began + needs - 1e-6)


@in_virtual_time
async def test_what_a_late_rank_began_is_given_up() -> None:
    async with opened(step_ms=1.0) as bench:
        before = bench.state()
        with pytest.raises(DeadlineExceeded):
            await bench.rank("u1", numbered(300), within=1e-3)
        await bench.settle()
        assert bench.device.appended == PAGE
        assert bench.state() == before


@in_virtual_time
async def test_what_a_late_rank_began_goes_on_for_others_who_want_it() -> None:
    async with opened(step_ms=1.0) as bench:
        waits = asyncio.create_task(bench.rank("u1", numbered(300)))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded):
            await bench.rank("u1", numbered(300), within=1e-3)
        assert (await waits).path is Path.FULL
        assert bench.device.appended == 300


@in_virtual_time
async def test_the_earlier_deadline_goes_first() -> None:
    async with opened(step_ms=1.0, spare=20) as bench:
        filler = asyncio.create_task(bench.rank("filler", numbered(10)))
        await asyncio.sleep(1e-5)
        ends = {}

        async def rank(user: str, within: float | None, salt: int) -> None:
            await bench.rank(user, numbered(300, salt=salt), within=within)
            ends[user] = bench.now

        await asyncio.gather(filler, rank("late", 0.3, 1), rank("none", None, 2), rank("soon", 0.1, 3))
        assert sorted(ends, key=lambda user: ends[user]) == ["soon", "late", "none"]


@in_virtual_time
async def test_an_unfinished_pre_infer_says_so_at_its_deadline_and_goes_on_for_its_rank() -> None:
    async with opened(step_ms=1.0, pre_infer_share=1.0) as bench:
        bench.device.hangs_s = lambda work: 0.01 if len(bench.device.launched) == 1 else 0.0
        began = bench.now
        assert await bench.pre_infer("u1", numbered(300), within=0.005) is PreInferOutcome.FAILED
        assert bench.now == pytest.approx(began + 0.005)
        assert (bench.engine.status().leases, bench.engine.status().builds_under_way) == (1, 1)
        assert (await bench.rank("u1", numbered(300))).path is Path.WAITED
        assert bench.device.appended == 300


@in_virtual_time
async def test_an_unfinished_pre_infer_is_finished_for_a_rank_that_comes_later() -> None:
    async with opened(step_ms=1.0) as bench:
        bench.device.hangs_s = lambda work: 0.01 if len(bench.device.launched) == 1 else 0.0
        assert await bench.pre_infer("u1", numbered(300), within=0.005) is PreInferOutcome.FAILED
        await bench.settle()
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT
        assert bench.device.appended == 300


@in_virtual_time
async def test_a_pre_infer_whose_lease_ended_is_given_up() -> None:
    async with opened(step_ms=1.0, lease_s=0.004) as bench:
        before = bench.state()
        bench.device.hangs_s = lambda work: 0.01 if len(bench.device.launched) == 1 else 0.0
        assert await bench.pre_infer("u1", numbered(300), within=0.1) is PreInferOutcome.FAILED
        await bench.settle()
        assert bench.device.appended == PAGE
        assert bench.state() == before


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("context", [None, np.array([3, 4])])
@in_virtual_time
async def test_a_rank_short_of_time_is_cut_to_the_newest_behaviours_that_fit(
    context: "np.ndarray[tuple[int], np.dtype[np.int64]] | None", depth: int
) -> None:
    async with opened(on_miss="truncate", device=WatchedDevice(depth=depth)) as bench:
        ranked = await bench.rank("u1", numbered(300), context=context, within=2e-3)
        assert ranked.path is Path.TRUNCATED
        assert 120 < ranked.used < 190
        assert bench.device.appended == ranked.used + (0 if context is None else len(context))


@in_virtual_time
async def test_more_time_ranks_on_more_of_the_history() -> None:
    async with opened(on_miss="truncate", max_history=400) as bench:
        used = [(await bench.rank("u1", numbered(400), within=within * 1e-3)).used for within in range(1, 5)]
        assert used == sorted(used)
        assert used[0] >= 10
        assert used[-1] < 400
        assert (await bench.rank("u1", numbered(400), within=6e-3)).path is Path.FULL


@in_virtual_time
async def test_a_cut_prefix_is_not_kept() -> None:
    async with opened(on_miss="truncate") as bench:
        before = bench.state()
        await bench.rank("u1", numbered(300), within=2e-3)
        assert bench.state() == before
        assert (await bench.rank("u1", numbered(300))).path is Path.FULL


@in_virtual_time
async def test_what_is_resident_is_not_cut() -> None:
    async with opened(on_miss="truncate") as bench:
        await bench.pre_infer("u1", numbered(300))
        assert (await bench.rank("u1", numbered(300), within=3e-4)).path is Path.RESIDENT


@in_virtual_time
async def test_what_is_nearly_there_is_waited_for_and_not_cut() -> None:
    async with opened(on_miss="truncate") as bench:
        pre_infer = asyncio.create_task(bench.pre_infer("u1", numbered(300)))
        await asyncio.sleep(2e-3)
        assert (await bench.rank("u1", numbered(300), within=4e-3)).path is Path.WAITED
        await pre_infer


@in_virtual_time
async def test_a_rank_stops_waiting_for_what_turns_out_late() -> None:
    """The prefix should have been there in time; three quarters of the time have passed, and it is not."""
    async with opened(on_miss="truncate", host=20) as bench:
        await bench.rank("u1", numbered(300))
        await bench.push_out("u1")
        bench.device.hangs_s = lambda work: 0.0 if hasattr(work, "served") else 1.0
        began = bench.now
        ranked = await bench.rank("u1", numbered(300), within=0.1)
        assert ranked.path is Path.TRUNCATED
        assert bench.now - began == pytest.approx(0.075, abs=0.01)


@pytest.mark.parametrize("gap_s", [0.5e-3, 2e-3])
@in_virtual_time
async def test_ranks_that_the_device_cannot_serve_in_full_are_cut_and_none_is_late(gap_s: float) -> None:
    """Twice and eight times what it can do: each is cut to what is left behind those before it."""
    async with opened(on_miss="truncate", spare=100, step_ms=1.0) as bench:

        async def rank(k: int) -> Path:
            await asyncio.sleep(k * gap_s)
            return (await bench.rank(f"user {k}", numbered(400, salt=k), within=0.02)).path

        answers = await asyncio.gather(*(rank(k) for k in range(100)))
        assert set(answers) == {Path.FULL, Path.TRUNCATED}


@in_virtual_time
async def test_ranks_on_their_prefix_are_not_late_for_those_that_cannot_be_in_time() -> None:
    async with opened(step_ms=1.0, spare=400, max_history=4000) as bench:
        long = 3000
        await bench.rank("resident", numbered(long))
        within = 0.9 * (COSTS.step + long * COSTS.token)
        crowd = [asyncio.create_task(bench.rank(f"u{n}", numbered(long, salt=n), within=within)) for n in range(1, 11)]
        await asyncio.sleep(1e-4)
        began = bench.now
        ranked = await bench.rank("resident", numbered(long), within=within)
        assert ranked.path is Path.RESIDENT
        assert bench.now - began < 0.1 * within, "it was behind work that is of use to nobody"
        ended = await asyncio.gather(*crowd, return_exceptions=True)
        assert all(isinstance(end, DeadlineExceeded) for end in ended)
