"""A prefix that has lost its head is of use: the head is computed again, and what is behind it is not."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from behaviours import numbered
from engines import COSTS, Bench, WatchedDevice, corrected, in_virtual_time, opened
from relaygr import Path, PreInferOutcome
from relaygr.cache import Prefix
from relaygr.engine.simulated import SimulatedModel
from relaygr.engine.step import Direction, PageCopy, Step
from relaygr.errors import HistoryNeeded
from relaygr.history import PAGE, KnownHistory


def on_device(bench: Bench, user: str = "u1") -> Prefix:
    assert bench.engine._loop is not None
    prefix = bench.engine._loop.tier.find(user)
    assert prefix is not None
    return prefix


def on_host(bench: Bench, user: str = "u1") -> Prefix:
    assert bench.engine._loop is not None
    prefix = bench.engine._loop.host.find(user)
    assert prefix is not None
    return prefix


async def shorten(bench: Bench, *, device: int = 0, host: int = 0, user: str = "u1") -> None:
    """The first pages of what each tier has of the user go."""
    assert bench.engine._loop is not None
    await bench.settle()
    if device:
        bench.engine._loop.tier._shorten(on_device(bench, user), device)
    if host:
        bench.engine._loop.host._shorten(on_host(bench, user), host)
    bench.device.forget()


@in_virtual_time
async def test_of_the_same_history_the_head_alone_is_computed_and_scored_in_the_same_step() -> None:
    async with opened(spare=20) as bench:
        await bench.rank("u1", numbered(300))
        await shorten(bench, device=1)
        assert bench.engine.status().device_shortened == 1
        assert (await bench.rank("u1", numbered(300))).path is Path.EXTENDED
        assert [(row.low, row.high) for step in bench.device.launched for row in step.appends] == [(0, PAGE)]
        assert len(bench.device.launched) == 1
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT
        assert bench.device.appended == PAGE


@in_virtual_time
async def test_the_head_is_computed_and_then_what_is_new() -> None:
    async with opened(spare=20) as bench:
        await bench.rank("u1", numbered(300))
        await shorten(bench, device=2)
        assert (await bench.rank("u1", numbered(310))).path is Path.EXTENDED
        (step,) = bench.device.launched
        assert [(row.low, row.high) for row in step.appends] == [(0, 2 * PAGE), (300, 310)]
        assert len(step.scores) == 1
        assert bench.device.page_copies == 0
        assert on_device(bench).missing == 0


@in_virtual_time
async def test_what_is_new_and_takes_long_comes_in_steps_behind_the_head() -> None:
    async with opened(spare=40, max_history=2000, step_ms=2.0) as bench:
        await bench.rank("u1", numbered(300))
        await shorten(bench, device=2)
        assert (await bench.rank("u1", numbered(1500))).path is Path.EXTENDED
        rows = [[(row.low, row.high) for row in step.appends] for step in bench.device.launched]
        assert rows[0] == [(0, PAGE)]
        assert rows[1] == [(PAGE, 2 * PAGE)]
        assert rows[2][0][0] == 300
        assert bench.device.appended == 2 * PAGE + 1200


@pytest.mark.parametrize("context", [0, 3, 20])
@in_virtual_time
async def test_a_context_is_of_the_head(context: int) -> None:
    async with opened(spare=20) as bench:
        ids = np.arange(context)
        await bench.rank("u1", numbered(300), context=ids)
        await shorten(bench, device=1)
        assert (await bench.rank("u1", numbered(301), context=ids)).path is Path.EXTENDED
        assert bench.device.appended == PAGE + 1
        await shorten(bench, device=1)
        again = await bench.rank("u1", numbered(301), context=ids + 1)
        assert again.path is (Path.FULL if context else Path.EXTENDED)


@in_virtual_time
async def test_of_a_history_that_agrees_in_part_what_agrees_behind_the_head_is_used() -> None:
    async with opened(spare=20) as bench:
        for history, appended in (
            (numbered(290), PAGE + 34),  # two pages agree, and the first of them is missing
            (corrected(numbered(300), at=270), PAGE + 44),
            (corrected(numbered(300), at=200), 300),  # only what is missing agrees
            (corrected(numbered(300), at=5), 300),
        ):
            await bench.engine.evict("u1")
            await bench.rank("u1", numbered(300))
            await shorten(bench, device=1)
            assert (await bench.rank("u1", history)).path is (Path.FULL if appended == 300 else Path.EXTENDED)
            assert bench.device.appended == appended


@in_virtual_time
async def test_what_someone_has_appended_behind_is_copied_first() -> None:
    async with opened(spare=20) as bench:
        await bench.rank("u1", numbered(300))
        reader = asyncio.ensure_future(bench.rank("u1", numbered(300), candidates=100_000))
        await asyncio.sleep(1e-3)
        await bench.rank("u1", numbered(310))
        await reader
        await shorten(bench, device=1)
        assert (await bench.rank("u1", numbered(320))).path is Path.EXTENDED
        assert bench.device.appended == PAGE + 10


@in_virtual_time
async def test_a_head_that_was_computed_again_is_not_written_over_either() -> None:
    context = np.arange(3)
    async with opened(spare=20) as bench:
        await bench.rank("u1", numbered(300), context=context)
        await shorten(bench, device=2)
        await bench.rank("u1", numbered(300), context=context)
        bench.device.forget()
        other = corrected(numbered(300), at=200)  # one page agrees: it ends where the next page has three tokens
        ranked = await asyncio.gather(
            bench.rank("u1", other, context=context), bench.rank("u1", numbered(300), candidates=100, context=context)
        )
        assert [answer.path for answer in ranked] == [Path.EXTENDED, Path.RESIDENT]
        assert bench.device.page_copies == 1


@in_virtual_time
async def test_where_nothing_is_appended_no_page_is_copied() -> None:
    context = np.arange(3)
    async with opened(spare=20) as bench:
        await bench.rank("u1", numbered(300), context=context)
        await shorten(bench, device=1)
        assert (await bench.rank("u1", numbered(256), context=context)).path is Path.EXTENDED
        assert bench.device.page_copies == 0
        assert bench.device.appended == PAGE


@pytest.mark.parametrize("new", [0, 10])
@in_virtual_time
async def test_from_host_memory_what_is_left_is_copied_and_the_head_computed(new: int) -> None:
    async with opened(spare=2, host=20) as bench:
        await bench.rank("u1", numbered(300))
        await bench.push_out("u1")
        await shorten(bench, host=1)
        assert (await bench.rank("u1", numbered(300 + new))).path is Path.EXTENDED
        (reload,) = (copy for copy in bench.device.copies if copy.direction is Direction.IN)
        assert len(reload.source) == 2
        assert reload.nearly_at == 1.0  # nothing can be scored when it is there
        assert bench.device.appended == PAGE + new


@in_virtual_time
async def test_a_whole_copy_in_host_memory_is_brought_back_rather_than_a_head_computed() -> None:
    async with opened(spare=20, host=20) as bench:
        await bench.rank("u1", numbered(300))
        await shorten(bench, device=1)
        assert (await bench.rank("u1", numbered(300))).path is Path.RELOADED
        assert bench.device.appended == 0


@in_virtual_time
async def test_those_who_want_the_same_wait_for_one_head() -> None:
    async with opened(spare=20) as bench:
        await bench.rank("u1", numbered(300))
        await shorten(bench, device=2)
        ranked = await asyncio.gather(*(bench.rank("u1", numbered(300)) for _ in range(3)))
        assert [answer.path for answer in ranked] == [Path.EXTENDED, Path.WAITED, Path.WAITED]
        assert bench.device.appended == 2 * PAGE


@in_virtual_time
async def test_a_pre_infer_computes_the_head_ahead() -> None:
    async with opened(spare=20) as bench:
        await bench.rank("u1", numbered(300))
        await shorten(bench, device=2)
        assert await bench.pre_infer("u1", numbered(300)) is PreInferOutcome.EXTENDED
        assert bench.device.appended == 2 * PAGE
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT


@in_virtual_time
async def test_a_digest_alone_does_not_give_a_head_back() -> None:
    async with opened(spare=20) as bench:
        history = numbered(300)
        await bench.rank("u1", history)
        await shorten(bench, device=1)
        with pytest.raises(HistoryNeeded):
            await bench.engine.rank("u1", KnownHistory(history.start, len(history), history.digest()), np.arange(3))


@in_virtual_time
async def test_a_head_is_not_computed_by_newer_tables_than_what_is_behind_it() -> None:
    async with opened(spare=20, accept_epochs=1, model=SimulatedModel("m", epoch=0)) as bench:
        await bench.rank("u1", numbered(300))
        await bench.swap(SimulatedModel("m", epoch=1))
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT
        await shorten(bench, device=1)
        ranked = await bench.rank("u1", numbered(300))
        assert (ranked.path, ranked.epoch) == (Path.FULL, 1)


@pytest.mark.parametrize("lost", ["first step", "second step", "copy"])
@in_virtual_time
async def test_a_head_that_fails_is_a_miss(lost: str) -> None:
    async with opened(spare=6, host=20, step_ms=0.5) as bench:
        await bench.rank("u1", numbered(300))
        if lost == "copy":
            await bench.push_out("u1")
            await shorten(bench, host=2)
        else:
            await shorten(bench, device=2, host=2)
        failed: list[bool] = []

        def fails(work: Step | PageCopy) -> bool:
            if lost == "copy":
                hit = isinstance(work, PageCopy) and work.direction is Direction.IN
            else:
                count = sum(bool(step.appends) for step in bench.device.launched)
                hit = isinstance(work, Step) and count == (1 if lost == "first step" else 2)
            failed.append(hit and not any(failed))
            return failed[-1]

        bench.device.fails = fails
        await bench.rank("u1", numbered(310))  # whose scores are checked
        assert any(failed)
        await bench.settle()
        assert bench.engine.status().device_pages_pinned == 0


@in_virtual_time
async def test_a_step_that_fails_with_a_head_and_what_is_new_lets_go_of_its_pages_before_others_are_told() -> None:
    """Five pages are kept for a rank and four may be leased: the longer prefix takes all of these."""
    async with opened(spare=5, lease_s=5.0) as bench:
        await bench.rank("u1", numbered(300))
        await shorten(bench, device=1)
        fails = iter([True])
        bench.device.fails = lambda work: isinstance(work, Step) and len(work.appends) == 2 and next(fails, False)
        first = asyncio.create_task(bench.pre_infer("u1", numbered(310)))
        await asyncio.sleep(1e-5)
        then = asyncio.create_task(bench.pre_infer("u1", numbered(395)))
        assert await first is PreInferOutcome.FAILED
        assert await then is PreInferOutcome.EXTENDED


@in_virtual_time
async def test_what_has_lost_its_head_before_its_turn_is_written_as_it_is() -> None:
    async with opened(spare=12, host=20) as bench:
        bench.device.hangs_s = lambda work: 0.05 if isinstance(work, PageCopy) else 0.0
        await bench.rank("first", numbered(100))
        await bench.rank("u1", numbered(300))
        assert bench.engine._loop is not None
        bench.engine._loop.tier._shorten(on_device(bench), 1)
        await bench.settle()
        assert (on_host(bench).missing, len(on_host(bench).pages)) == (1, 2)
        bench.device.hangs_s = lambda work: 0.0
        await bench.push_out("u1")
        assert (await bench.rank("u1", numbered(300))).path is Path.EXTENDED
        assert bench.device.appended == PAGE


@pytest.mark.parametrize(
    ("room", "host", "device", "missing", "written"),
    [
        (7, 1, 0, 1, 3),  # of 640 tokens, 2 whole pages are as the host has them
        (7, 0, 1, 0, 3),
        (7, 2, 1, 1, 4),  # the host has nothing that is of use
        (7, 0, 3, 3, 2),  # there is a page between them that nobody has
        (40, 1, 0, 0, 5),  # there is room for the head again
    ],
)
@in_virtual_time
async def test_what_host_memory_has_of_it_is_not_written_again(
    room: int, host: int, device: int, missing: int, written: int
) -> None:
    async with opened(spare=20, host=room, max_history=700) as bench:
        await bench.rank("u1", numbered(300))
        await shorten(bench, host=host)
        bench.device.hangs_s = lambda work: 0.05 if isinstance(work, PageCopy) and len(work.source) == 1 else 0.0
        await bench.rank("first", numbered(100))  # whose copy the next one waits for
        bench.device.forget()
        await bench.rank("u1", numbered(640))
        assert bench.engine._loop is not None
        if device:
            bench.engine._loop.tier._shorten(on_device(bench), device)
        await bench.settle()
        assert on_host(bench).missing == missing
        assert [len(copy.source) for copy in bench.device.copies] == [written]
        bench.device.hangs_s = lambda work: 0.0
        bench.engine._loop.tier.drop("u1")
        bench.device.forget()
        assert (await bench.rank("u1", numbered(640))).path is (Path.EXTENDED if missing else Path.RELOADED)
        assert bench.device.appended == missing * PAGE


@pytest.mark.parametrize(("chunks", "left"), [(1, 2), (2, 0)])
@in_virtual_time
async def test_what_has_run_of_a_head_that_is_given_up_is_kept_once_it_is_whole(chunks: int, left: int) -> None:
    async with opened(spare=20, step_ms=0.5) as bench:  # a page in each step
        await bench.rank("u1", numbered(300))
        await shorten(bench, device=2)
        call = asyncio.ensure_future(bench.pre_infer("u1", numbered(400)))
        loop = bench.engine._loop
        assert loop is not None
        while len(bench.device.launched) <= chunks:  # noqa: ASYNC110
            await asyncio.sleep(1e-4)
        (build,) = loop.builds
        loop._give_up_build(build, True)
        assert await call is PreInferOutcome.NO_CAPACITY
        await bench.settle()
        assert on_device(bench).missing == left
        bench.device.forget()
        await bench.rank("u1", numbered(300))
        assert bench.device.appended == left * PAGE


@pytest.mark.parametrize(("length", "missing"), [(256, 0), (128, 0), (0, 1)])
@in_virtual_time
async def test_a_longer_one_gets_its_head_back_from_a_shorter_history(length: int, missing: int) -> None:
    async with opened(spare=20, host=20) as bench:
        await bench.rank("u1", numbered(300))
        await shorten(bench, device=1, host=1)
        await bench.rank("u1", numbered(length))
        assert (on_device(bench).length, on_device(bench).missing) == (300, missing)
        await bench.settle()
        assert on_host(bench).length == 300
        bench.device.forget()
        await bench.rank("u1", numbered(300))
        assert bench.device.appended == missing * PAGE


@in_virtual_time
async def test_a_history_that_ends_in_the_missing_head_of_a_longer_one_is_cached() -> None:
    async with opened(spare=20) as bench:
        await bench.rank("u1", numbered(300))
        await shorten(bench, device=2)
        assert await bench.pre_infer("u1", numbered(128)) is PreInferOutcome.COMPUTED
        for _ in range(2):
            assert (await bench.rank("u1", numbered(128))).path is Path.RESIDENT
        assert bench.device.appended == PAGE


@in_virtual_time
async def test_what_is_given_up_of_its_own_user_leaves_a_rank_what_it_is_made_from() -> None:
    takes = 10_000 * COSTS.token
    async with opened(spare=400, step_ms=4.0, max_history=10_000) as bench:
        await bench.rank("u1", numbered(4096))
        await shorten(bench, device=1)
        call = asyncio.create_task(bench.pre_infer("u1", corrected(numbered(10_000), at=1000), within=0.9 * takes))
        await asyncio.sleep(0.3 * takes)
        appended = bench.device.appended
        assert (await bench.rank("u1", numbered(4106), within=0.605 * takes)).path is Path.EXTENDED
        assert await call is PreInferOutcome.NO_CAPACITY
        await bench.settle()
        assert bench.device.appended - appended <= PAGE + 10 + 2 * 512  # and what was in flight


@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize(
    ("cached", "ranked", "correction"), [(2048, 2058, 1500), (2048, 2048, 1500), (2000, 2010, 1500)]
)
@in_virtual_time
async def test_a_rank_may_have_a_prefix_of_its_own_user_given_up(
    cached: int, ranked: int, correction: int, short: int
) -> None:
    """What has run of that is kept, in place of what the rank was to be made from."""
    takes = 10_000 * COSTS.token
    async with opened(spare=400, step_ms=4.0, max_history=10_000) as bench:
        await bench.rank("u1", numbered(cached))
        await shorten(bench, device=short)
        call = asyncio.create_task(
            bench.pre_infer("u1", corrected(numbered(10_000), at=correction), within=0.9 * takes)
        )
        await asyncio.sleep(0.06 * takes)
        await bench.rank("u1", numbered(ranked), within=0.845 * takes)  # whose scores are checked
        if ranked > cached or short:
            assert await call is PreInferOutcome.NO_CAPACITY
        call.cancel()


@in_virtual_time
async def test_a_rank_waits_for_no_more_pages_than_are_copied() -> None:
    """Two pages of eight: 4.1 ms, and 7.7 for the head, beside 2.6 of others."""
    async with opened(
        spare=200, host=200, max_history=2000, step_ms=1.0, device=WatchedDevice(replace(COSTS, page=2e-3))
    ) as bench:
        assert bench.engine._loop is not None
        for _ in range(2):
            await bench.rank("u1", numbered(1024))
        await bench.settle()
        for tenths in range(180, 280, 10):
            await shorten(bench, host=6 - on_host(bench).missing)
            bench.engine._loop.tier.drop("u1")
            others = [bench.rank(f"{tenths}-{k}", numbered(256, salt=k), within=0.012) for k in (1, 2)]
            crowd = [asyncio.create_task(other) for other in others]
            await asyncio.sleep(1e-5)
            assert (await bench.rank("u1", numbered(1024), within=tenths * 1e-4)).path is Path.EXTENDED
            await asyncio.gather(*crowd)
            await bench.settle()


@in_virtual_time
async def test_no_head_goes_where_older_tables_are_accepted() -> None:
    async with opened(spare=8, max_history=1000, accept_epochs=1) as bench:
        assert bench.engine._loop is not None
        bench.engine._loop.tier.worth = lambda held: held.head
        bench.engine._loop.cost.steps.coefficients = (1e-4, 1e-5, 0.0, 0.0, 0.0)
        for user in range(6):
            await bench.rank(f"u{user}", numbered(1000, salt=user))
        assert bench.engine.status().device_shortened == 0
        assert bench.engine.status().device_evictions > 0


@pytest.mark.parametrize("reuse", ["whole", "extend"])
@in_virtual_time
async def test_heads_go_when_room_is_needed_where_prefixes_are_extended(reuse: str) -> None:
    async with opened(spare=8, max_history=1000, reuse=reuse, device=WatchedDevice()) as bench:
        assert bench.engine._loop is not None
        bench.engine._loop.tier.worth = lambda held: held.head
        bench.engine._loop.cost.steps.coefficients = (1e-4, 1e-5, 0.0, 0.0, 0.0)
        for user in range(6):
            await bench.rank(f"u{user}", numbered(1000, salt=user))
        status = bench.engine.status()
        assert (status.device_shortened > 0) is (reuse == "extend")
        for user in range(6):
            await bench.rank(f"u{user}", numbered(1000, salt=user))


@in_virtual_time
async def test_prefixes_that_are_computed_quickly_go_whole() -> None:
    async with opened(spare=8, max_history=1000) as bench:
        assert bench.engine._loop is not None
        bench.engine._loop.tier.worth = lambda held: held.head
        for user in range(12):  # of 1.3 ms each
            await bench.rank(f"u{user}", numbered(130, salt=user))
        status = bench.engine.status()
        assert status.device_evictions > 0
        assert status.device_shortened == 0
