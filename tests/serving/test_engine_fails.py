"""An engine process whose engine fails for a fault of its own tells those who wait, and ends."""

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from behaviours import numbered
from relaygr.errors import Unavailable
from relaygr.serving import link
from relaygr.serving.engine_process import READY, EngineSettings

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
