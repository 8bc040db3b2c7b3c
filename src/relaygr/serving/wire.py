"""What travels: bodies of calls and replies, in msgpack for machines and JSON for people.

Arrays are raw little-endian bytes in msgpack (int64 ids and times, int32 actions, float32 numbers) and plain lists in
JSON; either form is read in either. Unknown fields are refused.
"""

import functools
from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from relaygr.engine import EngineCounts, EngineStatus
from relaygr.errors import InvalidInput
from relaygr.history import History, KnownHistory
from relaygr.history.digest import PAGE
from relaygr.model import Candidates
from relaygr.serving.undecodable import undecodable
from relaygr.shown import shown

__all__ = [
    "Alive",
    "Behaviour",
    "Behaviours",
    "BehavioursBody",
    "BehavioursReply",
    "Encoding",
    "ErrorReply",
    "GatewayStatus",
    "InstanceStatus",
    "PreInferBody",
    "PreInferReply",
    "RankBody",
    "RankReply",
    "Ready",
    "RecommendBody",
    "RecommendReply",
    "RecommendedItem",
    "SlotStatus",
    "decode",
    "encode",
    "encoding_of",
    "floats",
    "integers",
    "raw_floats",
    "raw_integers",
]

T = TypeVar("T")

Ints = bytes | list[int]
Floats = bytes | list[float]
Rows = bytes | list[list[float]]
Position = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
"""In a history: small enough to count on from there."""
Page = Annotated[int, msgspec.Meta(ge=0, lt=2**62, multiple_of=PAGE)]
"""The position of a page's first behaviour."""


class Encoding(StrEnum):
    """Of a body, by its content type."""

    JSON = "application/json"
    MSGPACK = "application/msgpack"


class Behaviours(msgspec.Struct, forbid_unknown_fields=True):
    """Behaviours, oldest first; three arrays of one length. In JSON: lists, or the raw bytes in base64."""

    items: Ints = b""
    """Ids; int64."""
    actions: Ints = b""
    """What the user did with them, as the model numbers it; int32."""
    timestamps: Ints = b""
    """When, in seconds, never going backwards; int64."""


class PreInferBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A history to make ready: all of it, or its newest behaviours with the length and digest of the whole."""

    user: str
    """Their id, not empty."""
    behaviours: Behaviours | None = None
    """The newest behaviours; all of the window's where no length is given. May be left out where one is."""
    start: Page = 0
    """Where the window begins in the user's whole history: a multiple of 128."""
    length: Position | None = None
    """Behaviours in the window; 0 for a user who has none."""
    digest: bytes | None = None
    """Of the window; 16 bytes, base64 in JSON. Wants a length."""
    context: Ints = b""
    """Slow facts of the user, as ids that stand before the behaviours; int64."""

    def carried(self) -> History:
        """The behaviours in this body, standing where they stand in the user's history."""
        given = self.behaviours
        if given is None and self.length is None:
            raise InvalidInput("behaviours", "is missing, and so is length; an empty history is a length of 0")
        given = given or Behaviours()
        items = integers("items", given.items, np.int64)
        skipped = 0 if self.length is None else self.length - len(items)
        if skipped < 0:
            raise InvalidInput("length", f"is {self.length}, and {len(items)} behaviours are given")
        return History(
            items,
            integers("actions", given.actions, np.int32),
            integers("timestamps", given.timestamps, np.int64),
            start=self.start + skipped,
        )

    def known(self) -> KnownHistory | None:
        """The history by its digest, where that is given."""
        if self.digest is None:
            return None
        if self.length is None:
            raise InvalidInput("length", "is missing: a digest is that of so many behaviours")
        return KnownHistory(self.start, self.length, self.digest)


class RankBody(PreInferBody, kw_only=True, forbid_unknown_fields=True):
    """Candidates to rank on a history."""

    candidates: Ints
    """Ids of the items to score; int64, not empty."""
    features: Rows | None = None
    """Of the candidates, [m, f], row by row."""
    request: Floats | None = None
    """Features of the request, as many as the model reads."""

    def raw_candidates(self) -> tuple[bytes, bytes | None]:
        """Items and features as raw arrays that fit each other; what they may be is for the model to say."""
        items, features = raw_integers("candidates", self.candidates, np.int64), self.features
        if isinstance(features, list):
            checked = Candidates(np.frombuffer(items, np.int64), features).features
            features = None if checked is None else checked.tobytes()
        elif features is not None:
            numbers, count = len(raw_floats("features", features)) // 4, len(items) // 8
            if not count or numbers % count:
                raise InvalidInput("features", f"has {numbers} numbers for {count} candidates")
        return items, features


