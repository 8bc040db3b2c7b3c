"""What an engine's memory allows."""

from relaygr.config import EngineConfig
from relaygr.engine.step import Capacity
from relaygr.errors import InvalidInput
from relaygr.history import PAGE
from relaygr.model.config import MAX_CONTEXT

__all__ = ["longest_pages", "max_history", "reserve_pages"]


def max_history(config: EngineConfig, capacity: Capacity) -> int:
    """The longest history this device cache is made for. Raises InvalidInput if it cannot be what was asked for."""
    if config.max_history is None:
        longest = (capacity.device // 2 - 1) * PAGE - MAX_CONTEXT
        if longest < 1:
            raise InvalidInput("device_cache", f"holds {capacity.device} pages: too few for any history")
        return longest
    need, have = reserve_pages(config.max_history), capacity.device
    if need > have:
        raise InvalidInput("max_history", f"needs {need} pages, device_cache holds {have}; raise it")
    return config.max_history


def longest_pages(history: int) -> int:
    """Pages of a history of this length and the longest context."""
    return -(-(history + MAX_CONTEXT) // PAGE)


def reserve_pages(history: int) -> int:
    """Pages that a rank on such a history may need: its own, and one copied to be rewritten."""
    return longest_pages(history) + 1
