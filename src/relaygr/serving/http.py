"""Requests in, one reply out, errors as documented answers."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, ClassVar, Final, NamedTuple

from relaygr.errors import (
    DeadlineExceeded,
    HistoryNeeded,
    InvalidInput,
    Overloaded,
    RelayError,
    Unavailable,
)
from relaygr.history.store import StoreError
from relaygr.serving import metrics
from relaygr.serving.metrics import Histogram, Histograms, Metrics
from relaygr.serving.wire import Encoding, ErrorReply, encode, encoding_of
from relaygr.shown import shown

__all__ = ["App", "Conflict", "Reply", "Request", "TooLarge", "error_reply", "send_reply"]

_log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

RETRY_AFTER: Final = (b"retry-after", b"1")


class TooLarge(RelayError):
    """The body is larger than is read."""

    field: Final = "body"


class Conflict(RelayError):
    """The digest does not fit the behaviours: send the whole history. The message starts with the name of the field."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class Disconnected(Exception):
    """The client has gone before its request was whole."""


class Request(NamedTuple):
    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def deadline_ms(self) -> float | None:
        """How long the caller still waits, where it says so."""
        text = self.header(b"x-relaygr-deadline-ms")
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError as error:
            raise InvalidInput("x-relaygr-deadline-ms", f"is {shown(text)}, not a number of milliseconds") from error
        if not 0.0 <= value < 1e9:
            problem = f"is {shown(text)}; remaining milliseconds are wanted, at least 0 and below 1e9"
            raise InvalidInput("x-relaygr-deadline-ms", problem)
        return value


class Reply(NamedTuple):
    status: int
    body: bytes
    content_type: str = Encoding.JSON
    headers: Headers = ()


