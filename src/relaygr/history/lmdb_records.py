"""The records of an LMDB store, read and written inside one transaction.

    users   user id               →  number, length, first and last time, hash of the unfinished page | check
    pages   number, page          →  items | actions | timestamps of up to PAGE behaviours
    blocks  number, page / BLOCK  →  hashes of up to BLOCK whole pages | check

A page's record is exactly what its hash is taken of: reading verifies each with one call and hands the hashes
on. An append rewrites the unfinished page and the user's record, and one block when a page fills. Numbers are
big-endian in keys, so that a user's pages lie side by side and in order; all else is little-endian.
"""

import struct
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from relaygr.errors import InvalidInput
from relaygr.history.digest import EMPTY, PAGE, bytes_hash, page_bytes
from relaygr.history.history import History
from relaygr.history.store import StoreCorrupt

if TYPE_CHECKING:
    import lmdb

__all__ = ["LAYOUT", "NAMES", "Columns", "Records", "User"]

LAYOUT: Final = b"relaygr history 1"
NAMES: Final = ("users", "pages", "blocks")
BLOCK: Final = 64
"""Page hashes to a record: few enough to rewrite whenever a page fills, enough that few records are read."""

_USER: Final = struct.Struct("<8sQqq16s")
_KEY: Final = struct.Struct(">8sI")
_HASH: Final = len(EMPTY)
_CHECK: Final = 8
_PAGE: Final = np.dtype([("items", "<i8", PAGE), ("actions", "<i4", PAGE), ("timestamps", "<i8", PAGE)])
_BEHAVIOUR: Final = _PAGE.itemsize // PAGE

Columns = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64]]


class User(NamedTuple):
    """A user's record."""

    number: bytes
    length: int
    first: int
    last: int
    tail: bytes
    """The hash of the unfinished page; EMPTY when there is none."""


