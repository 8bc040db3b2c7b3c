"""Files that are written whole or not at all, and folders that one process at a time writes to."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relaygr.errors import InvalidInput, Unavailable

__all__ = ["alone", "replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write; it takes the place of `path` at the end, or is removed where there is an error.

    Whatever writes it, its mode is that of every new file of this process; some writers would let the owner alone read.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        partial.touch()
        mode = stat.S_IMODE(partial.stat().st_mode)
        yield partial
        partial.chmod(mode)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def alone(lock: Path, field: str, taken: str) -> Iterator[None]:
    """While no other process holds this lock, a file; its folder is made. Who dies lets go.

    Unavailable, saying `taken`, where another holds it; InvalidInput naming `field` where the folder cannot be used.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InvalidInput(field, f"{lock.parent} cannot be used: {error.strerror}") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unavailable(taken) from error
        yield
    finally:
        os.close(file)
