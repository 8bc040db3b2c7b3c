"""A small HTTP/1.1 client for the hot path: kept connections, one request at a time on each, nothing parsed twice."""

import asyncio
from collections import deque
from typing import Final, NamedTuple, Protocol, cast
from urllib.parse import urlsplit

from relaygr.errors import InvalidInput, Unavailable
from relaygr.shown import shown

__all__ = ["Client", "HttpClient", "Response"]

MAX_REPLY: Final = 64 * 2**20
IDLE_S: Final = 10.0
"""How long a connection is kept that nobody needs."""
_END: Final = b"\r\n\r\n"


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


class Client(Protocol):
    """Whoever carries requests to one address."""

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Response:
        """One exchange. Raises Unavailable when the address cannot be reached or breaks off."""
        ...

    def close(self) -> None: ...


class HttpClient:
    """Requests to one address over kept connections. Raises Unavailable when it cannot be reached or breaks off."""

    def __init__(self, host: str, port: int, *, keep: int = 64) -> None:
        """`keep`: idle connections kept for the next request."""
        self._host = host
        self._port = port
        self._to = f"HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-length:"
        self._keep = keep
        self._idle: deque[tuple[float, _Connection]] = deque()
        """With when each was last used; that one is used next, so that those beyond what is needed grow old."""
        self._closed = False

    @classmethod
    def to(cls, address: str, *, keep: int = 64) -> "HttpClient":
        """For an address such as http://127.0.0.1:8100; InvalidInput naming the url for what is none."""
        try:
            parts = urlsplit(address)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port or parts.scheme != "http":
            raise InvalidInput("url", f"is {shown(address)}; write it as http://127.0.0.1:8000")
        return cls(host, port, keep=keep)

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Response:
        """One exchange. A kept connection that the server had closed meanwhile is replaced once, unseen."""
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()] if headers else ()
        head = f"{method} {path} {self._to} {len(body)}\r\n{''.join(lines)}\r\n"
        message = head.encode("latin-1") + body
        self._close_old()
        while self._idle:
            _, connection = self._idle.pop()
            if connection.usable:
                try:
                    return await self._exchange(connection, message)
                except _Stale:
                    continue
        try:
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port)
        except OSError as error:
            raise Unavailable(f"{self._host}:{self._port} cannot be reached: {error}") from error
        try:
            return await self._exchange(connection, message)
        except _Stale as error:
            raise Unavailable(f"{self._host}:{self._port} broke off") from error

    async def _exchange(self, connection: "_Connection", message: bytes) -> Response:
        try:
            response = await connection.send(message)
        except BaseException:
            connection.close()
            raise
        if connection.usable and len(self._idle) < self._keep and not self._closed:
            self._idle.append((asyncio.get_running_loop().time(), connection))
        else:
            connection.close()
        return response

    def _close_old(self) -> None:
        """Those that a rush left behind."""
        oldest = asyncio.get_running_loop().time() - IDLE_S
        while self._idle and self._idle[0][0] < oldest:
            self._idle.popleft()[1].close()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop()[1].close()


class _Stale(Exception):
    """The connection ended before any of the reply came: nothing is known to have happened."""


class _Connection(asyncio.Protocol):
    """One connection. Replies have a content-length; anything else is refused."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Response] | None = None
        self._received = b""
        """Of a head that has not ended."""
        self._head: tuple[int, dict[str, str]] | None = None
        """Status and headers of a reply whose body has not ended."""
        self._parts: list[bytes] = []
        self._missing = 0
        """Of the body: what has come, and how many bytes have not."""
        self._keep_alive = True

    @property
    def usable(self) -> bool:
        return self._keep_alive and self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by name
        self._transport.set_write_buffer_limits(high=0)  # uvloop writes at once: there is one write for a request

    def send(self, message: bytes) -> asyncio.Future[Response]:
        """The reply to come. Who no longer waits for it closes the connection."""
        assert self._transport is not None
        self._waiting = waiting = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        return waiting

    def data_received(self, data: bytes) -> None:
        try:
            self._parse(data)
        except (ValueError, IndexError) as error:
            self._fail(Unavailable(f"not an HTTP reply: {error}"))

    def _parse(self, data: bytes) -> None:
        if self._head is None:
            head, end, data = (self._received + data).partition(_END)
            if not end:
                if len(head) > 2**16:
                    raise ValueError("its head does not end")
                self._received = head
                return
            self._received = b""
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = {}
            for line in lines:
                name, _, value = line.partition(":")
                headers[name.strip().lower()] = value.strip()
            self._missing = int(headers["content-length"]) if "content-length" in headers else -1
            if not 0 <= self._missing <= MAX_REPLY:
                raise ValueError("it has no content-length, or too large a one")
            self._head = int(first.split(" ", 2)[1]), headers
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        if self._missing < 0:
            raise ValueError("more than was asked for")
        response = Response(*self._head, b"".join(self._parts))
        self._keep_alive = response.headers.get("connection", "").lower() != "close"
        self._head, self._parts = None, []
        waiting = self._take_waiting()
        if waiting is not None:
            waiting.set_result(response)
        else:  # nobody asked
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep_alive = False
        begun = self._received or self._head is not None
        self._fail(Unavailable("the connection broke off within a reply") if begun else _Stale())

    def _fail(self, error: Exception) -> None:
        waiting = self._take_waiting()
        if waiting is not None:
            waiting.set_exception(error)
        self.close()

    def _take_waiting(self) -> asyncio.Future[Response] | None:
        """Whoever waits for a reply, or None. Forgotten here, so that its error makes no cycle with this connection."""
        waiting, self._waiting = self._waiting, None
        return None if waiting is None or waiting.done() else waiting

    def close(self) -> None:
        self._keep_alive = False
        if self._transport is not None:
            self._transport.close()
