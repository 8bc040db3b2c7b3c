"""An engine process whose engine fails for a fault of its own tells those who wait, and ends."""

import asyncio
import functools
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from behaviours import numbered
from engines import in_virtual_time, opened
from relaygr import Engine, EngineConfig
from relaygr.engine.simulated import SimulatedExecutor, SimulatedModel
from relaygr.engine.step import Model, Served
from relaygr.errors import Unavailable
from relaygr.model import checkpoint
from relaygr.serving import link
from relaygr.serving.engine_process import READY, EngineSettings
from relaygr.serving.engine_server import EngineConnection, serve_engine

BROKEN = """
import runpy
from relaygr.engine.scheduler import Scheduler
right, left = Scheduler.plan, [3]
def plan(*args, **more):
    left[0] -= 1
    if left[0] < 0:
        raise IndexError("for a test")
    return right(*args, **more)
Scheduler.plan = plan
runpy.run_module("relaygr.serving.engine_server", run_name="__main__")
"""
"""An engine process that breaks at its fourth plan."""


def test_those_who_wait_are_told_and_the_process_ends_with_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", BROKEN),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        settings = EngineSettings(socket=str(tmp_path / "engine"), model=None, config={"device": "simulated"})
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        assert await process.stdout.readline() == READY
        engine = await link.EngineLink.connect(settings.socket)
        history = link.pack_history(numbered(300))

        async def rank(*users: str) -> None:
            for user in users:
                await engine.call(link.Rank(user, history, b"", None, bytes(8), None, None))

        with pytest.raises(Unavailable):
            await rank(*map("u{}".format, range(10)))
        with pytest.raises(Unavailable):
            await rank("u1")
        _, said = await process.communicate()
        await engine.close()
        assert process.returncode == 1
        assert b"the engine has failed: it answers nobody any more" in said
        assert b"IndexError: for a test" in said

    asyncio.run(main())


def broken(*_: Any, **__: Any) -> Any:
    raise KeyError("for a test")


@in_virtual_time
async def test_what_was_answered_before_it_failed_is_sent() -> None:
    history, sent = numbered(300), list[link.Answer]()

    class Connection(EngineConnection):
        def send(self, message: Any, *, alone: bool = False) -> None:
            sent.append(message)

    engine = opened()
    bench = await engine.__aenter__()
    assert bench.engine._loop is not None
    connection = Connection(bench.engine, set())
    for user in ("u0", "u1", "u2"):
        await bench.rank(user, history)
    await bench.settle()
    for number, user in enumerate(("u0", "u1", "u2")):
        future = connection._running[number] = bench.engine.begin_rank(user, history, np.arange(3))
        future.add_done_callback(functools.partial(connection._done, number))
    bench.engine._loop.claims.end_oldest = broken  # type: ignore[method-assign]
    await connection.finished()
    assert sorted(answer.number for answer in sent) == [0, 1, 2]
    assert all(answer.error is None for answer in sent)
    with pytest.raises(RuntimeError, match="the engine has failed"):
        await engine.__aexit__(None, None, None)


def test_an_engine_that_fails_does_not_wait_for_a_model_that_is_being_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(SimulatedExecutor):
        began, goes_on = asyncio.Event(), asyncio.Event()

        async def prepare(self, model: Model) -> Served:
            if model is other:
                self.began.set()
                await self.goes_on.wait()
            return await super().prepare(model)

    other, path = SimulatedModel("other"), str(tmp_path / "engine")
    monkeypatch.setattr(checkpoint, "load", lambda _: other)

    async def main() -> None:
        config = EngineConfig(device_cache="64MiB", host_cache="0", max_history=400)
        executor, until, ready = Slow(), asyncio.Event(), asyncio.Event()

        async def serve() -> None:
            async with Engine(SimulatedModel(), config, executor=executor) as engine:
                assert engine._loop is not None
                engine._loop._scheduler.plan = broken  # type: ignore[method-assign]
                serving = asyncio.create_task(serve_engine(engine, path, ready.set, until))
                await engine.failed()
                until.set()
                await serving

        server = asyncio.create_task(serve())
        await ready.wait()
        frontend = await link.EngineLink.connect(path)
        swap = asyncio.create_task(frontend.call(link.Swap("anything")))
        await executor.began.wait()
        with pytest.raises(Unavailable):
            await frontend.call(link.Rank("u", link.pack_history(numbered(300)), b"", None, bytes(8), None, None))
        with pytest.raises(Unavailable):
            await swap  # though the model is still being prepared
        assert not frontend.alive
        executor.goes_on.set()
        with pytest.raises(RuntimeError, match="the engine has failed"):
            await server
        await frontend.close()

    asyncio.run(asyncio.wait_for(main(), 60))
