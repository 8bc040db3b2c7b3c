"""One writer at a time, of whatever process, and a wait for it that can be given up."""

import fcntl
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from relaygr.errors import Unavailable

__all__ = ["WriterLock"]

SHORTEST_S: Final = 0.0005
LONGEST_S: Final = 0.02
"""Between two looks at a lock that another process holds."""


class WriterLock:
    """A lock on a file, held by one thread of one process; who dies lets go.

    LMDB has such a lock itself, but who waits for that cannot be called back, not even to end the process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = threading.Condition()
        self._taken = False
        self._over = False
        self._file: int | None = None

    @contextmanager
    def held(self, within_s: float = math.inf) -> Iterator[None]:
        """While the body runs. Unavailable where `give_up` comes before, `within_s` pass, or the file cannot be had."""
        file = self._take(within_s)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
            with self._changed:
                self._taken = False
                self._changed.notify_all()

    def give_up(self) -> None:
        """For good: nobody waits any more. Returns when who holds it here has let go."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            while self._taken:
                self._changed.wait()
            self.forget()

    def forget(self) -> None:
        """Close the file; it is opened anew when it is needed."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _take(self, within_s: float) -> int:
        pause, until = SHORTEST_S, time.monotonic() + within_s
        with self._changed:
            while True:
                if self._over:
                    raise Unavailable(f"the store at {self._path.parent} is closed")
                if not self._taken:
                    file = self._opened()
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        self._taken = True
                        return file
                    except BlockingIOError:
                        pass
                if time.monotonic() > until:
                    raise Unavailable(f"another process writes to the store at {self._path.parent}, and does not end")
                self._changed.wait(pause)
                pause = min(2 * pause, LONGEST_S)

    def _opened(self) -> int:
        if self._file is None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise Unavailable(f"{self._path} cannot be opened: {error.strerror}") from error
        return self._file
