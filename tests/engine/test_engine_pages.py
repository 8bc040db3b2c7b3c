"""Pages are kept for whoever still reads them: ranks, copies and reloads that wait or are under way."""

import asyncio

import numpy as np
import pytest

from behaviours import numbered
from engines import corrected, in_virtual_time, opened
from relaygr import Path
from relaygr.engine.step import PageCopy, Step

CONTEXT = np.array([5, 7, 11])


@in_virtual_time
async def test_what_a_rank_scores_on_is_kept_until_it_has_scored() -> None:
    """It waits behind more urgent ones that want its pages; nobody has leased them."""
    async with opened(spare=2, step_ms=1.0) as bench:
        await bench.rank("u1", numbered(300))
        filler = asyncio.create_task(bench.rank("filler", numbered(1), candidates=1000, within=0.05))
        await asyncio.sleep(1e-4)
        waits = asyncio.create_task(bench.rank("u1", numbered(300), within=0.9))
        urgent = [
            asyncio.create_task(bench.rank(f"urgent {k}", numbered(400, salt=k + 1), within=0.5)) for k in range(3)
        ]
        assert (await waits).path is Path.RESIDENT
        await asyncio.gather(filler, *urgent)


@in_virtual_time
async def test_a_page_to_be_copied_is_kept_until_it_is() -> None:
    """Its user is forgotten while the copy waits for the device, and others write to every page they can get."""
    async with opened(spare=0, step_ms=1.0) as bench:
        old, new = numbered(150), corrected(numbered(150), 140)
        await bench.rank("u1", old, context=CONTEXT)
        filler = asyncio.create_task(bench.rank("filler", numbered(1), candidates=1000, within=0.05))
        await asyncio.sleep(1e-4)
        waits = asyncio.create_task(bench.rank("u1", new, context=CONTEXT, within=0.9))
        await asyncio.sleep(0)
        await bench.engine.evict("u1")
        urgent = [asyncio.create_task(bench.rank(f"urgent {k}", numbered(128, salt=k), within=0.5)) for k in range(4)]
        assert (await waits).path is Path.EXTENDED
        assert bench.device.page_copies == 1
        await asyncio.gather(filler, *urgent)


@in_virtual_time
async def test_what_is_being_reloaded_is_kept_in_host_memory_until_it_is_there() -> None:
    """Others are written to host memory meanwhile, which has room for one."""
    async with opened(host=4) as bench:
        await bench.rank("u1", numbered(300))
        await bench.settle()
        bench.device.fails = lambda work: isinstance(work, PageCopy)
        await bench.push_out("u1")
        bench.device.fails = lambda work: False
        bench.device.hangs_s = lambda work: 0.05 if isinstance(work, PageCopy) and work.direction == "IN" else 0.0
        reload = asyncio.create_task(bench.rank("u1", numbered(300)))
        for k in range(3):
            await bench.rank(f"other {k}", numbered(300, salt=k + 1))
            await asyncio.sleep(0.005)
        assert not reload.done()
        assert (await reload).path is Path.RELOADED


def slow_writes(work: Step | PageCopy) -> float:
    return 0.05 if isinstance(work, PageCopy) and work.direction == "OUT" else 0.0


@in_virtual_time
async def test_what_is_being_written_to_host_memory_is_kept_until_it_is_there() -> None:
    async with opened(spare=2, host=4) as bench:
        bench.device.hangs_s = slow_writes
        await bench.rank("u1", numbered(300))
        await asyncio.sleep(1e-4)
        assert bench.device.writes == 1
        for k in range(5):
            await bench.rank(f"other {k}", numbered(300, salt=k + 1))
        assert bench.engine.status().copies_in_flight == 1
        bench.device.hangs_s = lambda work: 0.0
        bench.device.fails = lambda work: isinstance(work, PageCopy) and work.direction == "OUT"
        await bench.push_out("u1")
        assert (await bench.rank("u1", numbered(300))).path is Path.RELOADED


@in_virtual_time
async def test_what_was_evicted_before_its_turn_is_not_written() -> None:
    async with opened(spare=2, host=20) as bench:
        bench.device.hangs_s = slow_writes
        await bench.rank("first", numbered(100))
        await bench.rank("u1", numbered(300))
        for k in range(3):
            await bench.rank(f"other {k}", numbered(400, salt=k + 1))
        await bench.settle()
        assert (await bench.rank("u1", numbered(300))).path is Path.FULL


@pytest.mark.parametrize("used", ["rank", "pre_infer"])
@in_virtual_time
async def test_the_least_recently_used_is_evicted_first(used: str) -> None:
    async with opened(spare=4, lease_s=0.001) as bench:
        await bench.rank("u1", numbered(300))
        await bench.rank("u2", numbered(300))
        await getattr(bench, used)("u1", numbered(300))
        await asyncio.sleep(0.01)
        await bench.rank("cat", numbered(400))
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT
        assert (await bench.rank("u2", numbered(300))).path is Path.FULL
