"""What an engine keeps between requests can be switched off, in part or altogether; scores do not change."""

import asyncio

from behaviours import numbered
from engines import in_virtual_time, opened
from relaygr import Path, PreInferOutcome


@in_virtual_time
async def test_without_reuse_every_rank_computes_all_of_its_history_and_nothing_is_left() -> None:
    async with opened(host=20, spare=40, reuse="none") as bench:
        for _ in range(3):
            assert (await bench.rank("u1", numbered(300))).path is Path.FULL
        assert bench.device.appended == 900
        ranked = await asyncio.gather(*(bench.rank("u1", numbered(300)) for _ in range(3)))
        assert [answer.path for answer in ranked] == [Path.FULL] * 3
        assert bench.device.appended == 1800
        await bench.settle()
        status = bench.engine.status()
        assert (status.device_prefixes, status.host_prefixes) == (0, 0)
        assert status.device_pages_free == status.device_pages


@in_virtual_time
async def test_without_reuse_no_pre_infer_is_admitted() -> None:
    async with opened(spare=40, reuse="none") as bench:
        assert await bench.pre_infer("u1", numbered(300)) is PreInferOutcome.NO_MEMORY
        assert bench.device.appended == 0


@in_virtual_time
async def test_whole_prefixes_serve_the_same_history_and_longer_ones_are_computed_anew() -> None:
    async with opened(spare=40, reuse="whole") as bench:
        assert await bench.pre_infer("u1", numbered(300)) is PreInferOutcome.COMPUTED
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT
        assert (await bench.rank("u1", numbered(310))).path is Path.FULL
        assert bench.device.appended == 610
        assert (await bench.rank("u1", numbered(310))).path is Path.RESIDENT


@in_virtual_time
async def test_whole_prefixes_in_flight_are_joined_and_shorter_ones_are_not() -> None:
    async with opened(spare=40, reuse="whole") as bench:
        histories = (numbered(300), numbered(300), numbered(310))
        ranked = await asyncio.gather(*(bench.rank("u1", history) for history in histories))
        assert [answer.path for answer in ranked] == [Path.FULL, Path.WAITED, Path.FULL]
        assert bench.device.appended == 610


@in_virtual_time
async def test_whole_prefixes_come_back_from_host_memory_and_are_not_extended_there() -> None:
    async with opened(spare=2, host=20, reuse="whole") as bench:
        await bench.rank("u1", numbered(300))
        await bench.push_out("u1")
        assert (await bench.rank("u1", numbered(300))).path is Path.RELOADED
        await bench.push_out("u1")
        assert (await bench.rank("u1", numbered(310))).path is Path.FULL
