"""What a model accepts."""

from typing import Any

import numpy as np
import numpy.typing as npt

from relaygr.errors import InvalidInput
from relaygr.history import History
from relaygr.history.history import integers
from relaygr.model.candidates import Candidates, features_of
from relaygr.model.config import MAX_CONTEXT, ModelConfig

__all__ = ["NO_CONTEXT", "ModelInputs"]

NO_CONTEXT: npt.NDArray[np.int64] = np.empty(0, np.int64)


class ModelInputs:
    """Checks of everything a caller hands to a model; each raises InvalidInput naming the field."""

    config: ModelConfig

    def check_history(self, history: Any) -> History:
        """The history, if this model can read it."""
        if not isinstance(history, History):
            raise InvalidInput("history", f"must be a relaygr.History, not {type(history).__name__}")
        if history.highest_action >= (limit := self.config.actions):
            at = int(history.actions.argmax())
            problem = f"must be below {limit}, this model's number of actions; entry {at} is {history.actions[at]}"
            raise InvalidInput("actions", problem)
        return history

    def check_context(self, context: Any) -> npt.NDArray[np.int64]:
        """The context as ids."""
        if context is None:
            return NO_CONTEXT
        ids = integers("context", context, np.int64)
        if len(ids) > MAX_CONTEXT:
            raise InvalidInput("context", f"has {len(ids)} ids; {MAX_CONTEXT} are allowed")
        if ids.size and ids.min() < 0:
            at = int(ids.argmin())
            raise InvalidInput("context", f"must not be negative; entry {at} is {ids[at]}")
        return ids.copy()

    def check_candidates(self, candidates: Any) -> Candidates:
        """The candidates, as Candidates."""
        checked = candidates if isinstance(candidates, Candidates) else Candidates(candidates)
        if checked.features is not None and checked.features.shape[1] != self.config.candidate_features:
            width = checked.features.shape[1]
            raise InvalidInput("features", f"has {width} columns; this model reads {self.config.candidate_features}")
        return checked

    def check_request(self, request: Any) -> npt.NDArray[np.float32] | None:
        """The request's features."""
        if request is None:
            return None
        checked = features_of("request", request, dimensions=1)
        if len(checked) != self.config.request_features:
            wanted = self.config.request_features
            raise InvalidInput("request", f"has {len(checked)} numbers; this model reads {wanted}")
        return checked
