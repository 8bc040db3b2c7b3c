"""A parent's side of an engine process: what it is told, and a handle on it."""

import asyncio
import sys
from typing import Any

import msgspec

from relaygr.errors import Unavailable

__all__ = ["READY", "SIMULATED", "EngineProcess", "EngineSettings"]

SIMULATED = "simulated"
"""The device of an engine without a model."""
READY = b"ready\n"
"""What it prints when it takes calls."""


class EngineSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What an engine process is told."""

    socket: str
    model: str | None
    """A checkpoint's path; None for a simulated device."""
    config: dict[str, Any] = {}
    """Fields of EngineConfig."""
    threads: int | None = None


class EngineProcess:
    """A parent's handle on an engine process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, settings: EngineSettings) -> "EngineProcess":
        """Start one and wait until it takes calls. Raises Unavailable if it ends instead; it has said why."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "relaygr.serving.engine_server"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is for the parent, which ends it in order
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            if await process.stdout.readline() != READY:
                raise Unavailable(f"the engine process ended with status {await process.wait()}")
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> int:
        """Wait for its end; returns its exit status."""
        return await self._process.wait()

    async def stop(self, within_s: float) -> None:
        """Let it finish what it has taken, then end it; by force when that takes longer than `within_s`."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), within_s)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
