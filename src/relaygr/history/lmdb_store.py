"""Histories in an LMDB database: embedded, and many processes read while one writes."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from relaygr.errors import InvalidInput
from relaygr.history.history import index
from relaygr.history.lmdb_environment import Environment
from relaygr.history.lmdb_records import NAMES, LmdbRecords
from relaygr.history.record_store import RecordStore
from relaygr.history.records import LAYOUT, Records

__all__ = ["LmdbStore"]

_T = TypeVar("_T")


class LmdbStore(RecordStore):
    """A HistoryStore in the directory `path`, made where it is missing.

    A process opens a database once and shares the store; other processes open it themselves. A store carried
    over a fork opens the database anew there, a pickled one where it is unpickled. Writers wait for each
    other, of whatever process; readers wait for nobody.

    The database never grows beyond `map_size` bytes, which reserves addresses and no memory: StoreFull then,
    until a store is opened with more. Other processes follow by themselves.

    What was written survives a crash of the process. With `durable` it survives one of the machine too;
    without, commits are much cheaper, but such a crash may lose the database. `close` flushes.
    With `readonly` nothing can be written, and the database must exist.

    Raises StoreError for a directory that holds something else or another layout, StoreCorrupt for a damaged
    one, and Unavailable if it cannot be opened or already is, in this process. `delete` and `replace` work
    for users whose records are damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        map_size: int = 256 << 30,
        *,
        durable: bool = True,
        readonly: bool = False,
    ) -> None:
        self._options = (Path(path).resolve(), index("map_size", map_size), durable, readonly)
        if map_size < 1 << 20:
            raise InvalidInput("map_size", f"must be at least {1 << 20} bytes, not {map_size}")
        self._environment = Environment(
            self._options[0], NAMES, LAYOUT, map_size=self._options[1], durable=durable, readonly=readonly
        )

    def users(self) -> Iterator[str]:
        after = b""
        while keys := self._users_after(after):
            yield from (key.decode() for key in keys)
            after = keys[-1]

    def close(self) -> None:
        self._environment.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopened, self._options)

    def _users_after(self, key: bytes) -> list[bytes]:
        return self._environment.run(lambda txn, dbs: LmdbRecords(txn, dbs).users_after(key, 1024))

    def _run(self, work: Callable[[Records], _T], *, write: bool = False) -> _T:
        return self._environment.run(lambda txn, dbs: work(LmdbRecords(txn, dbs)), write=write)


def _reopened(path: Path, map_size: int, durable: bool, readonly: bool) -> LmdbStore:
    return LmdbStore(path, map_size, durable=durable, readonly=readonly)
