"""Pre-processing: what was retrieved becomes candidates with features."""

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from relaygr.cascade.stage import Prepared, PreProcessingRequest
from relaygr.errors import InvalidInput
from relaygr.history.history import index
from relaygr.model import Candidates

__all__ = ["CANDIDATE_FEATURES", "REQUEST_FEATURES", "FeaturePreProcessing"]

_DAY: Final = 86_400.0
_WEEK: Final = 7 * _DAY
_MONDAY: Final = 4 * _DAY
"""1970 began on a Thursday; this second was the first Monday's first."""


def _turn(at: float, period: float) -> float:
    """How far round `at` is in its period, as an angle."""
    return 2 * math.pi * (at % period) / period


def _since_last(asked: PreProcessingRequest) -> float:
    last = asked.history.timestamps[-1:]
    return math.log1p(max(asked.at - int(last[0]), 0.0)) if len(last) else 0.0


REQUEST_FEATURES: Final[dict[str, Callable[[PreProcessingRequest], float]]] = {
    "hour_sin": lambda asked: math.sin(_turn(asked.at, _DAY)),
    "hour_cos": lambda asked: math.cos(_turn(asked.at, _DAY)),
    "log_seconds_since_last": _since_last,
    "log_behaviours": lambda asked: math.log1p(len(asked.history)),
    "weekday_sin": lambda asked: math.sin(_turn(asked.at - _MONDAY, _WEEK)),
    "weekday_cos": lambda asked: math.cos(_turn(asked.at - _MONDAY, _WEEK)),
}
"""What is known of a request, in the order of the model's columns. Logarithms are natural and of 1 + x; hours and
weekdays are UTC's; no behaviours: 0 seconds since the last; a last behaviour in the future: 0 too."""

CANDIDATE_FEATURES: Final = ("similarity", "reciprocal_rank")
"""What is known of a candidate, in the order of the model's columns: its similarity, 0 where retrieval knows none, and
1 / (1 + its place among the retrieved)."""


class FeaturePreProcessing:
    """Drops what the user has seen and what repeats, keeps the first of the rest, and attaches features.

    A model that reads fewer features than there are gets the first columns. One that reads more needs a stage of its
    own, and is refused here with InvalidInput.
    """

    def __init__(self, *, request_features: int = 0, candidate_features: int = 0) -> None:
        """As many as the model's config says."""
        self._request = _some_of("request_features", request_features, len(REQUEST_FEATURES))
        self._candidate = _some_of("candidate_features", candidate_features, len(CANDIDATE_FEATURES))

    async def run(self, request: PreProcessingRequest, /) -> Prepared:
        items = request.retrieved.items
        first = np.sort(np.unique(items, return_index=True)[1])
        kept = first[~np.isin(items[first], request.history.items)][: request.candidates]
        features = self._candidate_features(request, kept)
        return Prepared(
            Candidates(items[kept], features) if len(kept) else None,
            self._request_features(request) if self._request else None,
        )

    def _candidate_features(
        self, request: PreProcessingRequest, kept: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32] | None:
        if not self._candidate:
            return None
        similarities = request.retrieved.similarities
        known = np.zeros(len(kept), np.float32) if similarities is None else similarities[kept]
        return np.stack((known, 1 / (1 + kept)), axis=1).astype(np.float32)[:, : self._candidate]

    def _request_features(self, request: PreProcessingRequest) -> npt.NDArray[np.float32]:
        features = list(REQUEST_FEATURES.values())[: self._request]
        return np.array([feature(request) for feature in features], np.float32)


def _some_of(field: str, value: Any, most: int) -> int:
    checked = index(field, value)
    if not 0 <= checked <= most:
        raise InvalidInput(field, f"is {checked}; this stage makes 0 to {most}, a model of others needs its own")
    return checked
