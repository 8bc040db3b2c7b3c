"""Admission, scheduler, executors, and the loop that joins them."""

from relaygr.engine.engine import Engine, EngineStatus
from relaygr.engine.outcomes import Decision, Path, PreInferOutcome, Ranked, Timings

__all__ = ["Decision", "Engine", "EngineStatus", "Path", "PreInferOutcome", "Ranked", "Timings"]
