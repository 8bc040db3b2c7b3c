"""What was once wrong stays right."""

import asyncio

import numpy as np

from behaviours import numbered
from relaygr import Decision, Engine, EngineConfig, History, Path
from relaygr.clock import VirtualClock, VirtualTimeLoop, run_virtual
from relaygr.engine.faults import Faults, FaultyExecutor
from relaygr.engine.simulated import SimulatedExecutor, SimulatedModel
from relaygr.engine.step import Executor, Step

ITEMS = np.arange(4)
CONFIG = EngineConfig(device_cache="40MiB", host_cache="0", max_history=600)


def engine(executor: Executor) -> Engine:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return Engine(SimulatedModel(), CONFIG, clock=VirtualClock(loop), executor=executor)


def test_a_prefix_corrected_in_its_last_page_and_shorter_than_the_cached_one_is_kept() -> None:
    async def main() -> None:
        async with engine(SimulatedExecutor()) as served:
            history = numbered(300)
            await served.rank("u", history, ITEMS)
            items = history.items.copy()
            items[200] += 1
            corrected = History(items, history.actions, history.timestamps)[:250]
            await served.pre_infer("u", corrected)
            assert (await served.rank("u", corrected, ITEMS)).path is Path.RESIDENT

    run_virtual(main())


def test_a_step_whose_device_fails_ends_in_order_too() -> None:
    async def main() -> None:
        model, ended = SimulatedModel(), []
        inner = FaultyExecutor(SimulatedExecutor(), Faults(fail=1.0), 1)
        inner.active = False
        outer = FaultyExecutor(inner, Faults(delay=1.0, delay_s=1.0), 1)
        outer.open(model, CONFIG)
        served = await outer.prepare(model)
        first = outer.launch(Step(served, [], []))
        inner.active = True
        second = outer.launch(Step(served, [], []))
        first.add_done_callback(lambda _: ended.append("first"))
        second.add_done_callback(lambda _: ended.append("second"))
        await asyncio.wait([first, second])
        assert second.exception() is not None
        assert ended == ["first", "second"]

    run_virtual(main())


def test_shapes_that_fail_in_the_profile_are_left_out() -> None:
    async def main() -> None:
        async with engine(FaultyExecutor(SimulatedExecutor(), Faults(fail=0.1), 1)) as served:
            assert served.status().cost_model["steps"][1] > 0

    run_virtual(main())


def test_a_signal_behind_a_shorter_one_in_flight_is_refused_where_its_pages_do_not_fit() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        config = EngineConfig(device_cache="8MiB", host_cache="0", max_history=400, lease_share=1.0)
        async with Engine(SimulatedModel(), config, clock=VirtualClock(loop), executor=SimulatedExecutor()) as served:
            assert served.signal("u", numbered(300)) is Decision.ADMIT
            assert served.signal("u", numbered(390)) is Decision.NO_MEMORY

    run_virtual(main())
