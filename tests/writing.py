"""A process that writes to an LMDB store and does not end. Import it in any test as `writing`."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["a_writer_that_stays"]

_CODE = """
import sys
from relaygr.history import LmdbStore
with LmdbStore(sys.argv[1]) as store:
    def stay(txn, dbs):
        print("writing", flush=True)
        sys.stdin.readline()
    store._environment.run(stay, write=True)
"""


@contextlib.contextmanager
def a_writer_that_stays(store: Path) -> Iterator["subprocess.Popen[str]"]:
    """In the middle of a write to this store; a line on its standard input, or a signal, ends it."""
    command = [sys.executable, "-c", _CODE, str(store)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "writing\n"
            yield process
        finally:
            process.kill()
