"""Python's collector of garbage, as servers have it."""

import gc
from typing import Final

__all__ = ["settle"]

EVERY: Final = (50_000, 20, 20)
"""Objects made and not freed before new ones are looked at, and how often before older ones are."""


def settle() -> None:
    """What is there now is taken to stay: the collector need not look at it again, hundreds of thousands of objects
    that belong to libraries. Requests leave no cycles behind, so that looking for them seldom costs no memory."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*EVERY)
