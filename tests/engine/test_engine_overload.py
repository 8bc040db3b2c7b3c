"""More than the device can do: who is refused, at once, and who is not; what waits is counted as it comes."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from behaviours import numbered
from engines import COSTS, Bench, WatchedDevice, in_virtual_time, opened
from relaygr import Path, PreInferOutcome
from relaygr.clock import VirtualClock, VirtualTimeLoop
from relaygr.engine.cost import CostModel
from relaygr.engine.device import Device
from relaygr.engine.guard import Guard
from relaygr.engine.simulated import SimulatedModel
from relaygr.engine.step import Served, Step, StepResult
from relaygr.errors import DeadlineExceeded, Overloaded


def unexpected(error: Exception) -> None:
    pytest.fail(repr(error))


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
async def test_a_prefix_takes_its_turn_by_the_deadline_of_its_rank_once_that_has_come() -> None:
    """It was due before the others by what its signal said, and has more time than they by what its rank says."""
    work_s = COSTS.step + 400 * COSTS.token
    async with opened(spare=200, step_ms=work_s * 1e3) as bench:
        busy = [asyncio.create_task(bench.rank(f"busy {k}", numbered(400, salt=9 + k))) for k in range(2)]
        await asyncio.sleep(0.1 * work_s)
        signalled = asyncio.create_task(bench.pre_infer("u", numbered(400), within=2 * work_s))
        await asyncio.sleep(0.1 * work_s)
        ended = list[str]()

        async def rank(user: str, salt: int, within: float) -> None:
            await bench.rank(user, numbered(400, salt=salt), within=within * work_s)
            ended.append(user)

        patient = asyncio.create_task(rank("u", 0, 9.0))
        await asyncio.sleep(0.1 * work_s)
        await asyncio.gather(patient, *(rank(f"u{k}", k, 4.6) for k in (1, 2)), *busy, signalled)
        assert ended == ["u1", "u2", "u"]


@pytest.mark.parametrize("first", ["a rank of another request", "a rank of a longer history"])
@in_virtual_time
async def test_a_patient_rank_does_not_postpone_a_prefix_that_another_is_expected_for(first: str) -> None:
    work_s = COSTS.step + 400 * COSTS.token
    longer = numbered(400)
    expected = longer if first == "a rank of another request" else longer[:300]
    async with opened(spare=200, step_ms=work_s * 1e3) as bench:
        busy = [asyncio.create_task(bench.rank(f"busy {k}", numbered(400, salt=9 + k))) for k in range(2)]
        await asyncio.sleep(0.1 * work_s)
        signals = [asyncio.create_task(bench.pre_infer("u", expected, within=3 * work_s)) for _ in range(2)]
        await asyncio.sleep(0.1 * work_s)
        patient = asyncio.create_task(bench.rank("u", longer))
        await asyncio.sleep(0.1 * work_s)
        crowd = [asyncio.create_task(bench.rank(f"u{k}", numbered(400, salt=k), within=4.6 * work_s)) for k in (1, 2)]
        await asyncio.sleep(2.7 * work_s)
        assert (await bench.rank("u", expected, within=work_s)).path in (Path.RESIDENT, Path.WAITED)
        await asyncio.gather(*busy, *signals, patient, *crowd, return_exceptions=True)


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


LONG_S = 10_000 * COSTS.token
"""What a long prefix takes, but for its steps."""


@asynccontextmanager
async def a_long_prefix_in_front(**config: Any) -> AsyncIterator[tuple[Bench, "asyncio.Task[PreInferOutcome]"]]:
    """Of one whose rank has not come, with nearly all of it to run, due in 1.03 times what it takes."""
    async with opened(spare=400, step_ms=4.0, max_history=10_000, **config) as bench:
        long = asyncio.create_task(bench.pre_infer("long", numbered(10_000), within=1.05 * LONG_S))
        await asyncio.sleep(0.02 * LONG_S)
        yield bench, long


@in_virtual_time
async def test_a_prefix_that_takes_much_longer_is_given_up_for_ranks_that_it_would_make_late() -> None:
    async with a_long_prefix_in_front() as (bench, long):
        began = bench.now
        shorts = [bench.rank(f"u{k}", numbered(400, salt=k), within=1.08 * LONG_S) for k in range(1, 3)]
        assert [ranked.path for ranked in await asyncio.gather(*shorts)] == [Path.FULL, Path.FULL]
        assert bench.now - began < 0.2 * LONG_S
        assert await long is PreInferOutcome.NO_CAPACITY
        assert bench.engine.status().leases == 0
        assert (await bench.rank("long", numbered(10_000), within=2 * LONG_S)).path is Path.FULL


@pytest.mark.parametrize("context", [0, 7])
@pytest.mark.parametrize("depth", [1, 2])
@in_virtual_time
async def test_what_has_run_of_a_prefix_that_is_given_up_is_kept(context: int, depth: int) -> None:
    told = np.arange(context, dtype=np.int64) if context else None
    device = WatchedDevice(depth=depth)
    async with opened(spare=400, step_ms=4.0, max_history=10_000, device=device) as bench:
        urgent = [
            asyncio.create_task(bench.pre_infer(f"c{k}", numbered(1_000, salt=k), within=LONG_S)) for k in range(2, 5)
        ]
        long = asyncio.create_task(bench.pre_infer("long", numbered(10_000), context=told, within=1.35 * LONG_S))
        await asyncio.gather(*urgent)
        await asyncio.sleep(0.3 * LONG_S)
        assert (await bench.rank("u", numbered(400, salt=1), within=0.76 * LONG_S)).path is Path.FULL
        assert await long is PreInferOutcome.NO_CAPACITY
        await bench.settle()
        run = device.appended
        assert (await bench.rank("long", numbered(10_000), context=told)).path is Path.EXTENDED
        assert 6_000 < device.appended - run < 7_500


@in_virtual_time
async def test_a_prefix_is_not_given_up_for_a_rank_that_what_is_in_flight_makes_late() -> None:
    """Its deadline has passed, a step of it is in flight, and one more is to come."""
    async with opened(spare=400, step_ms=20.0, max_history=10_000) as bench:
        long = asyncio.create_task(bench.pre_infer("long", numbered(10_000), within=0.1006))
        await bench.rank("c", numbered(4_000, salt=2), within=0.05)
        assert await long is PreInferOutcome.FAILED
        while (left_s := bench.engine._open_loop().device.left_s) < 0.018:  # noqa: ASYNC110  (virtual time)
            await asyncio.sleep(1e-4)
        began = bench.now
        with pytest.raises(Overloaded):
            await bench.rank("u", numbered(400, salt=1), within=left_s + 0.002)
        assert bench.now == began
        await bench.settle()
        assert (await bench.rank("long", numbered(10_000))).path is Path.RESIDENT


@in_virtual_time
async def test_what_is_given_up_is_not_counted_as_work_to_come() -> None:
    async with a_long_prefix_in_front(pre_infer_share=0.99) as (bench, long):
        await bench.rank("u", numbered(400, salt=1), within=1.08 * LONG_S)
        assert await long is PreInferOutcome.NO_CAPACITY
        assert await bench.pre_infer("next", numbered(400, salt=2), within=0.1 * LONG_S) is PreInferOutcome.COMPUTED


@in_virtual_time
async def test_a_prefix_is_not_given_up_where_there_is_time_for_it() -> None:
    async with a_long_prefix_in_front() as (bench, long):
        assert (await bench.rank("u", numbered(400, salt=1), within=1.3 * LONG_S)).path is Path.FULL
        assert await long is not PreInferOutcome.NO_CAPACITY
        await bench.settle()
        assert (await bench.rank("long", numbered(10_000))).path is Path.RESIDENT


@in_virtual_time
async def test_a_prefix_is_not_given_up_for_a_rank_that_takes_half_as_long() -> None:
    async with a_long_prefix_in_front() as (bench, long):
        with pytest.raises(Overloaded):
            await bench.rank("u", numbered(6_000, salt=1), within=1.08 * LONG_S)
        assert await long is PreInferOutcome.COMPUTED


@in_virtual_time
async def test_a_prefix_is_not_given_up_when_its_rank_has_come() -> None:
    async with a_long_prefix_in_front() as (bench, long):
        waits = asyncio.create_task(bench.rank("long", numbered(10_000), within=1.06 * LONG_S))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await bench.rank("u", numbered(400, salt=1), within=1.08 * LONG_S)
        assert await long is PreInferOutcome.COMPUTED
        assert (await waits).path is Path.WAITED


@in_virtual_time
async def test_a_prefix_is_not_given_up_where_that_would_not_help() -> None:
    async with a_long_prefix_in_front() as (bench, long):
        crowd = [
            asyncio.create_task(bench.rank(f"c{k}", numbered(400, salt=k), within=1.02 * LONG_S)) for k in range(2, 40)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await bench.rank("u", numbered(2_000, salt=1), within=1.04 * LONG_S)
        assert bench.engine.status().leases == 1
        ended = await asyncio.gather(*crowd, return_exceptions=True)
        assert {type(each).__name__ for each in ended} == {"Ranked", "Overloaded"}
        assert await long is PreInferOutcome.FAILED  # not by its deadline
        await bench.settle()
        assert (await bench.rank("long", numbered(10_000))).path is Path.RESIDENT


@in_virtual_time
async def test_a_step_that_the_device_refuses_takes_nothing_from_what_is_in_flight() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    running: asyncio.Future[StepResult] = loop.create_future()
    taken = [running]

    def launch(step: Step) -> "asyncio.Future[StepResult]":
        return taken.pop()  # the second finds none

    executor: Any = SimpleNamespace(launch=launch, depth=2)
    device = Device(executor, CostModel(), VirtualClock(loop), lambda: None, Guard(unexpected))
    step = Step(Served(SimulatedModel(), "v", 0), [], [])
    device.launch(step, 1.0, (1.0,), lambda result, error: None)
    await asyncio.sleep(0.25)
    device.launch(step, 0.5, (1.0,), lambda result, error: None)
    await asyncio.sleep(0.25)
    assert device.faults == {"step": 1}
    assert device.left_s == pytest.approx(0.5)
    running.set_result(StepResult([], 0.5))
    await device.drained()
    assert device.left_s == 0.0


@in_virtual_time
async def test_a_step_is_launched_shortly_before_those_in_flight_end() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    flights: list[asyncio.Future[StepResult]] = [loop.create_future() for _ in range(3)]
    taken = iter(flights)
    executor: Any = SimpleNamespace(launch=lambda step: next(taken), depth=2)
    device = Device(executor, CostModel(), VirtualClock(loop), lambda: None, Guard(unexpected))
    step = Step(Served(SimulatedModel(), "v", 0), [], [])
    assert device.wanted_in_s == 0.0
    device.launch(step, 0.1, (1.0,), lambda result, error: None)
    early_s = device.wanted_in_s
    assert 0.08 < early_s < 0.1
    await asyncio.sleep(early_s)
    assert device.wanted_in_s == 0.0
    device.launch(step, 1e-3, (1.0,), lambda result, error: None)
    assert device.wanted_in_s == math.inf
    flights[0].set_result(StepResult([], 0.1))
    await asyncio.sleep(0)
    assert device.wanted_in_s == 0.0, "a short one is not waited for"
    device.launch(step, 1e-3, (1.0,), lambda result, error: None)
    for flight in flights[1:]:
        flight.set_result(StepResult([], 1e-3))
    await device.drained()


@in_virtual_time
async def test_where_launching_takes_long_the_next_step_is_launched_so_much_earlier() -> None:
    loop = asyncio.get_running_loop()
    flights: list[asyncio.Future[StepResult]] = []
    now, launching_s = 0.0, 0.02

    def launch(step: Step) -> "asyncio.Future[StepResult]":
        nonlocal now
        now += launching_s
        flights.append(loop.create_future())
        return flights[-1]

    executor: Any = SimpleNamespace(launch=launch, depth=2)
    clock: Any = SimpleNamespace(now=lambda: now)
    device = Device(executor, CostModel(), clock, lambda: None, Guard(unexpected))
    step = Step(Served(SimulatedModel(), "v", 0), [], [])

    async def early_s() -> float:
        """How early a second step is wanted, once the first has been launched."""
        device.launch(step, 0.2, CostModel.features([], []), lambda result, error: None)
        left_s, wanted_in_s = device.left_s, device.wanted_in_s
        flights[-1].set_result(StepResult([], 0.2))
        await device.drained()
        return left_s - wanted_in_s

    slow = await early_s()
    assert slow > 0.04
    launching_s = 0.0
    faster = [await early_s() for _ in range(200)]
    assert faster == sorted(faster, reverse=True), "a long one is forgotten, but not at once"
    assert slow - 0.01 < faster[0] < slow
    assert faster[-1] < slow - 0.035
