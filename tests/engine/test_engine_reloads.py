"""A rank is launched behind the copy that brings its prefix, before that has ended; what fails then is a miss."""

import asyncio

import pytest

from behaviours import numbered
from engines import COSTS, Bench, in_virtual_time, opened
from relaygr import Path, PreInferOutcome
from relaygr.engine.step import Direction, PageCopy, Step

PAGES = 3
COPY_S = COSTS.copy + PAGES * COSTS.page


async def _reloadable(bench: Bench) -> None:
    """User u1 has 300 behaviours in host memory, and none on the device."""
    await bench.rank("u1", numbered(300))
    await bench.push_out("u1")
    bench.device.forget()


def _behind(bench: Bench) -> list[Step]:
    return [step for step in bench.device.launched if step.reloads]


@in_virtual_time
async def test_a_rank_is_launched_before_its_reload_has_ended() -> None:
    async with opened(spare=2, host=20) as bench:
        await _reloadable(bench)
        began = bench.now
        rank = asyncio.create_task(bench.rank("u1", numbered(300), candidates=50))
        await asyncio.sleep(COPY_S * 0.99)
        (step,) = _behind(bench)
        assert list(step.reloads) == bench.device.copies
        ranked = await rank
        assert ranked.path is Path.RELOADED
        assert bench.now - began >= COPY_S


@in_virtual_time
async def test_ranks_that_join_a_reload_are_launched_with_the_first() -> None:
    async with opened(spare=2, host=20) as bench:
        await _reloadable(bench)
        ranks = [asyncio.create_task(bench.rank("u1", numbered(300), candidates=50)) for _ in range(5)]
        await asyncio.gather(*ranks)
        (step,) = _behind(bench)
        assert (len(step.scores), len(set(step.reloads))) == (5, 1)


@in_virtual_time
async def test_a_pre_infer_hurries_nobody() -> None:
    async with opened(spare=4, host=20) as bench:
        await _reloadable(bench)
        assert await bench.pre_infer("u1", numbered(300)) is PreInferOutcome.RELOADED
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT
        assert not _behind(bench)


@in_virtual_time
async def test_new_behaviours_are_appended_only_behind_the_whole_reload() -> None:
    async with opened(spare=2, host=20) as bench:
        await _reloadable(bench)
        assert (await bench.rank("u1", numbered(310), candidates=50)).path is Path.EXTENDED
        assert bench.device.reloads == 1
        assert not _behind(bench)


@pytest.mark.parametrize("failures", [1, 2])
@in_virtual_time
async def test_scores_behind_a_reload_that_fails_do_not_count(failures: int) -> None:
    async with opened(spare=2, host=20) as bench:
        await _reloadable(bench)
        left = [failures]

        def fails(work: Step | PageCopy) -> bool:
            lost = isinstance(work, PageCopy) and work.direction is Direction.IN and left[0] > 0
            left[0] -= lost
            return lost

        bench.device.fails = fails
        ranked = await bench.rank("u1", numbered(300), candidates=50)
        assert _behind(bench)
        assert ranked.path is Path.FULL
        assert bench.engine.status().faults == {"copy IN": 1}


@in_virtual_time
async def test_a_user_evicted_during_a_reload_is_ranked_and_forgotten() -> None:
    async with opened(spare=2, host=20) as bench:
        await _reloadable(bench)
        rank = asyncio.create_task(bench.rank("u1", numbered(300), candidates=50))
        await asyncio.sleep(COPY_S * 0.99)
        assert _behind(bench)
        await bench.engine.evict("u1")
        assert (await rank).path is Path.RELOADED
        await bench.settle()
        assert (await bench.rank("u1", numbered(300))).path is Path.FULL
