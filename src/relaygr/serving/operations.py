"""The calls of gateway and instance: their paths and methods, what they read and answer, with examples.

Apps answer these and no others; `openapi.py` makes documents of them; the tests send the examples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from relaygr.serving import metrics
from relaygr.serving.wire import (
    Alive,
    BehavioursBody,
    BehavioursReply,
    Encoding,
    GatewayStatus,
    InstanceStatus,
    PreInferBody,
    PreInferReply,
    RankBody,
    RankReply,
    Ready,
    RecommendBody,
    RecommendReply,
)

__all__ = ["ALWAYS", "ERRORS", "GATEWAY", "HEADERS", "INSTANCE", "PARAMETERS", "POSTED", "Operation"]

Json = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """One call, as documented."""

    path: str
    method: str
    summary: str
    description: str
    status: int
    """Of an answer that is no error."""
    reply: type
    """A struct, or bytes for text."""
    example: Any
    """Of the reply."""
    errors: Mapping[int, str]
    """Why, by status; those that any call may answer are added."""
    body: type | None = None
    examples: Mapping[str, Json] = field(default_factory=dict)
    """Of the body, by what they show."""
    headers: tuple[str, ...] = ()
    """Of the reply."""
    parameters: tuple[str, ...] = ()
    """Headers of the request."""
    content_type: str = Encoding.JSON
    token: bool = False
    """Whether it is an operator's, and carries the token."""
    also: Mapping[int, Any] = field(default_factory=dict)
    """Examples of replies of the same kind under other statuses."""


ALWAYS: Final = {
    405: "Another method is wanted; Allow names it.",
    413: "The body is larger than is read: 4 MiB at a gateway, 16 MiB at an instance, 64 KiB of operators.",
    500: "Something failed that should not; the server's log says what.",
}
POSTED: Final = {
    400: "The input is wrong; `field` and the sentence say how.",
    415: "Send application/json or application/msgpack, without a content-encoding.",
    503: "Draining, or a part that should answer is gone; try again, or elsewhere.",
}
_LATE: Final = {504: "The answer could not be there in time."}
_CONFLICT: Final = {409: "The behaviours known here are not those of the digest, or too few: send all of them."}
_BUSY: Final = {429: "More work than can be taken now; try again after Retry-After seconds."}

ERRORS: Final[dict[int, Json]] = {
    400: {"error": "InvalidInput", "message": "k: must be from 1 to 1000", "field": "k"},
    401: {"error": "Forbidden", "message": "authorization: Bearer and the token are wanted", "field": "authorization"},
    403: {
        "error": "Forbidden",
        "message": "no token is set here: name its file under [admin] token_file",
        "field": None,
    },
    404: {"error": "InvalidInput", "message": "there is no /v1/ran; there are POST /v1/rank", "field": None},
    405: {"error": "InvalidInput", "message": "/v1/rank is asked by POST, not GET", "field": None},
    409: {
        "error": "Conflict",
        "message": "digest: it is not that of the behaviours known here; send the whole history",
        "field": "digest",
    },
    413: {"error": "TooLarge", "message": "the body has 20000000 bytes, 16777216 are read", "field": "body"},
    415: {
        "error": "InvalidInput",
        "message": 'content-type: is "text/plain"; send application/json or application/msgpack',
        "field": "content-type",
    },
    429: {"error": "Overloaded", "message": "4096 ranks are under way, max_ranks allows no more", "field": None},
    500: {
        "error": "RelayError",
        "message": "something failed here that should not; the log says what",
        "field": None,
    },
    503: {"error": "Unavailable", "message": "draining: no new work is taken here", "field": None},
    504: {"error": "DeadlineExceeded", "message": "the deadline passed 0.3 ms ago", "field": None},
}

HEADERS: Final[dict[str, str]] = {
    "x-relaygr-slot": "The slot that answered, or that ranked.",
    "x-relaygr-path": "The rank's path; missing where nothing was ranked.",
    "x-relaygr-decision": "What was decided about the signal.",
    "retry-after": "Seconds after which to try again.",
    "allow": "The method that is wanted.",
    "www-authenticate": "Bearer.",
}
PARAMETERS: Final[dict[str, tuple[str, Json, Any]]] = {
    "x-relaygr-deadline-ms": (
        "How long the caller still waits, in milliseconds from now; past it the answer is 504. Time left rather than a "
        "time of day, because clocks differ.",
        {"type": "number", "minimum": 0, "exclusiveMaximum": 1e9},
        60000,
    ),
    "x-relaygr-key": (
        "The user, for proxies that route by it; not read here.",
        {"type": "string"},
        "user-7",
    ),
}

