"""Servers that end with whoever started them, however that ends."""

import ctypes
import os
import signal
from typing import Final

from relaygr.errors import Unavailable

__all__ = ["end_with"]

_PR_SET_PDEATHSIG: Final = 1


def end_with(parent: int) -> None:
    """From now on the kernel sends this process SIGTERM when its parent, the process of this number, dies.

    Raises Unavailable where it has died already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise Unavailable("whoever started this process has ended")