class PreInferReply(msgspec.Struct, kw_only=True):
    """What was decided about a signal."""

    decision: str
    """ADMIT: it is begun; RESIDENT: it is there; NO_MEMORY, NO_CAPACITY: refused, and the rank does without."""
    slot: str
    """Send the rank there."""
    wait_ms: float
    """What a rank without hurry would wait for the device now."""
    cost_version: int
    """Of the cost model that /v1/status tells."""


class RankReply(msgspec.Struct, kw_only=True):
    """Scores, and how they came about."""

    scores: Rows
    """[candidates, tasks], in the order of the candidates."""
    tasks: int
    """Scores for each candidate."""
    path: str
    """The costliest step it needed: RESIDENT, WAITED, RELOADED, EXTENDED or FULL; TRUNCATED where there was no time for
    all of the history."""
    used: int
    """Behaviours ranked on."""
    epoch: int
    """Of the tables ranked with."""
    slot: str
    """Who ranked."""
    timings_ms: dict[str, float]
    """total, of it prefix until the scoring step was launched, and score in that step."""
    wait_ms: float
    """What a rank without hurry would wait for the device now."""
    cost_version: int
    """Of the cost model that /v1/status tells."""

    def to_array(self) -> npt.NDArray[np.float32]:
        if isinstance(self.scores, bytes):
            return floats("scores", self.scores).reshape(-1, self.tasks)
        return np.array(self.scores, np.float32).reshape(-1, self.tasks)


class RecommendBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Who to recommend to."""

    user: str
    """Their id, not empty. An unknown user is one with an empty history."""
    k: int = 10
    """The most items wanted, from 1 to 1000."""
    context: list[int] = []
    """Slow facts of the user, as ids."""


class RecommendedItem(msgspec.Struct, omit_defaults=True):
    """One item, with its score by the model's first task."""

    item: int
    score: float
    title: str | None = None
    """Left out where the catalogue has none."""


class RecommendReply(msgspec.Struct, kw_only=True):
    """The best items first, and how they came about."""

    items: list[RecommendedItem]
    """Empty where retrieval found nothing that the user has not seen."""
    path: str | None
    """Of the rank: RESIDENT, WAITED, RELOADED, EXTENDED, FULL or TRUNCATED; null where nothing was ranked."""
    decision: str
    """About the signal: ADMIT, NOT_AT_RISK, RESIDENT, NO_MEMORY, NO_CAPACITY; UNAVAILABLE: it failed or was late."""
    instance: str | None
    """The slot that ranked."""
    used: int
    """Behaviours ranked on."""
    epoch: int | None
    """Of the tables ranked with."""
    engine_ms: float | None
    """Of the ranking stage: what the engine took, waiting included."""
    stages_ms: dict[str, float]
    """retrieval, pre_processing, ranking, total."""
    stale: bool = False
    """Whether the store did not answer, and the history is the one that was read last."""


class Behaviour(msgspec.Struct, forbid_unknown_fields=True):
    """One thing a user did."""

    item: int
    action: int
    """As the model numbers it."""
    timestamp: int
    """In seconds, not before the user's last."""


class BehavioursBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the user did since."""

    user: str
    """Their id: 1 to 511 bytes in UTF-8."""
    behaviours: list[Behaviour]
    """Oldest first, not empty."""


class BehavioursReply(msgspec.Struct):
    """They are stored: the next request sees them."""

    user: str
    length: int
    """Behaviours the user has now."""


class SlotStatus(msgspec.Struct, kw_only=True):
    """A slot as the gateway sees it."""

    address: str
    health: str
    """JOINING, UP, DRAINING or DOWN."""
    load_tokens: int
    """Sent there and not yet answered."""


class GatewayStatus(msgspec.Struct, kw_only=True):
    """The state of a gateway, and what it has counted."""

    up_s: float
    draining: bool
    slots: dict[str, SlotStatus]
    ready_slots: int
    """How many of them are UP."""
    decisions: dict[str, int]
    """Of the trigger."""
    placements: dict[str, int]
    """How messages came to their slots."""
    transitions: dict[str, int]
    """What happened to slots."""
    retries: dict[str, int]
    """Messages sent again, by why."""
    trigger_margin: float
    """The factor by which predicted rank times are exceeded at the trigger's quantile."""
    paths: dict[str, int]
    """Recommendations, by the rank's path."""
    requests: dict[str, int]
    """Answers, by path and status."""


