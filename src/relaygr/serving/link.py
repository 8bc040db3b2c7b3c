"""The link between a frontend and its engine: framed msgpack over a local socket, many calls in flight.

    frame   │ length, 4 bytes little-endian │ msgpack of a Call or an Answer │

Answers come in any order and carry the number of their call. What one turn of the event loop has to say is written
together, so that under load a frame costs a fraction of a system call; but a few at a time, so that the other side
begins while this one still works.
"""

import asyncio
import itertools
import struct
from typing import Any, Final, Protocol, cast

import msgspec
import numpy as np

from relaygr import errors
from relaygr.errors import DeadlineExceeded, InvalidInput, RelayError, Unavailable
from relaygr.history import History, KnownHistory

__all__ = [
    "Answer",
    "Call",
    "Cancel",
    "EngineCalls",
    "EngineLink",
    "Evict",
    "Frames",
    "Rank",
    "Signal",
    "Swap",
    "decode_call",
    "error_answer",
]

_LENGTH: Final = struct.Struct("<I")
MAX_FRAME: Final = 256 * 2**20
TOGETHER: Final = 16 * 2**10
"""Bytes that are written together."""


class Whole(msgspec.Struct, array_like=True, tag="whole"):
    """A history with its behaviours, as raw arrays."""

    start: int
    items: bytes
    actions: bytes
    timestamps: bytes


class Known(msgspec.Struct, array_like=True, tag="known"):
    """A history by its digest."""

    start: int
    length: int
    digest: bytes


class Signal(msgspec.Struct, array_like=True, tag="signal"):
    user: str
    history: Whole | Known
    context: bytes
    deadline_ms: float | None


class Rank(msgspec.Struct, array_like=True, tag="rank"):
    user: str
    history: Whole | Known
    context: bytes
    deadline_ms: float | None
    candidates: bytes
    features: bytes | None
    request: bytes | None


class Status(msgspec.Struct, array_like=True, tag="status"):
    pass


class Evict(msgspec.Struct, array_like=True, tag="evict"):
    user: str


class Swap(msgspec.Struct, array_like=True, tag="swap"):
    model: str
    """A checkpoint's path."""


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    """Nobody waits for the call of this number any more. It is not answered."""


class Call(msgspec.Struct, array_like=True):
    number: int
    what: Signal | Rank | Status | Evict | Swap | Cancel


class Answer(msgspec.Struct, array_like=True):
    """`value` is what the call returns, in plain values; or `error` names a RelayError."""

    number: int
    value: Any = None
    error: str | None = None
    message: str = ""
    field: str | None = None


_ENCODER: Final = msgspec.msgpack.Encoder()
_CALLS: Final = msgspec.msgpack.Decoder(Call)
_ANSWERS: Final = msgspec.msgpack.Decoder(Answer)


def pack_history(history: History | KnownHistory) -> Whole | Known:
    if isinstance(history, KnownHistory):
        return Known(history.start, len(history), history.digest())
    return Whole(history.start, history.items.tobytes(), history.actions.tobytes(), history.timestamps.tobytes())


def unpack_history(packed: Whole | Known) -> History | KnownHistory:
    if isinstance(packed, Known):
        return KnownHistory(packed.start, packed.length, packed.digest)
    return History(
        np.frombuffer(packed.items, np.int64),
        np.frombuffer(packed.actions, np.int32),
        np.frombuffer(packed.timestamps, np.int64),
        start=packed.start,
    )


def error_answer(number: int, error: RelayError) -> Answer:
    field = error.field if isinstance(error, InvalidInput) else None
    message = error.problem if isinstance(error, InvalidInput) else str(error)
    return Answer(number, None, type(error).__name__, message, field)


def _raise(answer: Answer) -> None:
    kind = getattr(errors, answer.error or "", RelayError)
    if kind is InvalidInput:
        raise InvalidInput(answer.field or "body", answer.message)
    raise kind(answer.message)


