"""RelayGR: serve long-sequence generative recommenders."""

from relaygr import errors
from relaygr.history import History, SteppedWindow
from relaygr.model import Candidates, build_model

__all__ = ["Candidates", "History", "SteppedWindow", "build_model", "errors"]
