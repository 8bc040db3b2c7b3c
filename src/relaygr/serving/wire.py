"""What travels: bodies of calls and replies, in msgpack for machines and JSON for people.

Arrays are raw little-endian bytes in msgpack (int64 ids and times, int32 actions, float32 numbers) and plain lists in
JSON; either form is read in either. Unknown fields are refused.
"""

from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from relaygr.errors import InvalidInput
from relaygr.history import History, KnownHistory
from relaygr.model import Candidates

__all__ = [
    "Behaviours",
    "Encoding",
    "ErrorReply",
    "PreInferBody",
    "PreInferReply",
    "RankBody",
    "RankReply",
    "decode",
    "encode",
    "encoding_of",
    "floats",
    "integers",
]

T = TypeVar("T")

Ints = bytes | list[int]
Floats = bytes | list[float]
Rows = bytes | list[list[float]]


class Encoding(StrEnum):
    """Of a body, by its content type."""

    JSON = "application/json"
    MSGPACK = "application/msgpack"


class Behaviours(msgspec.Struct, forbid_unknown_fields=True):
    """Behaviours, oldest first; three arrays of one length."""

    items: Ints = b""
    actions: Ints = b""
    timestamps: Ints = b""


class PreInferBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A history to make ready: all of it, or its newest behaviours with the length and digest of the whole."""

    user: str
    behaviours: Behaviours = msgspec.field(default_factory=Behaviours)
    """The newest behaviours; all of the window's where no length is given."""
    start: int = 0
    """Where the window begins in the user's whole history."""
    length: int | None = None
    """Behaviours in the window."""
    digest: bytes | None = None
    """Of the window; 16 bytes, base64 in JSON."""
    context: Ints = b""

    def carried(self) -> History:
        """The behaviours in this body, standing where they stand in the user's history."""
        items = integers("items", self.behaviours.items, np.int64)
        skipped = 0 if self.length is None else self.length - len(items)
        if skipped < 0:
            raise InvalidInput("length", f"is {self.length}, and {len(items)} behaviours are given")
        return History(
            items,
            integers("actions", self.behaviours.actions, np.int32),
            integers("timestamps", self.behaviours.timestamps, np.int64),
            start=self.start + skipped,
        )

    def known(self) -> KnownHistory | None:
        """The history by its digest, where that is given."""
        if self.length is None or self.digest is None:
            return None
        return KnownHistory(self.start, self.length, self.digest)


class RankBody(PreInferBody, kw_only=True, forbid_unknown_fields=True):
    """Candidates to rank on a history."""

    candidates: Ints
    features: Rows | None = None
    """Of the candidates, [m, f], row by row."""
    request: Floats | None = None

    def to_candidates(self) -> Candidates:
        items = integers("candidates", self.candidates, np.int64)
        features = self.features
        if isinstance(features, bytes):
            flat = floats("features", features)
            if not len(items) or len(flat) % len(items):
                raise InvalidInput("features", f"has {len(flat)} numbers for {len(items)} candidates")
            return Candidates(items, flat.reshape(len(items), -1))
        return Candidates(items, None if features is None else np.array(features, np.float32))


class PreInferReply(msgspec.Struct, kw_only=True):
    decision: str
    slot: str
    wait_ms: float
    cost_version: int


class RankReply(msgspec.Struct, kw_only=True):
    scores: Rows
    tasks: int
    path: str
    used: int
    epoch: int
    slot: str
    timings_ms: dict[str, float]
    wait_ms: float
    cost_version: int

    def to_array(self) -> npt.NDArray[np.float32]:
        if isinstance(self.scores, bytes):
            return floats("scores", self.scores).reshape(-1, self.tasks)
        return np.array(self.scores, np.float32).reshape(-1, self.tasks)


class ErrorReply(msgspec.Struct, kw_only=True):
    error: str
    message: str
    field: str | None = None


_JSON: Final = msgspec.json.Encoder()
_MSGPACK: Final = msgspec.msgpack.Encoder()


def encoding_of(content_type: str | None) -> Encoding:
    """Of a content type; JSON where there is none. InvalidInput for any other."""
    name = (content_type or Encoding.JSON).partition(";")[0].strip().lower()
    if name in ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack"):
        return Encoding.MSGPACK
    if name == "application/json":
        return Encoding.JSON
    raise InvalidInput("content-type", f"is {name!r}; send application/json or application/msgpack")


def encode(encoding: Encoding, value: msgspec.Struct) -> bytes:
    return _JSON.encode(value) if encoding is Encoding.JSON else _MSGPACK.encode(value)


def decode(encoding: Encoding, body: bytes, kind: type[T]) -> T:
    """The body as a `kind`. InvalidInput with a sentence for anything else."""
    try:
        if encoding is Encoding.JSON:
            return msgspec.json.decode(body, type=kind)
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput("body", str(error)) from error


def integers(field: str, values: Ints, dtype: Any) -> npt.NDArray[Any]:
    """An array from either form."""
    size = np.dtype(dtype).itemsize
    if isinstance(values, bytes):
        if len(values) % size:
            raise InvalidInput(field, f"has {len(values)} bytes, not a multiple of {size}")
        return np.frombuffer(values, dtype)
    try:
        return np.array(values, dtype)
    except OverflowError as error:
        raise InvalidInput(field, f"has values that do not fit {np.dtype(dtype).name}") from error


def floats(field: str, values: Floats) -> npt.NDArray[np.float32]:
    """An array from either form."""
    if isinstance(values, bytes):
        if len(values) % 4:
            raise InvalidInput(field, f"has {len(values)} bytes, not a multiple of 4")
        return np.frombuffer(values, np.float32)
    return np.array(values, np.float32)
