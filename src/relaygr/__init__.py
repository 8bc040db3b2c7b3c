"""RelayGR: serve long-sequence generative recommenders."""

from typing import TYPE_CHECKING

from relaygr import errors
from relaygr.config import EngineConfig
from relaygr.engine.outcomes import Decision, Path, PreInferOutcome, Ranked
from relaygr.history import History, SteppedWindow
from relaygr.lazy import lazily
from relaygr.model.candidates import Candidates

if TYPE_CHECKING:
    from relaygr.engine import Engine
    from relaygr.model import build_model
else:
    __getattr__ = lazily(__name__, {"Engine": "relaygr.engine.engine", "build_model": "relaygr.model.build"})

__all__ = [
    "Candidates",
    "Decision",
    "Engine",
    "EngineConfig",
    "History",
    "Path",
    "PreInferOutcome",
    "Ranked",
    "SteppedWindow",
    "build_model",
    "errors",
]
