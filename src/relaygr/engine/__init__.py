"""Admission, scheduler, executors, and the loop that joins them."""

from typing import TYPE_CHECKING

from relaygr.engine.outcomes import Decision, Path, PreInferOutcome, Ranked, Timings
from relaygr.engine.status import EngineCounts, EngineStatus
from relaygr.lazy import lazily

if TYPE_CHECKING:
    from relaygr.engine.engine import Engine
else:
    __getattr__ = lazily(__name__, {"Engine": "relaygr.engine.engine"})

__all__ = ["Decision", "Engine", "EngineCounts", "EngineStatus", "Path", "PreInferOutcome", "Ranked", "Timings"]
