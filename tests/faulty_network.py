"""A network between a sender and one address that drops, delays, truncates and swallows, by a seeded draw."""

import asyncio
import contextlib
import random
from collections import Counter
from enum import StrEnum
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

__all__ = ["DELAY_S", "Fault", "FaultyNetwork"]

DELAY_S = 0.05


class Fault(StrEnum):
    DROP = "DROP"
    """The connection ends as soon as it is there."""
    DELAY = "DELAY"
    """What the other side says comes later."""
    TRUNCATE = "TRUNCATE"
    """It ends within the reply."""
    SWALLOW = "SWALLOW"
    """Nothing comes back, and nobody says so."""


class FaultyNetwork:
    """Listens on a port of its own and passes on what comes. While `faulty`, every other new connection has a fault."""

    def __init__(self, address: str, draw: random.Random) -> None:
        parts = urlsplit(address)
        assert parts.hostname is not None
        assert parts.port is not None
        self._host, self._port, self._draw = parts.hostname, parts.port, draw
        self._tasks: set[asyncio.Task[None]] = set()
        self.faulty = False
        self.faults: Counter[Fault] = Counter()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        fault = self._draw.choice(list(Fault)) if self.faulty and self._draw.random() < 0.5 else None
        if fault is not None:
            self.faults[fault] += 1
        with contextlib.suppress(OSError, asyncio.CancelledError):
            if fault is not Fault.DROP:
                await self._carry(reader, writer, fault)
        writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault | None) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        try:
            sending = asyncio.create_task(_pass(reader, back))
            receiving = asyncio.create_task(self._return(there, writer, fault))
            try:
                await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in (sending, receiving):
                    one.cancel()
                await asyncio.gather(sending, receiving, return_exceptions=True)
        finally:
            back.close()

    async def _return(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault | None) -> None:
        while part := await reader.read(65536):
            if fault is Fault.SWALLOW:
                continue
            if fault is Fault.DELAY:
                await asyncio.sleep(DELAY_S)
            if fault is Fault.TRUNCATE:
                writer.write(part[: self._draw.randrange(len(part))])
                await writer.drain()
                return
            writer.write(part)
            await writer.drain()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(65536):
        writer.write(part)
        await writer.drain()
