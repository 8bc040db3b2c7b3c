"""Python's collector of garbage, as servers have it."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Final

__all__ = ["settle", "settled"]

EVERY: Final = (50_000, 20, 20)
"""Objects made and not freed before new ones are looked at, and how often before older ones are."""


def settle() -> None:
    """What is there now is taken to stay: the collector need not look at it again, hundreds of thousands of objects
    that belong to libraries. Requests leave no cycles behind, so that looking for them seldom costs no memory."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*EVERY)


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """The same for a while: for what is to be measured as servers have it. Nothing was frozen before."""
    before = gc.get_threshold()
    settle()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
