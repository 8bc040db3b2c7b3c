"""Models by name, with random weights: what work costs does not depend on them."""

from typing import Any, Final

from relaygr.errors import InvalidInput
from relaygr.model import RankingModel, build_model

__all__ = ["ITEMS", "SHAPES", "shaped"]

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "d64": {"layers": 2, "dim": 64, "heads": 2},
    "d256": {"layers": 8, "dim": 256, "heads": 4},
    "d512": {"layers": 8, "dim": 512, "heads": 4},
    "d1024": {"layers": 8, "dim": 1024, "heads": 8},
    "dlrmv3": {"layers": 5, "dim": 512, "heads": 4},
}
"""The first is for CPUs; the last is that of MLPerf's DLRMv3."""
ITEMS: Final = 100_000


def shaped(name: str, *, scale_length: float = 32_768.0) -> RankingModel:
    """Raises InvalidInput for a name that is none."""
    if name not in SHAPES:
        raise InvalidInput("shape", f"is {name!r}; choose from {', '.join(SHAPES)}")
    return build_model("hstu", **SHAPES[name], items=ITEMS, seed=0, scale_length=scale_length)
