"""The records of an LMDB store, read and written inside one transaction.

    users   user id               →  the user's record
    pages   number, page          →  a page
    blocks  number, page / BLOCK  →  a block of hashes

Numbers are big-endian in keys, so that a user's pages lie side by side and in order; all else is little-endian.
"""

import struct
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from relaygr.history.records import Records, User, packed
from relaygr.history.store import StoreCorrupt

if TYPE_CHECKING:
    import lmdb

__all__ = ["NAMES", "LmdbRecords"]

NAMES: Final = ("users", "pages", "blocks")

_KEY: Final = struct.Struct(">8sI")


class LmdbRecords(Records):
    """What is read points into the transaction's buffers."""

    def __init__(self, txn: "lmdb.Transaction[memoryview]", dbs: dict[str, Any]) -> None:
        self._txn, self._users, self._pages, self._blocks = txn, dbs["users"], dbs["pages"], dbs["blocks"]

    def users_after(self, key: bytes, count: int) -> list[bytes]:
        """The keys of the next users, at most `count`."""
        with self._txn.cursor(self._users) as cursor:
            if not cursor.set_range(key + b"\0" if key else b""):
                return []
            return [bytes(found) for found in islice(cursor.iternext(keys=True, values=False), count)]

    def get_user(self, key: bytes) -> memoryview | None:
        return self._txn.get(key, db=self._users)

    def put_user(self, key: bytes, user: User) -> None:
        self._txn.put(key, packed(key, user), db=self._users)

    def get_block(self, key: bytes, user: User, block: int) -> memoryview | None:
        return self._txn.get(_KEY.pack(user.number, block), db=self._blocks)

    def put_block(self, key: bytes, user: User, block: int, value: bytes) -> None:
        self._txn.put(_KEY.pack(user.number, block), value, db=self._blocks)

    def get_pages(self, key: bytes, user: User, low: int, count: int) -> list[memoryview]:
        with self._txn.cursor(self._pages) as cursor:
            cursor.set_range(_KEY.pack(user.number, low))
            return list(islice(cursor.iternext(keys=False, values=True), count))

    def put_page(self, key: bytes, user: User, page: int, value: bytes) -> None:
        self._txn.put(_KEY.pack(user.number, page), value, db=self._pages)

    def remove(self, key: bytes) -> bool:
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

    def new_number(self) -> bytes:
        """A number that no page has: every user has pages, so the last page has the highest."""
        with self._txn.cursor(self._pages) as cursor:
            last = int.from_bytes(_KEY.unpack(cursor.key())[0], "big") if cursor.last() else 0
        return (last + 1).to_bytes(8, "big")

    def owner(self, key: bytes, user: User) -> bytes:
        return user.number
