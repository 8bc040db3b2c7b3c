"""Behaviours, their digests, windows over them, and the stores that keep them."""

from relaygr.history.digest import PAGE, chain, page_hash
from relaygr.history.history import History
from relaygr.history.window import SteppedWindow

__all__ = ["PAGE", "History", "SteppedWindow", "chain", "page_hash"]
