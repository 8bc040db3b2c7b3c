"""`relaygr serve all`, started as a user starts it, for as long as an experiment takes."""

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec

from relaygr.errors import Unavailable
from relaygr.serving.client import HttpClient
from relaygr.serving.settings import Settings, render

__all__ = ["Servers", "serving"]

_SERVES: Final = re.compile(r"gateway serves on (http://\S+)")
_STOP_S: Final = 60.0


class Servers:
    """A gateway and its instances, and what they say of themselves."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = HttpClient.to(address, keep=1024)

    async def status(self) -> dict[str, Any]:
        """The gateway's."""
        return await _status(self.client)

    async def instances(self) -> dict[str, Any]:
        """The status of every instance, by slot."""
        slots = (await self.status())["slots"]
        with contextlib.ExitStack() as stack:
            clients = {slot: HttpClient.to(told["address"]) for slot, told in slots.items()}
            for client in clients.values():
                stack.callback(client.close)
            return {slot: await _status(client) for slot, client in clients.items()}


@contextlib.asynccontextmanager
async def serving(settings: Settings, data: Path, instances: int) -> AsyncIterator[Servers]:
    """Start them with these settings on a free port, and stop them in the end. What they say is in `data`, a folder.

    Raises Unavailable, with what they said, if they do not come up.
    """
    file, said = data / "relaygr.toml", data / "stderr.txt"
    file.write_text(render(settings), encoding="utf-8")
    command = [sys.executable, "-m", "relaygr", "serve", "all", "--config", str(file), "--port", "0"]
    command += ["--instances", str(instances), "--data-dir", str(data)]
    with said.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=errors)
    assert process.stdout is not None
    try:
        serves = _SERVES.search((await process.stdout.readline()).decode())
        if serves is None:
            raise Unavailable(f"the servers did not start: {said.read_text(errors='replace').strip()[-2000:]}")
        servers = Servers(serves[1])
        try:
            yield servers
        finally:
            servers.client.close()
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """In order; by force where that takes too long."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), _STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


async def _status(client: HttpClient) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.json.decode((await client.request("GET", "/v1/status")).body)
    return told
