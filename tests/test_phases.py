"""What benchmarks time the loop of an engine with."""

import asyncio
from typing import Any

import numpy as np
import pytest

import phases as module
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
            assert {"turn", "plan", "launch", "complete", "learn", "arrive", "leave"} <= set(phases.cpu_s)
            phases.close()

    asyncio.run(main())


def test_parts_count_to_what_they_are_within_where_they_are_not_told_apart() -> None:
    async def main() -> None:
        model = build_model("hstu", layers=1, dim=16, heads=1, items=1000, seed=0)
        async with Engine(model, EngineConfig(device_cache="4MiB", host_cache="0", max_history=300)) as engine:
            phases = Phases(engine)
            phases.apart = False
            await asyncio.wait_for(engine.rank("u", numbered(200), np.arange(5)), 60)
            assert phases.steps == 1
            assert not {"plan", "launch", "learn"} & set(phases.cpu_s)
            assert phases.step_s() == phases.cpu_s["turn"] + phases.cpu_s["complete"] > 0
            assert sum(phases.per_step(phases.cpu_s).values()) == pytest.approx(phases.step_s() * 1e6)
            phases.close()

    asyncio.run(main())


def test_what_is_timed_within_a_phase_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

        thread_time = perf_counter

    async def main() -> None:
        model = build_model("hstu", layers=1, dim=16, heads=1, items=1000, seed=0)
        async with Engine(model, EngineConfig(device_cache="4MiB", host_cache="0", max_history=300)) as engine:
            loop = engine._loop
            assert loop is not None
            plan = loop._scheduler.plan

            def slow(*args: Any, **more: Any) -> Any:
                stopped.now += 5.0
                return plan(*args, **more)

            loop._scheduler.plan = slow  # type: ignore[method-assign]
            phases = Phases(engine)
            await asyncio.wait_for(engine.pre_infer("u", numbered(200)), 60)
            assert phases.cpu_s["plan"] == phases.wall_s["plan"] == stopped.now > 0
            assert phases.cpu_s["turn"] == phases.wall_s["turn"] == 0
            phases.close()

    stopped = Stopped()
    monkeypatch.setattr(module, "time", stopped)
    asyncio.run(main())
