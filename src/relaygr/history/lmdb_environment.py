"""An LMDB environment that survives forks, growing maps, and readers that died."""

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb

from relaygr.errors import Overloaded, RelayError, Unavailable
from relaygr.history.gate import Gate
from relaygr.history.store import StoreCorrupt, StoreError, StoreFull
from relaygr.history.writer_lock import WriterLock

__all__ = ["Environment"]

_T = TypeVar("_T")

OPEN_S: Final = 10.0
"""How long opening a database waits for whoever writes to it."""
INFO: Final = "info"
"""The database that every environment has, for the layout's name and whatever else there is one of."""

_NO_ROOM: Final = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_DAMAGED: Final = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError)


class Environment:
    """Named databases in one directory, and transactions over them.

    All access is through `run`, and nothing read outlives its call. So there are moments when this process
    uses the map nowhere, and LMDB wants exactly those for what it cannot do safely otherwise: moving the map
    when another process has enlarged it, and forking.
    """

    def __init__(
        self, path: Path, names: Sequence[str], layout: bytes, *, map_size: int, durable: bool, readonly: bool
    ) -> None:
        self.path = path
        self._names, self._layout, self._map_size = (INFO, *names), layout, map_size
        self._durable, self._readonly = durable, readonly
        self._dbs: dict[str, Any] = {}
        self._env: lmdb.Environment | None = None
        self._closed = False
        self._gate, self._opening = Gate(), threading.Lock()
        self._writer = WriterLock(path / "writer.lock")
        with contextlib.nullcontext() if readonly else self._writer.held(OPEN_S):  # opening writes
            self._opened()

    def run(self, work: "Callable[[lmdb.Transaction[memoryview], dict[str, Any]], _T]", *, write: bool = False) -> _T:
        """Runs `work(transaction, databases)` in one transaction and returns its result.

        Commits when it returns and changes nothing when it raises. It may run more than once, and must
        return nothing that points into the transaction's buffers. Writers wait for their turn outside: neither
        a fork nor `close` waits for them.
        """
        if not write or self._readonly:
            return self._run(work, write=write)
        with self._writer.held():
            return self._run(work, write=write)

    def _run(self, work: "Callable[[lmdb.Transaction[memoryview], dict[str, Any]], _T]", *, write: bool) -> _T:
        swept = False
        while True:
            resized = False
            self._gate.enter()
            try:
                env = self._opened()
                if write and self._readonly:
                    raise StoreError(f"{self.path} was opened only for reading")
                with env.begin(write=write, buffers=True) as txn:
                    return work(txn, self._dbs)
            except lmdb.MapResizedError:
                resized = True
            except (lmdb.MapFullError, lmdb.ReadersFullError) as error:
                # Readers that died without leaving still hold their slots, and all pages freed since.
                if swept or not env.reader_check():
                    raise self._explained(error) from error
                swept = True
            except lmdb.Error as error:
                raise self._explained(error) from error
            finally:
                self._gate.leave()
            if resized:
                with self._gate.alone():
                    if self._env is not None:
                        self._env.set_mapsize(0)

    def close(self) -> None:
        """Waits for running transactions, flushes, and closes. Later calls of `run` raise Unavailable, and so do
        those of writers that still wait for their turn."""
        self._writer.give_up()
        with self._gate.alone():
            self._closed = True
            env, self._env = self._env, None
            if env is not None:
                if not (self._durable or self._readonly):
                    env.sync(True)
                env.close()
            if _live.get(self.path) is self:
                del _live[self.path]

    def _opened(self) -> lmdb.Environment:
        """The environment, opened if it is not yet open in this process."""
        if self._env is not None:
            return self._env
        with self._opening:
            if self._closed:
                raise Unavailable(f"the store at {self.path} is closed")
            if self._env is None:
                if _live.get(self.path, self) is not self:
                    raise Unavailable(f"{self.path} is already open in this process: share that store")
                try:
                    self._env = self._open()
                except lmdb.Error as error:
                    raise self._explained(error) from error
                except OSError as error:
                    raise Unavailable(f"{self.path} cannot be opened: {error}") from error
                _live[self.path] = self
            return self._env

    def _open(self) -> lmdb.Environment:
        if not self._readonly:
            self.path.mkdir(parents=True, exist_ok=True)
        env = lmdb.open(
            str(self.path),
            map_size=self._map_size,
            max_dbs=len(self._names),
            max_readers=1024,
            max_spare_txns=0,
            readonly=self._readonly,
            sync=self._durable,
            create=not self._readonly,
            readahead=False,
        )
        try:
            # LMDB maps a file that was cut short as if it were whole, and touching the rest ends the process.
            # Another may be writing: the file grows before LMDB says so, so that is asked first.
            needed = env.stat()["psize"] * (env.info()["last_pgno"] + 1)
            if (self.path / "data.mdb").stat().st_size < needed:
                raise StoreCorrupt(f"{self.path} is cut short: restore it from a copy")
            env.reader_check()
            self._dbs = self._databases(env)
        except BaseException:
            env.close()
            raise
        return env

    def _databases(self, env: lmdb.Environment) -> dict[str, Any]:
        foreign = StoreError(f"{self.path} holds an LMDB database, but not one of histories")
        try:
            if self._readonly:
                dbs = {name: env.open_db(name.encode(), create=False) for name in self._names}
                with env.begin() as txn:
                    layout = txn.get(b"layout", db=dbs[INFO])
            else:
                with env.begin(write=True) as txn:
                    new = not txn.stat(env.open_db(None, txn=txn))["entries"]
                    dbs = {name: env.open_db(name.encode(), txn=txn, create=new) for name in self._names}
                    if new:
                        txn.put(b"layout", self._layout, db=dbs[INFO])
                    layout = txn.get(b"layout", db=dbs[INFO])
        except (lmdb.NotFoundError, lmdb.IncompatibleError) as error:
            raise foreign from error
        if layout is None:
            raise foreign
        if layout != self._layout:
            raise StoreError(
                f"{self.path} is laid out as {bytes(layout).decode(errors='replace')!r}, but this version reads only "
                f"{self._layout.decode()!r}: open it with the version that wrote it, or start an empty one"
            )
        return dbs

    def _explained(self, error: lmdb.Error) -> RelayError:
        if isinstance(error, lmdb.MapFullError):
            size = self._env.info()["map_size"] if self._env else self._map_size
            return StoreFull(f"{self.path} has filled its map of {size} bytes: reopen it with a larger map_size")
        if isinstance(error, lmdb.DiskError) or any(words in str(error) for words in _NO_ROOM):
            return StoreFull(f"the disk under {self.path} is full, or this process may not write more to it")
        if isinstance(error, lmdb.TxnFullError):
            return StoreFull(f"too much for one transaction on {self.path}: write fewer users at a time")
        if isinstance(error, lmdb.ReadersFullError):
            return Overloaded(f"{self.path} has as many readers as it takes")
        if isinstance(error, _DAMAGED):
            return StoreCorrupt(f"{self.path} is damaged, or no database of histories: {error}")
        if isinstance(error, lmdb.MemoryError):
            return Unavailable(f"{self.path} cannot be mapped: reopen it with a smaller map_size ({error})")
        return Unavailable(f"{self.path} cannot be used: {error}")

    def _forked(self) -> None:
        """In a new child: the parent's environment is of no use here. It is opened anew when it is needed."""
        self._gate, self._opening = Gate(), threading.Lock()
        self._writer.forget()
        self._writer = WriterLock(self.path / "writer.lock")
        env, self._env = self._env, None
        if env is not None:
            env.close()


# The environments open in this process. LMDB breaks when one is open twice, or is used across a fork.
_live: "weakref.WeakValueDictionary[Path, Environment]" = weakref.WeakValueDictionary()
_sealed: list[Environment] = []


def _before_fork() -> None:
    environments = sorted(_live.values(), key=lambda environment: environment.path)
    for environment in environments:
        environment._gate.seal()
    _sealed[:] = environments


def _after_fork_in_parent() -> None:
    environments, _sealed[:] = list(_sealed), []
    for environment in environments:
        environment._gate.unseal()


def _after_fork_in_child() -> None:
    _sealed.clear()
    for environment in list(_live.values()):
        environment._forked()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
