"""Every path of a rank and every outcome of a pre-infer, by a scenario that leads there, and what each costs."""

import asyncio

import numpy as np
import numpy.typing as npt
import pytest

from behaviours import numbered
from engines import COSTS, Bench, corrected, in_virtual_time, opened
from relaygr import Path, PreInferOutcome
from relaygr.history import PAGE

Ids = npt.NDArray[np.int64]

CONTEXT = np.array([5, 7, 11])


async def reloadable(bench: Bench, user: str, length: int, context: Ids | None = None) -> None:
    """The user's prefix is in host memory alone."""
    await bench.rank(user, numbered(length), context=context)
    await bench.push_out(user)


@in_virtual_time
async def test_nothing_cached_is_computed_in_full_and_left_resident() -> None:
    async with opened() as bench:
        first = await bench.rank("u1", numbered(300))
        assert (first.path, first.used, bench.device.appended) == (Path.FULL, 300, 300)
        second = await bench.rank("u1", numbered(300))
        assert (second.path, second.used, bench.device.appended) == (Path.RESIDENT, 300, 300)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 256, 400])
@pytest.mark.parametrize("context", [None, CONTEXT])
@in_virtual_time
async def test_every_length_is_computed_once(length: int, context: Ids | None) -> None:
    async with opened() as bench:
        tokens = length + (0 if context is None else len(context))
        assert (await bench.rank("u1", numbered(length), context=context)).path is Path.FULL
        assert (await bench.rank("u1", numbered(length), context=context)).path is Path.RESIDENT
        assert bench.device.appended == tokens


@in_virtual_time
async def test_new_behaviours_are_appended_and_nothing_else() -> None:
    async with opened() as bench:
        await bench.rank("u1", numbered(300))
        grown = await bench.rank("u1", numbered(316))
        assert (grown.path, grown.used, bench.device.appended) == (Path.EXTENDED, 316, 316)
        assert (await bench.rank("u1", numbered(316))).path is Path.RESIDENT


@in_virtual_time
async def test_what_was_evicted_comes_back_from_host_memory() -> None:
    async with opened(spare=2, host=20) as bench:
        await reloadable(bench, "u1", 300)
        ranked = await bench.rank("u1", numbered(300))
        assert (ranked.path, bench.device.appended, bench.device.reloads) == (Path.RELOADED, 0, 1)
        assert len(bench.device.copies[0].source) == 3
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT


@pytest.mark.parametrize("context", [None, CONTEXT])
@in_virtual_time
async def test_a_reloaded_base_is_extended(context: Ids | None) -> None:
    async with opened(spare=2, host=20) as bench:
        await reloadable(bench, "u1", 300, context)
        ranked = await bench.rank("u1", numbered(310), context=context)
        assert (ranked.path, bench.device.appended, bench.device.reloads) == (Path.EXTENDED, 10, 1)


@pytest.mark.parametrize("context", [None, CONTEXT])
@pytest.mark.parametrize("at", [0, 127, 128, 200, 299])
@in_virtual_time
async def test_a_corrected_history_keeps_the_pages_before_the_correction(
    at: int,
    context: Ids | None,
) -> None:
    async with opened() as bench:
        await bench.rank("u1", numbered(300), context=context)
        bench.device.forget()
        ranked = await bench.rank("u1", corrected(numbered(300), at), context=context)
        kept = at // PAGE * PAGE
        if kept:
            assert (ranked.path, bench.device.appended) == (Path.EXTENDED, 300 - kept)
        else:
            assert (ranked.path, bench.device.appended) == (Path.FULL, 300 + (0 if context is None else len(context)))


@in_virtual_time
async def test_a_shorter_history_of_whole_pages_is_resident_in_a_longer_one() -> None:
    async with opened() as bench:
        await bench.rank("u1", numbered(300))
        assert (await bench.rank("u1", numbered(256))).path is Path.RESIDENT
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT
        assert bench.device.appended == 300


@pytest.mark.parametrize("wanted", [250, 270])
@in_virtual_time
async def test_a_longer_prefix_is_not_taken_for_a_shorter_one(wanted: int) -> None:
    """Only its whole pages are known to be the same."""
    async with opened() as bench:
        await bench.rank("u1", numbered(300))
        ranked = await bench.rank("u1", numbered(wanted))
        assert (ranked.path, ranked.used) == (Path.EXTENDED, wanted)
        assert bench.device.appended == 300 + wanted % PAGE


@in_virtual_time
async def test_another_context_and_another_window_are_misses() -> None:
    async with opened() as bench:
        await bench.rank("u1", numbered(200), context=CONTEXT)
        assert (await bench.rank("u1", numbered(200), context=CONTEXT + 1)).path is Path.FULL
        assert (await bench.rank("u1", numbered(200))).path is Path.FULL
        assert (await bench.rank("u1", numbered(200, first=PAGE))).path is Path.FULL
        assert (await bench.rank("u2", numbered(200, first=PAGE))).path is Path.FULL


@in_virtual_time
async def test_a_rank_waits_for_the_pre_infer_that_is_under_way() -> None:
    async with opened() as bench:
        pre_infer = asyncio.create_task(bench.pre_infer("u1", numbered(300)))
        await asyncio.sleep(1e-3)
        ranked = await bench.rank("u1", numbered(300))
        assert (ranked.path, bench.device.appended) == (Path.WAITED, 300)
        assert await pre_infer is PreInferOutcome.COMPUTED


