"""What benchmarks time the loop of an engine with."""

import asyncio

import numpy as np

from behaviours import numbered
from phases import Phases
from relaygr import Engine, EngineConfig, build_model


def test_phases_of_the_loop_are_timed_and_the_engine_serves_as_before() -> None:
    async def main() -> None:
        model = build_model("hstu", layers=1, dim=16, heads=1, items=1000, seed=0)
        async with Engine(model, EngineConfig(device_cache="4MiB", host_cache="0", max_history=300)) as engine:
            phases = Phases(engine)
            await asyncio.wait_for(engine.pre_infer("u", numbered(200)), 60)
            await asyncio.wait_for(engine.rank("u", numbered(200), np.arange(5)), 60)
            assert phases.steps == 2
            assert {"plan", "launch", "complete", "learn", "arrive", "leave"} <= set(phases.cpu_s)
            phases.close()

    asyncio.run(main())
