"""One connection of a server: uvicorn's, but a reply leaves in one write, and a request must arrive in time."""

import asyncio
import sys
from typing import Any, Final, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from relaygr.serving.wire import Encoding, ErrorReply

__all__ = ["ARRIVE_S", "Connection"]

ARRIVE_S: Final = 30.0
"""How long a request may take from its first byte, or from the connection, to its last."""


class Connection(HttpToolsProtocol):
    """What uvicorn does, with a limit to how long a request may be on its way: clients that never finish one do not
    hold connections for good. Those get 408, where nothing was answered yet, and are closed."""

    arrive_s = ARRIVE_S
    _partial = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(cast(asyncio.Transport, _OneWrite(transport, self.loop)))
        self._timer = self.loop.call_later(self.arrive_s, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._arrived()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._partial = True

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._partial = False

    def send_400_response(self, msg: str) -> None:
        """Called where a request could not be read; not its sender's fault where there was no memory for it."""
        error = sys.exc_info()[1]
        while error is not None and not isinstance(error, MemoryError):
            error = error.__cause__ or error.__context__
        if error is None:
            super().send_400_response(msg)
        else:
            self._refuse(503, "Service Unavailable", "Unavailable", "this process has no memory for the request now")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._partial and not self._answered:
            self._arrived()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.arrive_s, self._late)

    @property
    def _answered(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _arrived(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._refuse(408, "Request Timeout", "InvalidInput", f"the request did not arrive within {self.arrive_s:g} s")

    def _refuse(self, status: int, name: str, error: str, message: str) -> None:
        """Close the connection; with an answer where none was begun."""
        if self.transport.is_closing():
            return
        if self._answered or not self.cycle.response_started:
            body = msgspec.json.encode(ErrorReply(error=error, message=message))
            head = f"HTTP/1.1 {status} {name}\r\ncontent-type: {Encoding.JSON.value}\r\n"
            head += f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()


class _OneWrite:
    """A transport that writes once in a turn of the event loop: head and body of a reply leave together."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self.is_closing():
            self._transport.write(b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
