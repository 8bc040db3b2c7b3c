"""Every call ends by its deadline; what cannot be there in time is late, or cut to what can."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

from behaviours import numbered
from engines import COSTS, Bench, WatchedDevice, in_virtual_time, opened
from relaygr import Path, PreInferOutcome
from relaygr.clock import VirtualClock, VirtualTimeLoop
from relaygr.engine.cost import CostModel
from relaygr.engine.device import Device
from relaygr.engine.faults import Faults, FaultyExecutor
from relaygr.engine.simulated import SimulatedModel
from relaygr.engine.step import Served, Step, StepResult
from relaygr.errors import DeadlineExceeded, Overloaded
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


async def offered(bench: Bench, times: float, work_s: float, call: Callable[[int], Awaitable[object]]) -> Counter[str]:
    """Calls as often as so many times what the device can do, for a while; what became of them.

    Refusals must come at once.
    """
    count, ended, at_once = int(times * 0.5 / work_s), Counter[str](), list[bool]()

    async def one(k: int) -> None:
        await asyncio.sleep(k * work_s / times)
        began = bench.now
        try:
            await call(k)
        except DeadlineExceeded:
            ended["DeadlineExceeded"] += 1
        except Overloaded:
            ended["Overloaded"] += 1
            at_once.append(bench.now == began)
        else:
            ended["answered"] += 1

    await asyncio.gather(*(one(k) for k in range(count)))
    assert all(at_once)
    return ended


@pytest.mark.parametrize("times", [1.2, 2.0, 5.0])
@in_virtual_time
async def test_more_than_the_device_can_do_is_refused_at_once_and_the_rest_is_answered(times: float) -> None:
    work_s = COSTS.step + 400 * COSTS.token + 3 * COSTS.candidate
    async with opened(spare=200, step_ms=work_s * 1e3) as bench:
        ended = await offered(
            bench, times, work_s, lambda k: bench.rank(f"u{k}", numbered(400, salt=k), within=10 * work_s)
        )
    assert ended["answered"] >= 0.9 * 0.5 / work_s, ended
    assert ended["DeadlineExceeded"] <= 0.05 * ended["answered"], ended


@pytest.mark.parametrize("times", [1.2, 3.0])
@in_virtual_time
async def test_scores_beyond_what_the_device_can_do_are_refused_too(times: float) -> None:
    many = 1000
    work_s = COSTS.step + many * COSTS.candidate
    async with opened(spare=20, step_ms=work_s * 1e3) as bench:
        await bench.rank("u", numbered(200))
        ended = await offered(
            bench, times, work_s, lambda _: bench.rank("u", numbered(200), candidates=many, within=10 * work_s)
        )
    assert ended["answered"] >= 0.9 * 0.5 / work_s, ended
    assert ended["DeadlineExceeded"] <= 0.05 * ended["answered"], ended


@in_virtual_time
async def test_behind_a_single_other_a_rank_is_tried_however_unlikely_it_is_to_be_in_time() -> None:
    async with opened(spare=20, step_ms=100.0) as bench:
        needs = COSTS.step + 400 * COSTS.token + 3 * COSTS.candidate
        first = asyncio.create_task(bench.rank("u1", numbered(400, salt=1)))
        await asyncio.sleep(0.1 * needs)
        began = bench.now
        with pytest.raises(DeadlineExceeded):
            await bench.rank("u2", numbered(400, salt=2), within=1.5 * needs)
        assert bench.now == pytest.approx(began + 1.5 * needs)
        assert (await first).path is Path.FULL


@in_virtual_time
async def test_what_is_in_flight_counts_for_as_long_as_it_will_still_take() -> None:
    async with opened(spare=20, step_ms=100.0) as bench:
        needs = COSTS.step + 400 * COSTS.token + 3 * COSTS.candidate
        rank, began = asyncio.create_task(bench.rank("u1", numbered(400))), bench.now
        for part in (0.01, 0.25, 0.5, 0.9):
            await asyncio.sleep(began + part * needs - bench.now)
            assert bench.engine.status().wait_ms == pytest.approx((1 - part) * needs * 1e3, rel=0.02)
        await rank
        assert bench.engine.status().wait_ms == 0.0


@in_virtual_time
async def test_ranks_without_a_deadline_crowd_nobody_out() -> None:
    """They wait among the appends, whatever their turn is there."""
    many = 1000
    work_s = COSTS.step + many * COSTS.candidate
    async with opened(spare=20, step_ms=work_s * 1e3) as bench:
        await bench.rank("u", numbered(200))
        crowd = [asyncio.create_task(bench.rank("u", numbered(200), candidates=many)) for _ in range(1500)]
        for _ in range(20):
            await asyncio.sleep(0.07)
            assert (await bench.rank("u", numbered(200), candidates=many, within=10 * work_s)).path is Path.RESIDENT
        await asyncio.gather(*crowd)


@in_virtual_time
async def test_a_rank_whose_prefix_is_nearly_there_is_not_crowded_out_by_what_comes_behind_it() -> None:
    work_s = COSTS.step + 400 * COSTS.token
    async with opened(spare=200, step_ms=work_s * 1e3) as bench:
        signalled = asyncio.create_task(bench.pre_infer("u", numbered(400), within=2 * work_s))
        await asyncio.sleep(0.1 * work_s)
        crowd = [
            asyncio.create_task(bench.rank(f"u{k}", numbered(400, salt=k), within=3.08 * work_s)) for k in range(1, 3)
        ]
        await asyncio.sleep(0.1 * work_s)
        began = bench.now
        assert (await bench.rank("u", numbered(400), within=2.99 * work_s)).path in (Path.WAITED, Path.RESIDENT)
        assert bench.now - began < 2 * work_s
        await asyncio.gather(signalled, *crowd)


@in_virtual_time
async def test_a_reload_is_not_crowded_out_by_what_others_compute() -> None:
    """The device has no part in it, and it is nearly done."""
    costs = replace(COSTS, token=60e-6, page=2e-3)
    copy_s = costs.copy + 3 * costs.page
    async with opened(spare=200, host=200, step_ms=1.0, device=WatchedDevice(costs)) as bench:
        for _ in range(2):
            await bench.rank("u", numbered(384))
        await bench.settle()
        bench.engine._open_loop().tier.drop("u")
        first = asyncio.create_task(bench.rank("u", numbered(384)))
        await asyncio.sleep(0.8 * copy_s)
        crowd = [
            asyncio.create_task(bench.rank(f"u{k}", numbered(25, salt=k), within=0.65 * copy_s)) for k in range(1, 3)
        ]
        await asyncio.sleep(1e-5)
        assert (await bench.rank("u", numbered(384), within=0.7 * copy_s)).path is Path.WAITED
        assert (await first).path is Path.RELOADED
        await asyncio.gather(*crowd)


@in_virtual_time
async def test_of_too_many_ranks_on_one_prefix_some_are_refused_and_the_others_in_time() -> None:
    many = 1000
    score_s = COSTS.step + many * COSTS.candidate
    async with opened(spare=20, step_ms=score_s * 1e3) as bench:
        before = bench.state()
        calls = [bench.rank("u", numbered(200), candidates=many, within=20 * score_s) for _ in range(60)]
        ended = Counter(type(end).__name__ for end in await asyncio.gather(*calls, return_exceptions=True))
        assert ended["Ranked"] >= 12, ended
        assert ended["DeadlineExceeded"] <= 2, ended
        await bench.engine.evict("u")
        await bench.settle()
        assert bench.state() == before


@in_virtual_time
async def test_a_step_that_the_device_refuses_takes_nothing_from_what_is_in_flight() -> None:
    faulty = FaultyExecutor(WatchedDevice(), Faults(refuse=1.0), 0)
    faulty.active = False
    loop, cost = asyncio.get_running_loop(), CostModel()
    assert isinstance(loop, VirtualTimeLoop)
    device = Device(faulty, cost, VirtualClock(loop), lambda: None)
    future: asyncio.Future[StepResult] = loop.create_future()
    faulty.launch = lambda step: future  # type: ignore[method-assign]
    step = Step(Served(SimulatedModel(), "v", 0), [], [])
    device.launch(step, 1.0, (1.0,), lambda result, error: None)
    await asyncio.sleep(0.25)
    del faulty.launch
    faulty.active = True
    device.launch(step, 0.5, (1.0,), lambda result, error: None)
    assert device.left_s == pytest.approx(1.25)
    await asyncio.sleep(0.25)
    assert device.left_s == pytest.approx(0.5)
    future.set_result(StepResult([], 0.5))
    await device.drained()
    assert device.left_s == 0.0