class InstanceStatus(msgspec.Struct, kw_only=True):
    """The state of an instance, and what it has counted."""

    slot: str
    draining: bool
    up_s: float
    engine: EngineStatus
    counts: EngineCounts


class Alive(msgspec.Struct):
    """The process answers."""

    alive: bool = True


class Ready(msgspec.Struct):
    """Whether new work is taken."""

    ready: bool


class ErrorReply(msgspec.Struct, kw_only=True):
    """What is wrong."""

    error: str
    """Its kind, for programs."""
    message: str
    """A sentence, for people."""
    field: str | None = None
    """The part of the input that is wrong, where it is one: a header, or a field of the body, of nested ones the dotted
    path; "body" where the body as a whole is."""


_JSON: Final = msgspec.json.Encoder()
_MSGPACK: Final = msgspec.msgpack.Encoder()


@functools.lru_cache(maxsize=64)
def encoding_of(content_type: str | None) -> Encoding:
    """Of a content type; JSON where there is none. InvalidInput for any other."""
    name = (content_type or Encoding.JSON).partition(";")[0].strip().lower()
    if name in ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack"):
        return Encoding.MSGPACK
    if name == "application/json":
        return Encoding.JSON
    raise InvalidInput("content-type", f"is {shown(name)}; send application/json or application/msgpack")


def encode(encoding: Encoding, value: msgspec.Struct) -> bytes:
    return _JSON.encode(value) if encoding is Encoding.JSON else _MSGPACK.encode(value)


def decode(encoding: Encoding, body: bytes, kind: type[T]) -> T:
    """The body as a `kind`. InvalidInput with a sentence for anything else."""
    try:
        decoder: msgspec.msgpack.Decoder[T] = _decoder(encoding, kind)  # type: ignore[arg-type]  # a type is hashable
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise undecodable(error) from error


@functools.cache
def _decoder(encoding: Encoding, kind: Any) -> Any:
    return msgspec.json.Decoder(kind) if encoding is Encoding.JSON else msgspec.msgpack.Decoder(kind)


def integers(field: str, values: Ints, dtype: Any) -> npt.NDArray[Any]:
    """An array from either form."""
    if isinstance(values, bytes):
        return np.frombuffer(raw_integers(field, values, dtype), dtype)
    try:
        return np.array(values, dtype)
    except OverflowError as error:
        info = np.iinfo(dtype)
        at = next(at for at, value in enumerate(values) if not info.min <= value <= info.max)
        raise InvalidInput(field, f"must fit {info.dtype.name}; entry {at} is {shown(values[at])}") from error


def raw_integers(field: str, values: Ints, dtype: Any) -> bytes:
    """The bytes of an array from either form."""
    if not isinstance(values, bytes):
        return integers(field, values, dtype).tobytes()
    return _multiple(field, values, np.dtype(dtype).itemsize)


def raw_floats(field: str, values: Floats) -> bytes:
    """The bytes of an array from either form."""
    return _multiple(field, values, 4) if isinstance(values, bytes) else floats(field, values).tobytes()


def _multiple(field: str, values: bytes, size: int) -> bytes:
    if len(values) % size:
        raise InvalidInput(field, f"has {len(values)} bytes, not a multiple of {size}")
    return values


def floats(field: str, values: Floats) -> npt.NDArray[np.float32]:
    """An array from either form."""
    if isinstance(values, bytes):
        return np.frombuffer(_multiple(field, values, 4), np.float32)
    with np.errstate(over="ignore"):  # infinite then, and refused by whoever takes numbers
        return np.array(values, np.float32)