class Records:
    """Raises StoreCorrupt, naming the user, for a record that is not what was written."""

    def __init__(self, txn: "lmdb.Transaction[memoryview]", dbs: dict[str, Any]) -> None:
        self._txn, self._users, self._pages, self._blocks = txn, *(dbs[name] for name in NAMES)

    def user(self, key: bytes) -> User | None:
        """The user's record, if there are behaviours."""
        value = self._txn.get(key, db=self._users)
        if value is None:
            return None
        body = _checked(value, key)
        if body is None or len(body) != _USER.size:
            raise StoreCorrupt(f"the record of user {_name(key)} is damaged: replace or delete the user")
        return User(*_USER.unpack(body))

    def users_after(self, key: bytes, count: int) -> list[bytes]:
        """The keys of the next users, at most `count`."""
        with self._txn.cursor(self._users) as cursor:
            if not cursor.set_range(key + b"\0" if key else b""):
                return []
            return [bytes(found) for found in islice(cursor.iternext(keys=True, values=False), count)]

    def hashes(self, key: bytes, user: User, low: int, high: int) -> list[bytes]:
        """The hashes of pages low … high, of which the last may be the unfinished one."""
        whole = min(high, user.length // PAGE)
        hashes: list[bytes] = []
        for block in range(low // BLOCK, -(-whole // BLOCK)):
            kept, before = self._block(key, user, block), block * BLOCK
            pages = range(max(low - before, 0), min(whole - before, BLOCK))
            hashes += [kept[page * _HASH : (page + 1) * _HASH] for page in pages]
        return [*hashes, user.tail] if high > whole else hashes

    def columns(self, key: bytes, user: User, low: int, hashes: Sequence[bytes]) -> Columns:
        """The behaviours of the pages from `low` on that have these hashes; new arrays."""
        with self._txn.cursor(self._pages) as cursor:
            cursor.set_range(_KEY.pack(user.number, low))
            records = list(islice(cursor.iternext(keys=False, values=True), len(hashes)))
            if list(map(bytes_hash, records)) != hashes:
                raise StoreCorrupt(f"a page of user {_name(key)} is damaged: replace or delete the user")
            return _columns(b"".join(records))

    def extend(self, key: bytes, user: User | None, new: History) -> int:
        """Writes behaviours behind the user's last and returns the new length."""
        if not len(new):
            return user.length if user else 0
        if user is None:
            user = User(self._next_number(), 0, int(new.timestamps[0]), 0, EMPTY)
        elif new.timestamps[0] < user.last:
            problem = f"go backwards at behaviour 0 of user {_name(key)}: the last one stored is of {user.last}"
            raise InvalidInput("timestamps", problem)
        columns: Columns = (new.items, new.actions, new.timestamps)
        page, unfinished = divmod(user.length, PAGE)
        if unfinished:
            items, actions, timestamps = self.columns(key, user, page, [user.tail])
            columns = (
                np.concatenate((items, new.items)),
                np.concatenate((actions, new.actions)),
                np.concatenate((timestamps, new.timestamps)),
            )
        hashes = self._put_pages(user, page, columns)
        tail = hashes.pop() if (user.length + len(new)) % PAGE else EMPTY
        self._put_hashes(key, user, page, hashes)
        user = user._replace(length=user.length + len(new), last=int(new.timestamps[-1]), tail=tail)
        self._txn.put(key, _with_check(_USER.pack(*user), key), db=self._users)
        return user.length

    def remove(self, key: bytes) -> bool:
        """Deletes all the user's records, and says whether there were any. Damaged records can be removed too."""
        try:
            user = self.user(key)
        except StoreCorrupt:
            user = None  # whose pages its number names is not certain: they stay behind, unused
        if user:
            for db in (self._pages, self._blocks):
                with self._txn.cursor(db) as cursor:
                    found = cursor.set_range(user.number)
                    while found and cursor.key()[: len(user.number)] == user.number:
                        found = cursor.delete()
        return self._txn.delete(key, db=self._users)

    def _put_pages(self, user: User, page: int, columns: Columns) -> list[bytes]:
        """Writes pages from `page` on and returns their hashes."""
        items, actions, timestamps = columns
        hashes = []
        for low in range(0, len(items), PAGE):
            high = low + PAGE
            record = page_bytes(items[low:high], actions[low:high], timestamps[low:high])
            self._txn.put(_KEY.pack(user.number, page + low // PAGE), record, db=self._pages)
            hashes.append(bytes_hash(record))
        return hashes

    def _put_hashes(self, key: bytes, user: User, page: int, hashes: list[bytes]) -> None:
        """Writes the hashes of whole pages from `page` on, behind those the user has."""
        while hashes:
            block, kept = divmod(page, BLOCK)
            before = self._block(key, user, block) if kept else b""
            now, hashes = hashes[: BLOCK - kept], hashes[BLOCK - kept :]
            value = _with_check(before + b"".join(now), user.number)
            self._txn.put(_KEY.pack(user.number, block), value, db=self._blocks)
            page += len(now)

    def _block(self, key: bytes, user: User, block: int) -> bytes:
        """The hashes of a block's whole pages, one behind the other."""
        value = self._txn.get(_KEY.pack(user.number, block), db=self._blocks)
        body = None if value is None else _checked(value, user.number)
        if body is None or len(body) != _HASH * min(BLOCK, user.length // PAGE - block * BLOCK):
            raise StoreCorrupt(f"the page hashes of user {_name(key)} are damaged: replace or delete the user")
        return body

    def _next_number(self) -> bytes:
        """A number that no page has: every user has pages, so the last page has the highest."""
        with self._txn.cursor(self._pages) as cursor:
            last = int.from_bytes(_KEY.unpack(cursor.key())[0], "big") if cursor.last() else 0
        return (last + 1).to_bytes(8, "big")


def _columns(pages: bytes) -> Columns:
    """The columns of pages one behind the other, of which the last may be unfinished."""
    whole, rest = divmod(len(pages), _PAGE.itemsize)
    behaviours = rest // _BEHAVIOUR
    of_pages = np.frombuffer(pages, _PAGE, whole)
    at, columns = whole * _PAGE.itemsize, []
    for field in ("items", "actions", "timestamps"):
        column = of_pages[field].reshape(-1)
        if behaviours:
            column = np.concatenate((column, np.frombuffer(pages, column.dtype, behaviours, at)))
            at += behaviours * column.itemsize
        columns.append(column)
    return columns[0], columns[1], columns[2]


def _with_check(body: bytes, owner: bytes) -> bytes:
    return body + xxhash.xxh3_64_digest(body + owner)


def _checked(value: memoryview, owner: bytes) -> bytes | None:
    """The body of a record with a check, or None if it is not what was written for `owner`."""
    body = bytes(value[:-_CHECK])
    return body if xxhash.xxh3_64_digest(body + owner) == value[-_CHECK:] else None


def _name(key: bytes) -> str:
    return repr(key.decode(errors="replace"))