def joined(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Headers by name, in lower case. One given twice is the list of both, as HTTP has it, and so no number and no
    content type."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        found[name] = found[name] + b", " + value if name in found else value
    return found


async def _body(receive: Receive, limit: int) -> bytes:
    """All of it. Raises TooLarge and Disconnected."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise TooLarge(f"the body has more than {limit} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


async def send_reply(send: Send, reply: Reply) -> None:
    headers = [
        (b"content-type", reply.content_type.encode()),
        (b"content-length", b"%d" % len(reply.body)),
        *reply.headers,
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


_STATUS: Final[tuple[tuple[type[RelayError], int], ...]] = (
    (TooLarge, 413),
    (Conflict, 409),
    (HistoryNeeded, 409),
    (InvalidInput, 400),
    (Overloaded, 429),
    (DeadlineExceeded, 504),
    (Unavailable, 503),
    (StoreError, 503),
)


def error_reply(error: RelayError, encoding: Encoding) -> Reply:
    """A sentence that says what is wrong, under the status that says whose turn it is."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    field = error.field if isinstance(error, InvalidInput | Conflict | TooLarge) else None
    if field in ("content-type", "content-encoding"):
        status = 415
    body = encode(encoding, ErrorReply(error=type(error).__name__, message=str(error), field=field))
    return Reply(status, body, encoding, (RETRY_AFTER,) if status in (429, 503) else ())


class App(ABC):
    """What answers bounded requests: of `Connection`, which serves, or of any ASGI server. `draining` refuses new work;
    `busy` counts what was taken and not answered."""

    calls: ClassVar[Mapping[str, str]]
    """The paths it answers, and the method of each."""

    def __init__(self, max_body: int) -> None:
        self.draining = False
        self.busy = 0
        self.requests: Counter[tuple[str, int]] = Counter()
        """By path and status; unknown paths count as one."""
        self.seconds: Histograms = defaultdict(Histogram)
        """By path."""
        self.metrics = Metrics()
        self.metrics.tell(metrics.HTTP, lambda: self)
        self.max_body = max_body

    @abstractmethod
    async def route(self, request: Request, encoding: Encoding) -> Reply | None:
        """The reply, or None where path and method do not go together. RelayErrors become answers."""

    def at(self, path: str) -> "App":
        """Who answers there."""
        return self

    def refused(self, headers: Mapping[bytes, bytes]) -> Reply | None:
        """What the head of a request alone decides; None: its body is read."""
        return None

    def early(self, path: str, headers: Mapping[bytes, bytes]) -> Reply | None:
        """The answer to a request of which no more than the head is wanted."""
        reply = self.refused(headers)
        if reply is None:
            declared = headers.get(b"content-length", b"0")
            if not declared.isdigit() or int(declared) <= self.max_body:
                return None
            reply = error_reply(
                TooLarge(f"the body has {int(declared)} bytes, {self.max_body} are read"), Encoding.JSON
            )
        self.requests[self._call(path), reply.status] += 1
        return reply

    def too_large(self, path: str) -> Reply:
        """The answer to a request whose body did not end in time to be read."""
        self.requests[self._call(path), 413] += 1
        return error_reply(TooLarge(f"the body has more than {self.max_body} bytes"), Encoding.JSON)

    async def reply_to(self, request: Request) -> Reply:
        """The answer to a whole request; whatever goes wrong is one, too. Cancelled when its client goes.

        Who asks counts it as `busy` until it is sent."""
        began, call = time.monotonic(), self._call(request.path)
        try:
            reply = await self._answer(request)
        except asyncio.CancelledError:
            self.requests[call, GONE] += 1
            raise
        self.requests[call, reply.status] += 1
        self.seconds[call,].observe(time.monotonic() - began)
        return reply

    def _call(self, path: str) -> str:
        return path if path in self.calls else OTHER

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            raise RuntimeError(f"HTTP is spoken here, not {scope['type']}")
        path, headers, client = scope["path"], joined(scope["headers"]), _Client(receive)
        early = self.early(path, headers)
        if early is not None:
            return await send_reply(send, early)
        try:
            body = await _body(receive, self.max_body)
        except TooLarge:
            return await send_reply(send, self.too_large(path))
        except Disconnected:
            return None
        self.busy += 1
        client.watch()
        try:
            await send_reply(send, await self.reply_to(Request(scope["method"], path, headers, body)))
        except asyncio.CancelledError:
            if not client.gone:
                raise
        finally:
            client.forget()
            self.busy -= 1

    async def _answer(self, request: Request) -> Reply:
        encoding = Encoding.JSON
        try:
            if request.method == "POST" == self.calls.get(request.path):
                encoding = encoding_of(request.header(b"content-type"))
                _refuse_coded(request.header(b"content-encoding"))
            reply = await self.route(request, encoding)
        except RelayError as error:
            return error_reply(error, encoding)
        except MemoryError:
            return error_reply(Unavailable("this process has no memory for the request now"), encoding)
        except Exception:
            _log.exception("%s %s failed unexpectedly", request.method, request.path)
            return error_reply(RelayError("something failed here that should not; the log says what"), encoding)
        if reply is not None:
            return reply
        method = self.calls.get(request.path)
        if method is None:
            known = ", ".join(f"{verb} {path}" for path, verb in self.calls.items())
            return _refusal(404, f"there is no {request.path}; there are {known}")
        refused = _refusal(405, f"{request.path} is asked by {method}, not {request.method}")
        return refused._replace(headers=((b"allow", method.encode()),))

    def refuse_if_draining(self) -> None:
        if self.draining:
            raise Unavailable("draining: no new work is taken here")


def _refuse_coded(coding: str | None) -> None:
    if coding is not None and coding.lower() != "identity":
        raise InvalidInput("content-encoding", f"is {shown(coding)}; send the body as it is")


class _Client:
    """Whoever waits for the answer. Most come soon: only after a while is there a task that waits for its end."""

    __slots__ = ("_answering", "_timer", "_watcher", "gone", "receive")

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.gone = False
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._answering: asyncio.Task[Any] | None = None

    def watch(self) -> None:
        """Its body is read. When it goes before its answer, this task is cancelled."""
        self._answering = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)

    def _begin(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        assert self._answering is not None
        self.gone = True
        self._answering.cancel()

    def forget(self) -> None:
        """It has its answer, or has gone."""
        self._answering = None
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()


WATCH_AFTER_S: Final = 0.05
"""How long an answer may take before it is watched whether anybody still waits for it: a task of its own then."""
GONE: Final = 499
"""What requests are counted as whose client went before the answer."""
OTHER: Final = "other"
"""What unknown paths are counted as."""


def _refusal(status: int, message: str) -> Reply:
    return Reply(status, encode(Encoding.JSON, ErrorReply(error="InvalidInput", message=message)))
