"""The link between a frontend and its engine: framed msgpack over a local socket, many calls in flight.

    frame   │ length, 4 bytes little-endian │ msgpack of a Call or an Answer │

Answers come in any order and carry the number of their call.
"""

import asyncio
import itertools
import struct
from typing import Any, Final

import msgspec
import numpy as np

from relaygr import errors
from relaygr.errors import InvalidInput, RelayError, Unavailable
from relaygr.history import History, KnownHistory

__all__ = ["Answer", "Call", "EngineLink", "Rank", "Signal", "error_answer", "read_frame", "write_frame"]

_LENGTH: Final = struct.Struct("<I")
MAX_FRAME: Final = 256 * 2**20


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


class Evict(msgspec.Struct, array_like=True, tag="evict"):
    user: str


class Status(msgspec.Struct, array_like=True, tag="status"):
    pass


class Call(msgspec.Struct, array_like=True):
    number: int
    what: Signal | Rank | Evict | Status


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


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame, or None at the end of the stream."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(4))
        if length > MAX_FRAME:
            raise Unavailable(f"a frame of {length} bytes on the link")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write_frame(writer: asyncio.StreamWriter, message: Call | Answer) -> None:
    body = _ENCODER.encode(message)
    writer.write(_LENGTH.pack(len(body)) + body)


def decode_call(frame: bytes) -> Call:
    return _CALLS.decode(frame)


class EngineLink:
    """A frontend's side: calls that wait for their answers. When the engine goes, all of them raise Unavailable."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._gone = False
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, path: str) -> "EngineLink":
        return cls(*await asyncio.open_unix_connection(path, limit=2**20))

    @property
    def alive(self) -> bool:
        return not self._gone

    async def call(self, what: Signal | Rank | Evict | Status) -> Any:
        """What the engine answers. Raises the RelayError it raised, or Unavailable when it is gone."""
        if self._gone:
            raise Unavailable("the engine process is gone")
        number = next(self._numbers)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            write_frame(self._writer, Call(number, what))
            await self._writer.drain()
            answer = await future
        except ConnectionError as error:
            raise Unavailable("the engine process is gone") from error
        finally:
            self._waiting.pop(number, None)
        if answer.error is not None:
            _raise(answer)
        return answer.value

    async def close(self) -> None:
        self._reading.cancel()
        self._writer.close()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while (frame := await read_frame(self._reader)) is not None:
                answer = _ANSWERS.decode(frame)
                future = self._waiting.get(answer.number)
                if future is not None and not future.done():
                    future.set_result(answer)
        finally:
            self._gone = True
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(Unavailable("the engine process is gone"))
