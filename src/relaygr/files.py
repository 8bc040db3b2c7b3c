"""Files that are written whole or not at all."""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing"]


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
