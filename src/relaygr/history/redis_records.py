"""The records of a Redis store: read together, kept as they were read, and written if they still are so.

    {prefix}user:{id}   a hash   r           the user's record, with a number that every write changes
                                 p0, p1 …    pages
                                 b0, b1 …    blocks of hashes

One hash to a user: it is deleted, evicted and expires as a whole.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from relaygr.errors import RelayError
from relaygr.history.digest import PAGE
from relaygr.history.records import BLOCK, Records, User, packed
from relaygr.history.store import StoreCorrupt

__all__ = ["Changed", "Fields", "RedisRecords", "RedisWrite"]

Fields = Mapping[bytes, Sequence[bytes]]
"""The fields that are wanted of each user."""
Fetch = Callable[[Fields], dict[bytes, list[bytes | None]]]
"""Reads them all at one moment; None for what there is not."""

_RECORD: Final = b"r"


class Changed(RelayError):
    """Someone wrote the user between two reads: what was read together last is kept, and the work runs again."""


class RedisWrite:
    """What is to become of a user."""

    def __init__(self, before: bytes | None) -> None:
        self.before = before
        """The record as it must still be; None: there must be none."""
        self.anew = before is None
        """Whether all there is of the user goes first."""
        self.fields: dict[bytes, bytes] = {}

    @property
    def after(self) -> bytes | None:
        """The record as it will be."""
        return self.fields.get(_RECORD)


class RedisRecords(Records):
    """Everything known of a user was there at one moment; Changed where it cannot be."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._known: dict[bytes, dict[bytes, bytes | None]] = {}
        self.writes: dict[bytes, RedisWrite] = {}

    def get_user(self, key: bytes) -> bytes | None:
        return self._get(key, (_RECORD,))[0]

    def put_user(self, key: bytes, user: User) -> None:
        self._write(key).fields[_RECORD] = packed(key, user._replace(number=os.urandom(8)))

    def get_block(self, key: bytes, user: User, block: int) -> bytes | None:
        return self._get(key, (b"b%d" % block,))[0]

    def put_block(self, key: bytes, user: User, block: int, value: bytes) -> None:
        self._write(key).fields[b"b%d" % block] = value

    def get_pages(self, key: bytes, user: User, low: int, count: int) -> list[bytes]:
        pages = self._get(key, [b"p%d" % page for page in range(low, low + count)])
        return [page for page in pages if page is not None]

    def put_page(self, key: bytes, user: User, page: int, value: bytes) -> None:
        self._write(key).fields[b"p%d" % page] = value

    def remove(self, key: bytes) -> bool:
        there = self.get_user(key) is not None
        self._write(key).anew = True
        return there

    def new_number(self) -> bytes:
        return bytes(8)

    def owner(self, key: bytes, user: User) -> bytes:
        return key

    def expect(self, key: bytes, low: int, high: int) -> None:
        # One page more than there are: a user that grows meanwhile need not be read again.
        blocks = range(low // BLOCK, high // BLOCK + 1)
        self._get(key, [*(b"b%d" % block for block in blocks), *(b"p%d" % page for page in range(low, high + 1))])

    def expect_appends(self, keys: Sequence[bytes]) -> None:
        self._learn({key: (_RECORD,) for key in keys if key not in self._known})
        wanted = {}
        for key in keys:
            try:
                user = self.user(key)
            except StoreCorrupt:
                continue  # told by whoever needs it
            if user is not None:
                page = user.length // PAGE
                fields = (
                    (b"p%d" % page) if user.length % PAGE else b"",
                    (b"b%d" % (page // BLOCK)) if page % BLOCK else b"",
                )
                wanted[key] = [field for field in fields if field and field not in self._known[key]]
        self._learn({key: fields for key, fields in wanted.items() if fields})

    def _get(self, key: bytes, fields: Sequence[bytes]) -> list[bytes | None]:
        known = self._known.get(key, {})
        if any(field not in known for field in fields):
            self._learn({key: fields})
            known = self._known[key]
        return [known[field] for field in fields]

    def _learn(self, wanted: Fields) -> None:
        """Read these, each with its user's record: that says whether it still fits what is known."""
        if not wanted:
            return
        asked = {key: list(dict.fromkeys((_RECORD, *fields))) for key, fields in wanted.items()}
        changed = False
        for key, values in self._fetch(asked).items():
            fresh = dict(zip(asked[key], values, strict=True))
            known = self._known.setdefault(key, {})
            if known.get(_RECORD, fresh[_RECORD]) != fresh[_RECORD]:
                known.clear()
                changed = True
            known.update(fresh)
        if changed:
            raise Changed("written by another meanwhile")

    def forget(self) -> None:
        """Nothing is known and nothing is to be written."""
        self._known.clear()
        self.writes.clear()

    def _write(self, key: bytes) -> RedisWrite:
        if key not in self.writes:
            self.writes[key] = RedisWrite(self.get_user(key))
        return self.writes[key]