class Frames(asyncio.Protocol):
    """One end of a link: whole frames in, messages out."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._outgoing = bytearray()
        self._flushing = False
        self._loop = asyncio.get_running_loop()

    def frame(self, body: memoryview) -> None:
        """A frame has come; the view is good until this returns."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by name
        self._transport.set_write_buffer_limits(high=0)  # uvloop writes at once: what goes together is decided here

    def data_received(self, data: bytes) -> None:
        self._received += data
        begin, size = 0, len(self._received)
        with memoryview(self._received) as view:
            while size - begin >= 4:
                (length,) = _LENGTH.unpack_from(view, begin)
                if length > MAX_FRAME:
                    self.end()
                    return
                end = begin + 4 + length
                if end > size:
                    break
                with view[begin + 4 : end] as body:
                    self.frame(body)
                begin = end
        del self._received[:begin]

    def send(self, message: Call | Answer, *, alone: bool = False) -> None:
        """Soon, together with whatever else is sent in this turn of the loop; at once where that is `alone`."""
        begin = len(self._outgoing)
        if not self._flushing and not alone:
            self._flushing = True
            self._loop.call_soon(self._end_of_turn)
        self._outgoing += b"\0\0\0\0"
        _ENCODER.encode_into(message, self._outgoing, begin + 4)
        _LENGTH.pack_into(self._outgoing, begin, len(self._outgoing) - begin - 4)
        if alone or len(self._outgoing) >= TOGETHER:
            self._flush()

    def _end_of_turn(self) -> None:
        self._flushing = False
        if self._outgoing:
            self._flush()

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, bytearray()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(outgoing)

    def end(self) -> None:
        """Close it; what was sent still goes out."""
        if self._outgoing:
            self._flush()
        if self._transport is not None:
            self._transport.close()


def decode_call(frame: memoryview) -> Call:
    return _CALLS.decode(frame)


def _late(future: "asyncio.Future[Answer]") -> None:
    if not future.done():
        future.set_exception(DeadlineExceeded("the engine did not answer by the deadline"))


class EngineCalls(Protocol):
    """An engine, as a frontend sees it."""

    @property
    def alive(self) -> bool: ...

    async def call(self, what: Signal | Rank | Status | Evict | Swap, *, late_at: float | None = None) -> Any:
        """What the engine answers. Raises the RelayError it raised, Unavailable when it is gone, or DeadlineExceeded
        when it has said nothing by `late_at`, on the event loop's clock."""
        ...


class EngineLink(Frames):
    """A frontend's side: calls that wait for their answers. When the engine goes, all of them raise Unavailable."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._gone = False
        self._ended: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def connect(cls, path: str) -> "EngineLink":
        _, link = await asyncio.get_running_loop().create_unix_connection(cls, path)
        return link

    @property
    def alive(self) -> bool:
        return not self._gone

    async def call(self, what: Signal | Rank | Status | Evict | Swap, *, late_at: float | None = None) -> Any:
        """What the engine answers. Raises the RelayError it raised, Unavailable when it is gone, or DeadlineExceeded
        when it has said nothing by `late_at`, on the event loop's clock.

        A caller that is late, or cancelled, cancels the engine's work, unless others want it, too.
        """
        if self._gone:
            raise Unavailable("the engine process is gone")
        number = next(self._numbers)
        future = self._waiting[number] = self._loop.create_future()
        self.send(Call(number, what), alone=len(self._waiting) == 1)
        timer = None if late_at is None else self._loop.call_at(late_at, _late, future)
        try:
            answer = await future
        except (asyncio.CancelledError, DeadlineExceeded):
            if not self._gone:
                self.send(Call(number, Cancel()))
            raise
        finally:
            del self._waiting[number]
            if timer is not None:
                self._loop.call_soon(timer.cancel)  # whoever waits goes on first
        if answer.error is not None:
            _raise(answer)
        return answer.value

    def frame(self, body: memoryview) -> None:
        answer = _ANSWERS.decode(body)
        future = self._waiting.get(answer.number)
        if future is not None and not future.done():
            future.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unavailable("the engine process is gone"))
        if not self._ended.done():
            self._ended.set_result(None)

    async def close(self) -> None:
        """Close it, and wait until it is. What was not sent is not: an engine that hangs reads no more."""
        if self._transport is not None:
            self._transport.abort()
        await self._ended
