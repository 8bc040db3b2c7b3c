"""A failing device becomes a miss and an answer; a cancelled call leaves nothing behind."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from behaviours import numbered
from engines import Bench, DeviceLost, WatchedDevice, corrected, in_virtual_time, opened
from relaygr import Path, PreInferOutcome
from relaygr.cache import Pages
from relaygr.engine.step import Direction, PageCopy, Step, StepResult
from relaygr.errors import DeadlineExceeded, Unavailable

Fails = Callable[[Step | PageCopy], bool]


def first(count: int, matches: Fails) -> Fails:
    """The first so many that match fail."""
    left = [None] * count

    def fails(work: Step | PageCopy) -> bool:
        return matches(work) and bool(left) and left.pop() is None

    return fails


def appending(work: Step | PageCopy) -> bool:
    return isinstance(work, Step) and bool(work.appends)


def scoring(work: Step | PageCopy) -> bool:
    return isinstance(work, Step) and bool(work.scores)


def reloading(work: Step | PageCopy) -> bool:
    return isinstance(work, PageCopy) and work.direction is Direction.IN


def writing(work: Step | PageCopy) -> bool:
    return isinstance(work, PageCopy) and work.direction is Direction.OUT


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("step_ms", [1.0, 10.0])
@pytest.mark.parametrize("count", [1, 3])
@in_virtual_time
async def test_a_failing_compute_is_done_again(count: int, step_ms: float, depth: int) -> None:
    async with opened(device=WatchedDevice(depth=depth), step_ms=step_ms) as bench:
        bench.device.fails = first(count, appending)
        ranked = await asyncio.gather(*(bench.rank("u1", numbered(300)) for _ in range(3)))
        assert sorted(answer.path for answer in ranked) == [Path.FULL, Path.WAITED, Path.WAITED]
        assert bench.engine.status().faults == {"step": count}
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT


@in_virtual_time
async def test_a_failing_extension_leaves_its_base_unharmed() -> None:
    async with opened() as bench:
        await bench.rank("u1", numbered(300))
        bench.device.fails = first(1, appending)
        assert (await bench.rank("u1", numbered(350))).path is Path.EXTENDED
        assert bench.device.appended == 300 + 50 + 50
        bench.device.fails = lambda work: True
        with pytest.raises(Unavailable):
            await bench.rank("u1", numbered(370))
        bench.device.fails = lambda work: False
        assert (await bench.rank("u1", numbered(350))).path is Path.RESIDENT


@in_virtual_time
async def test_a_failing_score_is_done_again_on_what_is_resident() -> None:
    async with opened() as bench:
        await bench.pre_infer("u1", numbered(300))
        bench.device.fails = first(1, scoring)
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT
        assert bench.device.appended == 300


@in_virtual_time
async def test_a_failing_pre_infer_says_so_and_its_rank_computes() -> None:
    async with opened() as bench:
        before = bench.state()
        bench.device.fails = first(1, appending)
        assert await bench.pre_infer("u1", numbered(300)) is PreInferOutcome.FAILED
        assert bench.state() == before
        assert (await bench.rank("u1", numbered(300))).path is Path.FULL


@in_virtual_time
async def test_a_rank_survives_the_pre_infer_it_waited_for() -> None:
    async with opened(step_ms=1.0) as bench:
        bench.device.fails = first(1, lambda work: appending(work) and len(bench.device.launched) == 2)
        pre_infer = asyncio.create_task(bench.pre_infer("u1", numbered(300)))
        await asyncio.sleep(1e-3)
        ranked = await asyncio.gather(bench.rank("u1", numbered(300)), bench.rank("u1", numbered(310)))
        assert [answer.path for answer in ranked] == [Path.FULL, Path.EXTENDED]
        assert await pre_infer is PreInferOutcome.FAILED


@pytest.mark.parametrize("length", [300, 310])
@in_virtual_time
async def test_a_failing_reload_becomes_a_computation(length: int) -> None:
    async with opened(host=20) as bench:
        await bench.rank("u1", numbered(300))
        await bench.push_out("u1")
        bench.device.fails = first(1, reloading)
        ranked = await bench.rank("u1", numbered(length))
        assert (ranked.path, bench.device.appended, bench.device.reloads) == (Path.FULL, length, 1)
        assert bench.engine.status().faults == {"copy IN": 1}


@in_virtual_time
async def test_a_failing_write_keeps_nothing_and_hurts_nobody() -> None:
    async with opened(host=20) as bench:
        bench.device.fails = first(1, writing)
        await bench.rank("u1", numbered(300))
        await bench.settle()
        status = bench.engine.status()
        assert (status.host_prefixes, status.host_pages_free, status.faults) == (0, 20, {"copy OUT": 1})
        await bench.push_out("u1")
        assert (await bench.rank("u1", numbered(300))).path is Path.FULL


@in_virtual_time
async def test_a_failing_write_leaves_the_older_copy_as_it_was() -> None:
    async with opened(host=20) as bench:
        await bench.rank("u1", numbered(300))
        await bench.settle()
        bench.device.fails = first(1, writing)
        await bench.rank("u1", numbered(400))
        await bench.push_out("u1")
        ranked = await bench.rank("u1", numbered(400))
        assert (ranked.path, bench.device.appended) == (Path.EXTENDED, 100)


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("within", [None, 10.0])
@in_virtual_time
async def test_a_device_that_always_fails_makes_the_engine_unavailable(within: float | None, refuses: bool) -> None:
    async with opened() as bench:
        before = bench.state()

        def fails(work: Step | PageCopy) -> bool:
            if refuses:
                raise OSError("the device is gone")
            return True

        bench.device.fails = fails
        with pytest.raises(Unavailable, match="failed"):
            await bench.rank("u1", numbered(300), within=within)
        assert bench.now < 5.0
        assert bench.state() == before
        bench.device.fails = lambda work: False
        assert (await bench.rank("u1", numbered(300))).path is Path.FULL


@in_virtual_time
async def test_a_step_that_is_refused_frees_nothing_that_the_one_before_it_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = np.arange(3)
    async with opened(spare=20, step_ms=1.0, device=WatchedDevice(depth=2)) as bench:
        await bench.rank("u1", numbered(300), context=context)
        await bench.settle()
        loop, take = bench.engine._open_loop(), bench.device.launch
        copied: list[int] = []
        freed: list[int] = []

        def launch(step: Step) -> "asyncio.Future[StepResult]":
            if copied:
                raise DeviceLost("not taken")
            copied.extend(source for source, _ in step.page_copies)
            return take(step)

        def ended(pages: Pages) -> None:
            freed.extend(pages.tolist())
            end(pages)

        end = loop.tier.pool._end
        monkeypatch.setattr(loop.tier.pool, "_end", ended)
        monkeypatch.setattr(bench.device, "launch", launch)
        # A page agrees; the one behind it, of which three tokens do, is copied.
        rank = asyncio.create_task(bench.rank("u1", corrected(numbered(400), at=200), context=context))
        while not list(loop.builds):  # noqa: ASYNC110
            await asyncio.sleep(0)
        loop.tier.drop("u1")  # as when others need room
        while not loop.device.faults["step"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert copied
        assert loop.device.steps, "the step that copies is in flight"
        assert not set(copied) & set(freed)
        copied.clear()
        monkeypatch.setattr(bench.device, "launch", take)
        await rank


@in_virtual_time
async def test_a_device_that_fails_slowly_ends_the_call_at_its_deadline() -> None:
    async with opened() as bench:
        bench.device.fails = lambda work: True
        bench.device.hangs_s = lambda work: 0.3
        began = bench.now
        with pytest.raises(DeadlineExceeded):
            await bench.rank("u1", numbered(300), within=0.5)
        assert bench.now == pytest.approx(began + 0.5)


@in_virtual_time
async def test_a_device_that_hangs_ends_the_call_at_its_deadline_and_later_calls_recover() -> None:
    async with opened() as bench:
        before = bench.state()
        bench.device.hangs_s = lambda work: 5.0
        began = bench.now
        with pytest.raises(DeadlineExceeded):
            await bench.rank("u1", numbered(300), within=0.1)
        assert bench.now == pytest.approx(began + 0.1)
        bench.device.hangs_s = lambda work: 0.0
        assert await bench.pre_infer("u2", numbered(300), within=0.1) is PreInferOutcome.FAILED
        assert bench.now == pytest.approx(began + 0.2)
        assert (await bench.rank("u1", numbered(300))).path is Path.WAITED, "on the step that hung"
        await bench.engine.evict("u1")
        await bench.engine.evict("u2")
        assert bench.state() == before


@in_virtual_time
async def test_a_reload_that_hangs_ends_the_call_at_its_deadline_and_later_calls_recover() -> None:
    async with opened(host=20) as bench:
        await bench.rank("u1", numbered(300))
        await bench.push_out("u1")
        bench.device.hangs_s = lambda work: 5.0 if reloading(work) else 0.0
        began = bench.now
        with pytest.raises(DeadlineExceeded):
            await bench.rank("u1", numbered(300), within=0.1)
        assert bench.now == pytest.approx(began + 0.1)
        assert (await bench.rank("u2", numbered(300))).path is Path.FULL
        await bench.settle()
        assert (await bench.rank("u1", numbered(310))).path is Path.EXTENDED


@in_virtual_time
async def test_a_write_that_hangs_delays_no_rank() -> None:
    async with opened(host=20, spare=12) as bench:
        bench.device.hangs_s = lambda work: 5.0 if writing(work) else 0.0
        for k in range(20):
            ranked = await bench.rank(f"user {k}", numbered(300, salt=k), within=0.1)
            assert ranked.timings.total < 10.0
        assert bench.device.writes == 1


Scenario = Callable[[Bench], Coroutine[Any, Any, object]]


async def full(bench: Bench) -> object:
    return await bench.rank("u1", numbered(300))


async def extended(bench: Bench) -> object:
    return await bench.rank("u2", numbered(350))


async def reloaded(bench: Bench) -> object:
    return await bench.rank("cat", numbered(300))


async def reloaded_and_extended(bench: Bench) -> object:
    return await bench.rank("cat", numbered(310))


async def computed_ahead(bench: Bench) -> object:
    return await bench.pre_infer("u1", numbered(300))


async def extended_ahead(bench: Bench) -> object:
    return await bench.pre_infer("u2", numbered(350))


async def late(bench: Bench) -> object:
    with contextlib.suppress(DeadlineExceeded):
        return await bench.rank("u1", numbered(300), within=2e-3)
    return None


SCENARIOS = [full, extended, reloaded, reloaded_and_extended, computed_ahead, extended_ahead, late]


@pytest.mark.parametrize("beside", [None, *SCENARIOS])
@pytest.mark.parametrize("scenario", SCENARIOS)
@in_virtual_time
async def test_a_call_cancelled_at_any_time_leaves_nothing_behind(scenario: Scenario, beside: Scenario | None) -> None:
    """Alone, or beside another call that must not be hurt."""
    async with opened(host=30, spare=8, step_ms=1.0, on_miss="truncate", lease_s=0.05) as bench:
        for _ in range(2):
            await bench.rank("cat", numbered(300))
        for after in range(0, 48, 3):
            await bench.push_out("cat")
            await bench.engine.evict("u1")
            await bench.engine.evict("u2")
            await bench.rank("u2", numbered(300))
            other = asyncio.create_task(beside(bench)) if beside else None
            task = asyncio.create_task(scenario(bench))
            await asyncio.sleep(0)
            await asyncio.sleep(after * 1e-4)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if other is not None:
                await other
            await asyncio.sleep(0.06)
            await bench.settle()
            state = bench.state()
            assert (state["leases"], state["ranks_under_way"], state["device_pages_pinned"]) == (0, 0, 0)
            assert (await bench.rank("u1", numbered(300))).used == 300


@in_virtual_time
async def test_nothing_is_logged_as_lost_when_calls_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with opened() as bench:
            tasks = [asyncio.create_task(bench.rank("u1", numbered(300))) for _ in range(3)]
            await asyncio.sleep(1e-4)
        assert all(isinstance(e, Unavailable) for e in await asyncio.gather(*tasks, return_exceptions=True))
    assert not caplog.records
