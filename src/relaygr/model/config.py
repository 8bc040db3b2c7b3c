"""What a model is made of."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Self

from relaygr.errors import InvalidInput

__all__ = ["MAX_CONTEXT", "Combine", "Family", "ModelConfig", "SiluOn"]

Family = Literal["hstu", "softmax"]
SiluOn = Literal["u", "uvqk"]
Combine = Literal["concat", "gate"]

MAX_CONTEXT: Final = 64
"""The most context tokens a request may carry."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape and the choices of one model. It travels inside the checkpoint and is part of the version."""

    family: Family
    """"hstu", or "softmax": a decoder with RMSNorm, SwiGLU and rotary positions."""
    layers: int
    dim: int
    """Width of a token."""
    heads: int
    head_dim: int
    """Width of a head; heads times head_dim need not be dim."""
    items: int
    """Rows of the item table. Ids below it have a row each; larger ids are hashed onto the rows."""
    contexts: int = 4096
    """Rows of the context table, used like the item table's."""
    actions: int = 16
    """Kinds of action: a behaviour's action is below this."""
    tasks: int = 1
    """Scores per candidate."""
    request_features: int = 0
    """Numbers that describe the request: hour, device, time since the last behaviour."""
    candidate_features: int = 0
    """Numbers that describe a candidate for this user."""
    scale_length: float = 256.0
    """hstu: the constant that attention sums are divided by. Never a length taken from the batch."""
    silu_on: SiluOn = "u"
    """hstu: what SiLU is applied to after the projection, U alone or all of U, V, Q, K."""
    combine: Combine = "concat"
    """hstu: "concat" is [U, A, U·LN(A)]·W + x, "gate" is (U·LN(A))·W + x."""
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        choices = {"family": ("hstu", "softmax"), "silu_on": ("u", "uvqk"), "combine": ("concat", "gate")}
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise InvalidInput(field, f"is {getattr(self, field)!r}; choose from {', '.join(allowed)}")
        for field in ("layers", "dim", "heads", "head_dim", "items", "contexts", "actions", "tasks"):
            if self._number(field, int) < 1:
                raise InvalidInput(field, "must be at least 1")
        for field in ("request_features", "candidate_features"):
            if self._number(field, int) < 0:
                raise InvalidInput(field, "must not be negative")
        for field in ("scale_length", "norm_eps"):
            if not 0 < self._number(field, int | float) < math.inf:
                raise InvalidInput(field, "must be positive and finite")
        if self.family == "softmax" and self.head_dim % 2:
            raise InvalidInput("head_dim", "must be even: rotary positions turn pairs")

    def _number(self, field: str, kind: Any) -> Any:
        value = getattr(self, field)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidInput(field, f"must be {'an integer' if kind is int else 'a number'}, not {value!r}")
        return value

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The opposite of to_dict. Unknown or missing fields raise InvalidInput."""
        known = {field.name for field in fields(cls)}
        for field in values:
            if field not in known:
                raise InvalidInput(field, "is not a field of a model's config")
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidInput("config", str(error)) from error
