"""Histories in an LMDB database: embedded, and many processes read while one writes."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from relaygr.errors import InvalidInput
from relaygr.history.digest import EMPTY, PAGE, chain, page_hash
from relaygr.history.history import History, index
from relaygr.history.lmdb_environment import Environment
from relaygr.history.lmdb_records import LAYOUT, NAMES, Records, User
from relaygr.history.store import user_key

__all__ = ["LmdbStore"]

_T = TypeVar("_T")


class LmdbStore:
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

    def append(self, user: str, items: Any, actions: Any, timestamps: Any) -> int:
        return self.append_many({user: History(items, actions, timestamps)})[user]

    def append_many(self, behaviours: Mapping[str, History]) -> dict[str, int]:
        keys = {user: user_key(user) for user in behaviours}
        for user, new in behaviours.items():
            if not isinstance(new, History):
                raise InvalidInput("behaviours", f"of user {user!r} must be a History, not {type(new).__name__}")

        def work(records: Records) -> dict[str, int]:
            return {user: records.extend(key, records.user(key), behaviours[user]) for user, key in keys.items()}

        return self._run(work, write=True)

    def replace(self, user: str, items: Any, actions: Any, timestamps: Any) -> int:
        key, history = user_key(user), History(items, actions, timestamps)

        def work(records: Records) -> int:
            records.remove(key)
            return records.extend(key, None, history)

        return self._run(work, write=True)

    def delete(self, user: str) -> bool:
        key = user_key(user)
        return self._run(lambda records: records.remove(key), write=True)

    def read(self, user: str, last: int | None = None, *, start: int = 0) -> History:
        key, start = user_key(user), _count("start", start)
        last = None if last is None else _count("last", last)

        def work(records: Records) -> History:
            entry = records.user(key)
            length = entry.length if entry else 0
            low = min(length, start if last is None else max(start, length - last))
            if entry is None or low == length:
                return History((), (), (), start=low)
            page, skip = divmod(low, PAGE)
            hashes = records.hashes(key, entry, page, -(-length // PAGE))
            items, actions, timestamps = records.columns(key, entry, page, hashes)
            known = () if skip else hashes[: length // PAGE - page]
            return History.from_store(items[skip:], actions[skip:], timestamps[skip:], start=low, page_hashes=known)

        return self._run(work)

    def length(self, user: str) -> int:
        entry = self._user(user)
        return entry.length if entry else 0

    def span(self, user: str) -> tuple[int, int] | None:
        entry = self._user(user)
        return (entry.first, entry.last) if entry else None

    def digest(self, user: str, length: int | None = None, *, start: int = 0) -> bytes:
        key, start = user_key(user), _count("start", start)
        length = None if length is None else _count("length", length)
        if start % PAGE:
            raise InvalidInput("start", f"must be a multiple of the page, {PAGE}, not {start}")

        def work(records: Records) -> bytes:
            entry = records.user(key)
            stored = entry.length if entry else 0
            available = max(0, stored - start)
            wanted = available if length is None else length
            if wanted > available:
                raise InvalidInput("length", f"is {wanted} where {available} behaviours are stored from {start} on")
            if entry is None or not wanted:
                return EMPTY
            end = start + wanted
            hashes = records.hashes(key, entry, start // PAGE, -(-end // PAGE))
            if end % PAGE and end != stored:
                page, rest = divmod(end, PAGE)
                items, actions, timestamps = records.columns(key, entry, page, hashes[-1:])
                hashes[-1] = page_hash(items[:rest], actions[:rest], timestamps[:rest])
            digest = EMPTY
            for page_digest in hashes:
                digest = chain(digest, page_digest)
            return digest

        return self._run(work)

    def users(self) -> Iterator[str]:
        after = b""
        while keys := self._users_after(after):
            yield from (key.decode() for key in keys)
            after = keys[-1]

    def close(self) -> None:
        self._environment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopened, self._options)

    def _user(self, user: str) -> User | None:
        key = user_key(user)
        return self._run(lambda records: records.user(key))

    def _users_after(self, key: bytes) -> list[bytes]:
        return self._run(lambda records: records.users_after(key, 1024))

    def _run(self, work: Callable[[Records], _T], *, write: bool = False) -> _T:
        return self._environment.run(lambda txn, dbs: work(Records(txn, dbs)), write=write)


def _count(field: str, value: int) -> int:
    value = index(field, value)
    if value < 0:
        raise InvalidInput(field, f"must not be negative, but is {value}")
    return value


def _reopened(path: Path, map_size: int, durable: bool, readonly: bool) -> LmdbStore:
    return LmdbStore(path, map_size, durable=durable, readonly=readonly)