_WHOLE: Final[Json] = {
    "user": "user-7",
    "behaviours": {
        "items": [3, 14, 15],
        "actions": [0, 1, 0],
        "timestamps": [1700000000, 1700000060, 1700000120],
    },
}
_BY_DIGEST: Final[Json] = {
    "user": "user-7",
    "behaviours": {"items": [15], "actions": [0], "timestamps": [1700000120]},
    "start": 0,
    "length": 3,
    "digest": "jCu0sycwq9O1gaKciyTiHw==",
}

_HISTORY: Final = (
    "The history is given whole in `behaviours`, or as `length` and `digest` of the window with its newest behaviours: "
    "what is older is found cached or in the store. That of a new user is a `length` of 0. A store that is longer is "
    "cut, a shorter one extended by what is carried; where the digests then disagree the answer is 409, and the sender "
    "sends the whole history."
)

_PROBES: Final = (
    Operation(
        path="/healthz",
        method="GET",
        summary="Is the process alive?",
        description="Answers while the process does.",
        status=200,
        reply=Alive,
        example={"alive": True},
        errors={},
    ),
    Operation(
        path="/readyz",
        method="GET",
        summary="Is new work taken?",
        description="An instance is while its engine lives, a gateway while a slot is up; neither is while draining.",
        status=200,
        reply=Ready,
        example={"ready": True},
        errors={},
        also={503: {"ready": False}},
    ),
    Operation(
        path="/metrics",
        method="GET",
        summary="Prometheus metrics",
        description="Text for Prometheus.",
        status=200,
        reply=bytes,
        example="# HELP relaygr_draining 1 while new work is refused before the end.\n# TYPE relaygr_draining gauge\n"
        "relaygr_draining 0.0\n",
        errors={},
        content_type=metrics.CONTENT_TYPE,
    ),
    Operation(
        path="/openapi.json",
        method="GET",
        summary="This document",
        description="OpenAPI 3.1.",
        status=200,
        reply=dict,
        example={"openapi": "3.1.0"},
        errors={},
    ),
)

GATEWAY: Final = (
    Operation(
        path="/v1/recommend",
        method="POST",
        summary="What to recommend to this user?",
        description="The whole cascade: reads the history, sends the signal to pre-infer where that is worth it, "
        "retrieves, pre-processes and ranks.",
        status=200,
        reply=RecommendReply,
        example={
            "items": [{"item": 42, "score": 0.81}, {"item": 7, "score": 0.64}],
            "path": "RESIDENT",
            "decision": "ADMIT",
            "instance": "slot-0",
            "used": 1432,
            "epoch": 0,
            "engine_ms": 6.2,
            "stages_ms": {"retrieval": 3.1, "pre_processing": 0.6, "ranking": 7.4, "total": 12.0},
            "stale": False,
        },
        errors={**POSTED, **_BUSY, **_LATE},
        body=RecommendBody,
        examples={"two items": {"user": "user-7", "k": 2}, "the defaults": {"user": "user-7"}},
        headers=("x-relaygr-slot", "x-relaygr-path", "x-relaygr-decision"),
        parameters=("x-relaygr-deadline-ms",),
    ),
    Operation(
        path="/v1/behaviours",
        method="POST",
        summary="Append what a user did",
        description=(
            "The next request sees it. Behaviours are appended behind the user's last, all of them or none. When the "
            "deadline passes first, they may have been stored or may still be."
        ),
        status=200,
        reply=BehavioursReply,
        example={"user": "user-7", "length": 1433},
        errors={**POSTED, **_BUSY, **_LATE},
        body=BehavioursBody,
        examples={
            "one behaviour": {"user": "user-7", "behaviours": [{"item": 42, "action": 1, "timestamp": 1700000180}]},
        },
        parameters=("x-relaygr-deadline-ms",),
    ),
    Operation(
        path="/v1/status",
        method="GET",
        summary="State and counts",
        description="For people; /metrics has the same for machines.",
        status=200,
        reply=GatewayStatus,
        example={
            "up_s": 12.5,
            "draining": False,
            "slots": {"slot-0": {"address": "http://127.0.0.1:8100", "health": "UP", "load_tokens": 0}},
            "ready_slots": 1,
            "decisions": {"ADMIT": 3, "NOT_AT_RISK": 5},
            "placements": {"PLACED": 8, "FOLLOWED": 3},
            "transitions": {"ADDED": 1, "CAME_UP": 1},
            "retries": {"conflict": 1},
            "trigger_margin": 1.5,
            "paths": {"FULL": 5, "RESIDENT": 3},
            "requests": {"/v1/recommend 200": 8},
        },
        errors={},
    ),
    *_PROBES,
)

