"""The calls of operators: what they read and answer, with examples. Every one of them carries the token."""

from typing import Final

import msgspec

from relaygr.serving.operations import POSTED, Operation

__all__ = ["GATEWAY", "INSTANCE", "PREFIX", "DrainBody", "EvictBody", "EvictReply", "SwapBody", "SwapReply"]

PREFIX: Final = "/v1/admin/"


class DrainBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether new work is refused."""

    draining: bool = True
    """False: it is taken again."""


class EvictBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A user of whom nothing is to be kept."""

    user: str
    """Their id: 1 to 511 bytes in UTF-8."""


class EvictReply(msgspec.Struct, kw_only=True):
    """What there was of the user."""

    stored: bool | None
    """Whether the store had a history; null where the store was not asked."""
    prefixes: dict[str, int]
    """Dropped, by slot."""


class SwapBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint to serve from now on."""

    model: str
    """Its path, where the instance runs."""


class SwapReply(msgspec.Struct, kw_only=True):
    """What is served now."""

    version: str
    """Digest of the model's dense weights and config."""
    epoch: int
    """Of its tables."""


_ERRORS: Final = {
    401: "Another token, or none.",
    403: "No token is set here, so that there are no such calls.",
    **POSTED,
}

_DRAIN: Final = Operation(
    path=PREFIX + "drain",
    method="POST",
    summary="Take no new work, or take it again",
    description="What was taken is finished. The process goes on, and says in /readyz that it is not ready.",
    status=200,
    reply=DrainBody,
    example={"draining": True},
    errors=_ERRORS,
    body=DrainBody,
    examples={"no new work": {"draining": True}, "take it again": {"draining": False}},
    token=True,
)


def _evict(description: str, stored: bool | None) -> Operation:
    return Operation(
        path=PREFIX + "evict",
        method="POST",
        summary="Forget a user",
        description=description,
        status=200,
        reply=EvictReply,
        example={"stored": stored, "prefixes": {"slot-0": 1}},
        errors=_ERRORS,
        body=EvictBody,
        examples={"a user": {"user": "user-7"}},
        token=True,
    )


_SWAP: Final = Operation(
    path=PREFIX + "swap",
    method="POST",
    summary="Serve another model",
    description="Loads the checkpoint, then serves it; what runs is finished on the model it began with.",
    status=200,
    reply=SwapReply,
    example={"version": "6f1c0e", "epoch": 1},
    errors=_ERRORS,
    body=SwapBody,
    examples={"a checkpoint": {"model": "/srv/new.safetensors"}},
    token=True,
)

GATEWAY: Final = (
    _DRAIN,
    _evict("From the store, from what this gateway keeps, and from every instance: both tiers and in flight.", True),
)
INSTANCE: Final = (_DRAIN, _evict("From both tiers of this instance, and from what is in flight.", None), _SWAP)
