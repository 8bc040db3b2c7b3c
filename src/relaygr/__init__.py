"""RelayGR: serve long-sequence generative recommenders."""

from relaygr import errors
from relaygr.config import EngineConfig
from relaygr.engine import Decision, Engine, Path, PreInferOutcome, Ranked
from relaygr.history import History, SteppedWindow
from relaygr.model import Candidates, build_model

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