INSTANCE: Final = (
    Operation(
        path="/v1/pre-infer",
        method="POST",
        summary="Make a user's prefix ready for a rank to come",
        description=f"Answers at admission, or with the refusal, and never waits for the prefix. {_HISTORY}",
        status=202,
        reply=PreInferReply,
        example={"decision": "ADMIT", "slot": "slot-0", "wait_ms": 1.2, "cost_version": 7},
        errors={**POSTED, **_CONFLICT, **_LATE},
        body=PreInferBody,
        examples={"the whole history": _WHOLE, "by digest": _BY_DIGEST},
        headers=("x-relaygr-slot", "x-relaygr-decision"),
        parameters=("x-relaygr-deadline-ms", "x-relaygr-key"),
    ),
    Operation(
        path="/v1/rank",
        method="POST",
        summary="Score candidates on a user's history",
        description=f"By the cheapest way that is in time; scores do not depend on what is cached. {_HISTORY}",
        status=200,
        reply=RankReply,
        example={
            "scores": [[0.81], [0.64], [0.12]],
            "tasks": 1,
            "path": "RESIDENT",
            "used": 3,
            "epoch": 0,
            "slot": "slot-0",
            "timings_ms": {"total": 2.1, "prefix": 0.4, "score": 1.6},
            "wait_ms": 0.0,
            "cost_version": 7,
        },
        errors={**POSTED, **_CONFLICT, **_BUSY, **_LATE},
        body=RankBody,
        examples={
            "the whole history": {**_WHOLE, "candidates": [5, 6, 7]},
            "by digest": {**_BY_DIGEST, "candidates": [5, 6, 7]},
            "a new user": {"user": "user-8", "length": 0, "candidates": [5, 6, 7]},
        },
        headers=("x-relaygr-slot", "x-relaygr-path"),
        parameters=("x-relaygr-deadline-ms", "x-relaygr-key"),
    ),
    Operation(
        path="/v1/status",
        method="GET",
        summary="State and counts",
        description="For people and for gateways, which learn costs and waits from it; /metrics has the rest.",
        status=200,
        reply=InstanceStatus,
        example={
            "slot": "slot-0",
            "draining": False,
            "up_s": 12.5,
            "engine": {
                **{"version": "6f1c0e", "epoch": 0, "actions": 16, "max_history": 8192, "page_bytes": 65536},
                **{"device_pages": 4096, "device_pages_free": 4000, "device_pages_pinned": 8, "device_prefixes": 4},
                **{"device_evictions": 0, "device_shortened": 0},
                **{"host_pages": 8192, "host_pages_free": 8100, "host_pages_pinned": 0, "host_prefixes": 4},
                **{"host_evictions": 0, "host_shortened": 0},
                **{"leases": 1, "ranks_under_way": 0, "builds_under_way": 0},
                **{"steps_in_flight": 0, "copies_in_flight": 0, "wait_ms": 0.0, "device_busy_s": 0.4},
                **{"written_back": 4, "write_back_waiting": 0, "paths": {"RESIDENT": 3, "FULL": 1}},
                **{"resident_left_by_earlier": 1, "outcomes": {"COMPUTED": 3}, "faults": {}, "prepared": {}},
                "cost_model_version": 7,
                "cost_model_error": 0.06,
                "cost_model": {"steps": [5e-4, 2e-6, 1e-9, 3e-6, 1e-9], "copies": [1e-4, 2e-6]},
            },
            "counts": {
                **{"pre_infer_busy_s": 0.3, "sources": {"NOTHING": 4, "RESIDENT": 3}},
                **{"reloads": 0, "write_back_dropped": 0},
            },
        },
        errors={503: POSTED[503]},
    ),
    *_PROBES,
)
