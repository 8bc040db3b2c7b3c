"""A history given by its digest alone is ranked where its prefix is cached, and asked for where it is not."""

import asyncio

import numpy as np
import pytest

from engines import in_virtual_time, opened
from relaygr import Decision, Engine, EngineConfig, History, Path
from relaygr.clock import VirtualClock, VirtualTimeLoop, run_virtual
from relaygr.engine.faults import Faults, FaultyExecutor
from relaygr.engine.simulated import SimulatedExecutor, SimulatedModel, simulated_scores
from relaygr.errors import HistoryNeeded
from relaygr.history import KnownHistory

MODEL = SimulatedModel()
HISTORY = History(np.arange(300), np.arange(300) % 16, np.arange(300) * 10)
ITEMS = np.arange(7)


def known(history: History) -> KnownHistory:
    return KnownHistory(history.start, len(history), history.digest())


def engine(**config: object) -> Engine:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    settings = EngineConfig(device_cache="40MiB", host_cache="0", **config)  # type: ignore[arg-type]
    return Engine(MODEL, settings, clock=VirtualClock(loop), executor=SimulatedExecutor())


def test_a_cached_prefix_serves_its_digest() -> None:
    async def main() -> None:
        async with engine() as served:
            await served.rank("u", HISTORY, ITEMS)
            ranked = await served.rank("u", known(HISTORY), ITEMS)
            assert ranked.path is Path.RESIDENT
            assert ranked.used == 300
            assert np.array_equal(ranked.scores, simulated_scores(MODEL, HISTORY, ITEMS))

    run_virtual(main())


def test_a_digest_at_the_end_of_a_page_is_served_from_a_longer_prefix() -> None:
    async def main() -> None:
        async with engine() as served:
            await served.rank("u", HISTORY, ITEMS)
            for length in (0, 128, 256):
                ranked = await served.rank("u", known(HISTORY[:length]), ITEMS)
                assert (ranked.path, ranked.used) == (Path.RESIDENT, length)
                assert np.array_equal(ranked.scores, simulated_scores(MODEL, HISTORY[:length], ITEMS))

    run_virtual(main())


def test_a_prefix_being_made_serves_its_digest() -> None:
    async def main() -> None:
        async with engine() as served:
            assert served.signal("u", HISTORY) is Decision.ADMIT
            assert served.signal("u", known(HISTORY)) is Decision.ADMIT
            ranked = await served.rank("u", known(HISTORY), ITEMS)
            assert ranked.path is Path.WAITED
            assert np.array_equal(ranked.scores, simulated_scores(MODEL, HISTORY, ITEMS))
            assert served.signal("u", known(HISTORY)) is Decision.RESIDENT

    run_virtual(main())


@pytest.mark.parametrize("cached", [0, 1, 128, 256, 299])
def test_any_other_prefix_asks_for_the_behaviours_and_leaves_nothing_behind(cached: int) -> None:
    async def main() -> None:
        async with engine() as served:
            if cached:
                await served.rank("u", HISTORY[:cached], ITEMS)
            before = served.status()
            with pytest.raises(HistoryNeeded):
                await served.rank("u", known(HISTORY), ITEMS)
            with pytest.raises(HistoryNeeded):
                served.signal("u", known(HISTORY))
            assert served.status() == before

    run_virtual(main())


def test_a_device_that_fails_asks_for_the_behaviours() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        executor = FaultyExecutor(SimulatedExecutor(), Faults(fail=1.0), seed=0)
        executor.active = False
        settings = EngineConfig(device_cache="40MiB", host_cache="0")
        async with Engine(MODEL, settings, clock=VirtualClock(loop), executor=executor) as served:
            assert served.signal("u", HISTORY) is Decision.ADMIT
            executor.active = True
            with pytest.raises(HistoryNeeded):
                await served.rank("u", known(HISTORY), ITEMS)

    run_virtual(main())


def test_whoever_is_asked_for_the_behaviours_keeps_the_lease_and_its_build() -> None:
    """The history has grown since the signal."""

    async def main() -> None:
        async with engine() as served:
            assert served.signal("u", HISTORY[:280]) is Decision.ADMIT
            with pytest.raises(HistoryNeeded):
                await served.rank("u", known(HISTORY), ITEMS)
            status = served.status()
            assert (status.leases, status.builds_under_way) == (1, 1)
            ranked = await served.rank("u", HISTORY, ITEMS)
            assert ranked.path is Path.EXTENDED
            assert np.array_equal(ranked.scores, simulated_scores(MODEL, HISTORY, ITEMS))
            assert served.status().leases == 0

    run_virtual(main())


@in_virtual_time
async def test_a_build_that_is_late_for_a_digest_is_waited_for_by_the_call_with_the_behaviours() -> None:
    async with opened(on_miss="truncate", step_ms=1.0) as bench:
        bench.device.hangs_s = lambda work: 0.025 if len(bench.device.launched) == 1 else 0.0
        assert bench.engine.signal("u", HISTORY) is Decision.ADMIT
        deadline = bench.now + 0.03
        with pytest.raises(HistoryNeeded, match="late"):
            await bench.engine.rank("u", known(HISTORY), ITEMS, deadline=deadline)
        status = bench.engine.status()
        assert (status.leases, status.builds_under_way) == (1, 1)
        assert (await bench.rank("u", HISTORY, within=deadline - bench.now)).path is Path.WAITED
        assert bench.engine.status().leases == 0


def test_one_request_is_one_visit() -> None:
    async def main() -> None:
        async with engine() as served:
            assert served._loop is not None
            visits = served._loop.visits._returns._visits
            with pytest.raises(HistoryNeeded):
                await served.rank("u", known(HISTORY), ITEMS)
            assert "u" not in visits
            await served.rank("u", HISTORY, ITEMS)
            assert visits["u"] == 1
            await served.rank("u", known(HISTORY), ITEMS)
            assert visits["u"] == 2
            assert served._loop.visits.last("u") == served.clock.now()

    run_virtual(main())