@in_virtual_time
async def test_a_rank_that_knows_more_waits_and_appends_the_rest() -> None:
    async with opened() as bench:
        pre_infer = asyncio.create_task(bench.pre_infer("u1", numbered(300)))
        await asyncio.sleep(1e-3)
        ranked = await bench.rank("u1", numbered(305))
        assert (ranked.path, bench.device.appended) == (Path.EXTENDED, 305)
        assert await pre_infer is PreInferOutcome.COMPUTED


@in_virtual_time
async def test_the_relay_computes_ahead_and_ranks_resident() -> None:
    async with opened() as bench:
        assert await bench.pre_infer("u1", numbered(300)) is PreInferOutcome.COMPUTED
        ranked = await bench.rank("u1", numbered(300), candidates=10)
        assert (ranked.path, ranked.epoch, bench.device.appended) == (Path.RESIDENT, 0, 300)
        assert ranked.timings.total == pytest.approx(1e3 * (COSTS.step + 10 * COSTS.candidate), rel=1e-3)
        assert ranked.timings.score == pytest.approx(ranked.timings.total, rel=1e-3)
        assert ranked.scores.shape == (10, 1)
        assert ranked.scores.dtype == np.float32


@in_virtual_time
async def test_each_outcome_of_a_pre_infer_that_is_taken() -> None:
    async with opened(spare=4, host=20) as bench:
        assert await bench.pre_infer("u1", numbered(300)) is PreInferOutcome.COMPUTED
        assert await bench.pre_infer("u1", numbered(300)) is PreInferOutcome.RESIDENT
        assert await bench.pre_infer("u1", numbered(310)) is PreInferOutcome.EXTENDED
        assert bench.device.appended == 310
        await asyncio.sleep(bench.engine.config.lease_s)
        await bench.push_out("u1")
        assert await bench.pre_infer("u1", numbered(310)) is PreInferOutcome.RELOADED
        assert (bench.device.appended, bench.device.reloads) == (0, 1)
        both = await asyncio.gather(*(bench.pre_infer("u2", numbered(100, salt=1)) for _ in range(2)))
        assert both == [PreInferOutcome.COMPUTED, PreInferOutcome.JOINED]
        assert bench.device.appended == 100
        assert bench.engine.status().outcomes == {
            "COMPUTED": 2,
            "RESIDENT": 1,
            "EXTENDED": 1,
            "RELOADED": 1,
            "JOINED": 1,
        }


@in_virtual_time
async def test_a_pre_infer_that_knows_more_waits_and_appends_the_rest() -> None:
    async with opened() as bench:
        outcomes = await asyncio.gather(*(bench.pre_infer("u1", numbered(length)) for length in (300, 310)))
        assert outcomes == [PreInferOutcome.COMPUTED, PreInferOutcome.EXTENDED]
        assert (bench.device.appended, bench.engine.status().leases) == (310, 2)
        assert (await bench.rank("u1", numbered(310))).path is Path.RESIDENT


@in_virtual_time
async def test_a_pre_infer_joins_the_rank_that_came_first() -> None:
    async with opened() as bench:
        ranked, outcome = await asyncio.gather(bench.rank("u1", numbered(300)), bench.pre_infer("u1", numbered(300)))
        assert (ranked.path, outcome, bench.device.appended) == (Path.FULL, PreInferOutcome.JOINED, 300)


@in_virtual_time
async def test_a_pre_infer_after_its_rank_is_not_computed_again() -> None:
    async with opened() as bench:
        await bench.rank("u1", numbered(300))
        assert await bench.pre_infer("u1", numbered(300)) is PreInferOutcome.RESIDENT
        assert bench.device.appended == 300


@in_virtual_time
async def test_the_status_counts_paths() -> None:
    async with opened() as bench:
        await bench.pre_infer("u1", numbered(300))
        await bench.rank("u1", numbered(300))
        await bench.rank("u1", numbered(300))
        await bench.rank("u1", numbered(301))
        status = bench.engine.status()
        assert status.paths == {"RESIDENT": 2, "EXTENDED": 1}
        assert status.resident_left_by_earlier == 1
        assert (status.device_prefixes, status.leases, status.ranks_under_way) == (1, 0, 0)


@in_virtual_time
async def test_of_two_ranks_behind_one_pre_infer_the_second_finds_what_the_first_request_left() -> None:
    async with opened() as bench:
        await bench.pre_infer("u1", numbered(300))
        await asyncio.gather(*(bench.rank("u1", numbered(300)) for _ in range(2)))
        status = bench.engine.status()
        assert (status.paths, status.resident_left_by_earlier) == ({"RESIDENT": 2}, 1)


@in_virtual_time
async def test_without_host_memory_what_is_evicted_is_computed_again() -> None:
    async with opened(spare=2, host=0) as bench:
        await bench.rank("u1", numbered(300))
        await bench.push_out("u1")
        assert (await bench.rank("u1", numbered(300))).path is Path.FULL
        assert not bench.device.copies


@in_virtual_time
async def test_host_memory_gets_new_pages_only() -> None:
    async with opened(host=20) as bench:
        await bench.rank("u1", numbered(300))
        await bench.settle()
        await bench.rank("u1", numbered(390))
        await bench.settle()
        assert [len(copy.source) for copy in bench.device.copies] == [3, 2]
        assert bench.engine.status().host_pages_free == 20 - 4


@in_virtual_time
async def test_a_shorter_prefix_does_not_replace_the_longer_one_that_holds_it() -> None:
    async with opened() as bench:
        longer = asyncio.create_task(bench.pre_infer("u1", numbered(300), within=0.1))
        await asyncio.sleep(0)
        assert (await bench.rank("u1", numbered(256))).used == 256
        await longer
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT
