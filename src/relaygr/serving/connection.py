"""One connection of a server: HTTP/1.1 by httptools' parser, straight to an App, under uvicorn.

uvicorn accepts, ends and counts connections. Its own protocol makes a scope, an event, two channels and four messages
of every request, and two writes of a reply; for a rank that took as long as all else that a frontend does.
"""

import asyncio
import functools
import logging
import math
import urllib.parse
from collections import deque
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
import uvicorn

from relaygr.serving.http import RETRY_AFTER, App, Reply, Request
from relaygr.serving.wire import Encoding, ErrorReply, encode

__all__ = ["ARRIVE_S", "Connection"]

_log = logging.getLogger(__name__)

ARRIVE_S: Final = 30.0
"""How long a request may take from its first byte, or from the connection, to its last."""
MAX_HEAD: Final = 64 * 2**10
"""Bytes of a request before its body, more or less: they are counted as they come in."""
WAITING: Final = 8
"""Requests of one connection that wait for those before them; then it is not read on."""
_STATUS: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

Asked = tuple[App, Request] | Reply


class Connection(asyncio.Protocol):
    """Requests are answered one after the other. A client that goes cancels its request; one that never finishes it
    gets 408; one that does not read its answers is cut off. A body is not kept where the head decides the answer, or
    where it is too large."""

    arrive_s = ARRIVE_S

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """As uvicorn makes it."""
        self._app = cast(App, config.loaded_app)
        self._idle_s = config.timeout_keep_alive
        self._server = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # dropped; else it would be an error
        self._waiting: deque[tuple[Asked, bool, bool]] = deque()
        """What is asked, whether by HEAD, and whether the connection is kept."""
        self._task: asyncio.Task[None] | None = None
        self._due = math.inf
        """When the client is late."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        """It looks then whether the client is late, which may have changed since it was set."""
        self._partial = self._in_head = True
        self._head_size = 0
        self._ending = self._paused = self._deaf = False
        self._discarding = False
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []
        self._size = 0

    # ---- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by name
        self._transport.set_write_buffer_limits(high=0)  # uvloop writes at once: there is one write for a reply
        self._server.connections.add(self)
        self._await(self.arrive_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        del self._parser  # which points here: neither should wait for the collector of cycles
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        before = self._partial
        if self._in_head:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deaf = True
        except httptools.HttpParserError as error:
            self._unreadable(error)
            return
        if self._in_head and self._head_size > MAX_HEAD:
            self._refuse(431, ErrorReply(error="InvalidInput", message=f"its head has more than {MAX_HEAD} bytes"))
            return
        if not self._partial:
            self._await(None if self._busy else self._idle_s)
        elif not before or self._due == math.inf:
            self._await(self.arrive_s)

    def pause_writing(self) -> None:
        self._await(self.arrive_s)
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._await(self.arrive_s if self._partial else None if self._busy else self._idle_s)
        self._next()

    def shutdown(self) -> None:
        """uvicorn is ending: what is under way is answered first."""
        self._ending = True
        if not self._busy:
            self._transport.close()

    @property
    def _busy(self) -> bool:
        return self._task is not None or bool(self._waiting)

    # ---- a request, as it is parsed

    def on_message_begin(self) -> None:
        self._url, self._headers, self._parts, self._size = b"", {}, [], 0
        self._partial, self._in_head, self._discarding = True, True, False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name, headers = name.lower(), self._headers
        headers[name] = headers[name] + b", " + value if name in headers else value

    def on_headers_complete(self) -> None:
        self._in_head, self._head_size = False, 0
        self._path = _path(self._url)
        self._method = self._parser.get_method().decode("latin-1")
        self._to = self._app.at(self._path)
        early = self._to.early(self._path, self._headers)
        if self._parser.should_upgrade():
            # The parser takes what follows for another protocol: nothing more is read. A body would be lost.
            self._ending = True
            if not {b"content-length", b"transfer-encoding"}.isdisjoint(self._headers):
                told = "nothing but HTTP/1.1 is spoken here: send it without an Upgrade header"
                early = Reply(400, encode(Encoding.JSON, ErrorReply(error="InvalidInput", message=told)))
        if early is not None:
            self._discard(early)
        elif self._headers.get(b"expect", b"").lower() == b"100-continue" and not self._busy:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._discarding:
            return
        self._parts.append(body)
        self._size += len(body)
        if self._size > self._to.max_body:
            self._discard(self._to.too_large(self._path))

    def on_message_complete(self) -> None:
        self._partial = False
        if not self._discarding:
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._ask((self._to, Request(self._method, self._path, self._headers, body)))
        self._headers, self._parts = {}, []

    def _discard(self, reply: Reply) -> None:
        """Answer now; what is still to come of the body is dropped."""
        self._discarding, self._parts = True, []
        self._ask(reply)

    # ---- its answer

    def _ask(self, asked: Asked) -> None:
        keep = self._parser.should_keep_alive() and self._parser.get_http_version() != "1.0"
        self._waiting.append((asked, self._method == "HEAD", keep))
        if len(self._waiting) == WAITING + 1:
            self._transport.pause_reading()
        self._next()

    def _next(self) -> None:
        """Answer what was asked next, unless something is being answered, or the client does not read."""
        while self._waiting and self._task is None and not self._paused and not self._transport.is_closing():
            asked, head, keep = self._waiting.popleft()
            if len(self._waiting) == WAITING:
                self._transport.resume_reading()
            if isinstance(asked, Reply):
                self._write(asked, head, keep)
            else:
                self._task = self._loop.create_task(self._answer(*asked, head, keep))
                self._server.tasks.add(self._task)
                self._task.add_done_callback(self._server.tasks.discard)

    async def _answer(self, app: App, request: Request, head: bool, keep: bool) -> None:
        app.busy += 1
        try:
            reply = await app.reply_to(request)
            self._task = None
            self._write(reply, head, keep)
        except asyncio.CancelledError:
            return  # nobody waits. Raised on, it would stay with the task, and all that the request held with it
        finally:
            self._task = None
            app.busy -= 1
        self._next()

    def _write(self, reply: Reply, head: bool, keep: bool) -> None:
        self._server.total_requests += 1
        if self._transport.is_closing():
            return
        lines = [
            _STATUS[reply.status],
            b"content-type: %b\r\ncontent-length: %d\r\n" % (reply.content_type.encode(), len(reply.body)),
            *[b"%b: %b\r\n" % header for header in reply.headers],
        ]
        last = (self._ending or not keep) and not self._waiting
        lines.append(b"connection: close\r\n\r\n" if last else b"\r\n")
        if not head:
            lines.append(reply.body)
        self._transport.write(b"".join(lines))
        if last:
            self._transport.close()
        elif not self._waiting and not self._partial:
            self._await(self._idle_s)

    # ---- what does not come to an answer

    def _await(self, seconds: float | None) -> None:
        """What the client sends next must have arrived, or begun, by then. Where it does not read its answers, those
        come first: they must have been read by the time that was set when they could not be sent.

        A timer that is set stays, unless it would be too late: to set one anew for each request would take longer than
        much of what is done for it."""
        if self._paused:
            return
        self._due = math.inf if seconds is None else self._loop.time() + seconds
        if self._due < self._timer_at:
            self._look_at(self._due)

    def _look_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(when, self._look), when

    def _look(self) -> None:
        self._timer, self._timer_at = None, math.inf
        if self._due <= self._loop.time():
            self._due = math.inf
            self._late()
        elif self._due < math.inf:
            self._look_at(self._due)

    def _late(self) -> None:
        if self._paused:
            self._transport.abort()
        elif self._busy:  # the next request is late, and the one before is being answered
            self._await(self.arrive_s)
        elif self._partial:
            told = ErrorReply(error="InvalidInput", message=f"the request did not arrive within {self.arrive_s:g} s")
            self._refuse(408, told)
        else:
            self._transport.close()

    def _unreadable(self, error: BaseException) -> None:
        """Its sender's fault, unless a callback failed: then there was no memory for it, or something is wrong here."""
        cause = error.__cause__ or error.__context__
        if not isinstance(error, httptools.HttpParserCallbackError) or isinstance(cause, httptools.HttpParserError):
            self._refuse(400, ErrorReply(error="InvalidInput", message="this is not HTTP/1.1 as it is read here"))
        elif isinstance(cause, MemoryError):
            told = "this process has no memory for the request now"
            self._refuse(503, ErrorReply(error="Unavailable", message=told))
        else:
            _log.error("a request could not be read", exc_info=error)
            self._refuse(500, ErrorReply(error="RelayError", message="something failed here; the log says what"))

    def _refuse(self, status: int, told: ErrorReply) -> None:
        """Close the connection, with an answer where none is under way."""
        if not self._busy:
            again = (RETRY_AFTER,) if status == 503 else ()
            self._write(Reply(status, encode(Encoding.JSON, told), headers=again), False, False)
        self._transport.close()


@functools.lru_cache(maxsize=64)
def _path(url: bytes) -> str:
    """Of what a request's first line asks for. The same few are asked for again and again."""
    path = (httptools.parse_url(url).path or b"").decode("latin-1")
    return urllib.parse.unquote(path) if "%" in path else path
