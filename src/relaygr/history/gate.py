"""A lock that many may hold together, or one alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Gate"]


class Gate:
    """Lets any number of operations in together, except while it is sealed.

    Who is inside must leave before sealing, or entering again: neither nests.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._inside = 0
        self._sealed = False

    def enter(self) -> None:
        """Waits until the gate is not sealed, and goes in."""
        with self._lock:
            while self._sealed:
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._sealed and not self._inside:
                self._changed.notify_all()

    def seal(self) -> None:
        """Lets nobody in any more, and returns when everybody has left."""
        with self._changed:
            while self._sealed:
                self._changed.wait()
            self._sealed = True
            while self._inside:
                self._changed.wait()

    def unseal(self) -> None:
        with self._changed:
            self._sealed = False
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Sealed while the body runs."""
        self.seal()
        try:
            yield
        finally:
            self.unseal()
