"""Plain ASGI: bounded bodies in, one reply out, errors as documented answers."""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from relaygr.errors import (
    DeadlineExceeded,
    HistoryNeeded,
    InvalidInput,
    Overloaded,
    RelayError,
    Unavailable,
)
from relaygr.serving.wire import Encoding, ErrorReply, encode

__all__ = ["Conflict", "Reply", "Request", "TooLarge", "error_reply", "read_request", "send_reply"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

RETRY_AFTER: Final = (b"retry-after", b"1")


class TooLarge(RelayError):
    """The body is larger than is read."""


class Conflict(RelayError):
    """The digest does not fit the behaviours: send the whole history."""


@dataclass(frozen=True)
class Request:
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
            raise InvalidInput("x-relaygr-deadline-ms", f"is {text!r}, not a number of milliseconds") from error
        if not 0.0 <= value < 1e9:
            raise InvalidInput("x-relaygr-deadline-ms", f"is {text!r}; remaining milliseconds are wanted")
        return value


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    content_type: str = Encoding.JSON
    headers: Headers = ()


async def read_request(scope: Scope, receive: Receive, limit: int) -> Request:
    """The request, its body bounded before it is read. Raises TooLarge."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit:
        raise TooLarge(f"the body has {int(declared)} bytes, {limit} are read")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client has gone")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise TooLarge(f"the body has more than {limit} bytes")
        if not message.get("more_body"):
            return Request(scope["method"], scope["path"], headers, b"".join(parts))


async def send_reply(send: Send, reply: Reply) -> None:
    headers: Iterable[tuple[bytes, bytes]] = (
        (b"content-type", reply.content_type.encode()),
        (b"content-length", str(len(reply.body)).encode()),
        *reply.headers,
    )
    await send({"type": "http.response.start", "status": reply.status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": reply.body})


_STATUS: Final[tuple[tuple[type[RelayError], int], ...]] = (
    (TooLarge, 413),
    (Conflict, 409),
    (HistoryNeeded, 409),
    (InvalidInput, 400),
    (Overloaded, 429),
    (DeadlineExceeded, 504),
    (Unavailable, 503),
)


def error_reply(error: RelayError, encoding: Encoding) -> Reply:
    """A sentence that says what is wrong, under the status that says whose turn it is."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    field = error.field if isinstance(error, InvalidInput) else None
    if field == "content-type":
        status = 415
    body = encode(encoding, ErrorReply(error=type(error).__name__, message=str(error), field=field))
    return Reply(status, body, encoding, (RETRY_AFTER,) if status in (429, 503) else ())
