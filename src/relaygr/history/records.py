"""The records that stores keep of a user, and how they fit together; where they lie is for each store to say.

    user    length, first and last time, hash of the unfinished page | check
    pages   items | actions | timestamps of up to PAGE behaviours
    blocks  hashes of up to BLOCK whole pages | check

A page's record is exactly what its hash is taken of: reading verifies each with one call and hands the hashes
on. An append rewrites the unfinished page and the user's record, and one block when a page fills.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from relaygr.errors import InvalidInput
from relaygr.history.digest import EMPTY, PAGE, bytes_hash, page_bytes
from relaygr.history.history import History
from relaygr.history.store import StoreCorrupt

__all__ = ["BLOCK", "LAYOUT", "Columns", "Records", "User", "packed", "with_check"]

LAYOUT: Final = b"relaygr history 1"
BLOCK: Final = 64
"""Page hashes to a record: few enough to rewrite whenever a page fills, enough that few records are read."""

_USER: Final = struct.Struct("<8sQqq16s")
_HASH: Final = len(EMPTY)
_CHECK: Final = 8
_PAGE: Final = np.dtype([("items", "<i8", PAGE), ("actions", "<i4", PAGE), ("timestamps", "<i8", PAGE)])
_BEHAVIOUR: Final = _PAGE.itemsize // PAGE

Columns = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64]]
Value = bytes | memoryview


class User(NamedTuple):
    """A user's record."""

    number: bytes
    """Eight bytes by which a store tells users, or writes, apart."""
    length: int
    first: int
    last: int
    tail: bytes
    """The hash of the unfinished page; EMPTY when there is none."""


class Records(ABC):
    """All of one transaction. Raises StoreCorrupt, naming the user, for a record that is not what was written.

    A kind of store says where records lie; what they mean is said here.
    """

    @abstractmethod
    def get_user(self, key: bytes) -> Value | None: ...

    @abstractmethod
    def put_user(self, key: bytes, user: User) -> None: ...

    @abstractmethod
    def get_block(self, key: bytes, user: User, block: int) -> Value | None: ...

    @abstractmethod
    def put_block(self, key: bytes, user: User, block: int, value: bytes) -> None: ...

    @abstractmethod
    def get_pages(self, key: bytes, user: User, low: int, count: int) -> Sequence[Value]:
        """The records of pages from `low` on; fewer, or others, where they are damaged."""

    @abstractmethod
    def put_page(self, key: bytes, user: User, page: int, value: bytes) -> None: ...

    @abstractmethod
    def remove(self, key: bytes) -> bool:
        """Deletes all the user's records, and says whether there were any. Damaged records can be removed too."""

    @abstractmethod
    def new_number(self) -> bytes:
        """For a user who has none yet."""

    @abstractmethod
    def owner(self, key: bytes, user: User) -> bytes:
        """What the checks of the user's blocks are bound to."""

    def expect(self, key: bytes, low: int, high: int) -> None:  # noqa: B027  (records at hand need no notice)
        """Pages low … high and their hashes are read next."""

    def expect_appends(self, keys: Sequence[bytes]) -> None:  # noqa: B027
        """All that appends to these users need is read next."""

    def user(self, key: bytes) -> User | None:
        """The user's record, if there are behaviours."""
        value = self.get_user(key)
        if value is None:
            return None
        body = _checked(value, key)
        if body is None or len(body) != _USER.size:
            raise StoreCorrupt(f"the record of user {_name(key)} is damaged: replace or delete the user")
        return User(*_USER.unpack(body))

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
        records = self.get_pages(key, user, low, len(hashes))
        if list(map(bytes_hash, records)) != list(hashes):
            raise StoreCorrupt(f"a page of user {_name(key)} is damaged: replace or delete the user")
        return _columns(b"".join(records))

    def extend(self, key: bytes, user: User | None, new: History) -> int:
        """Writes behaviours behind the user's last and returns the new length."""
        if not len(new):
            return user.length if user else 0
        if user is None:
            user = User(self.new_number(), 0, int(new.timestamps[0]), 0, EMPTY)
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
        hashes = self._put_pages(key, user, page, columns)
        tail = hashes.pop() if (user.length + len(new)) % PAGE else EMPTY
        self._put_hashes(key, user, page, hashes)
        user = user._replace(length=user.length + len(new), last=int(new.timestamps[-1]), tail=tail)
        self.put_user(key, user)
        return user.length

    def _put_pages(self, key: bytes, user: User, page: int, columns: Columns) -> list[bytes]:
        """Writes pages from `page` on and returns their hashes."""
        items, actions, timestamps = columns
        hashes = []
        for low in range(0, len(items), PAGE):
            high = low + PAGE
            record = page_bytes(items[low:high], actions[low:high], timestamps[low:high])
            self.put_page(key, user, page + low // PAGE, record)
            hashes.append(bytes_hash(record))
        return hashes

    def _put_hashes(self, key: bytes, user: User, page: int, hashes: list[bytes]) -> None:
        """Writes the hashes of whole pages from `page` on, behind those the user has."""
        while hashes:
            block, kept = divmod(page, BLOCK)
            before = self._block(key, user, block) if kept else b""
            now, hashes = hashes[: BLOCK - kept], hashes[BLOCK - kept :]
            self.put_block(key, user, block, with_check(before + b"".join(now), self.owner(key, user)))
            page += len(now)

    def _block(self, key: bytes, user: User, block: int) -> bytes:
        """The hashes of a block's whole pages, one behind the other."""
        value = self.get_block(key, user, block)
        body = None if value is None else _checked(value, self.owner(key, user))
        if body is None or len(body) != _HASH * min(BLOCK, user.length // PAGE - block * BLOCK):
            raise StoreCorrupt(f"the page hashes of user {_name(key)} are damaged: replace or delete the user")
        return body


def packed(key: bytes, user: User) -> bytes:
    """The user's record as it is stored."""
    return with_check(_USER.pack(*user), key)


def with_check(body: bytes, owner: bytes) -> bytes:
    return body + xxhash.xxh3_64_digest(body + owner)


def _checked(value: Value, owner: bytes) -> bytes | None:
    """The body of a record with a check, or None if it is not what was written for `owner`."""
    body = bytes(value[:-_CHECK])
    return body if xxhash.xxh3_64_digest(body + owner) == value[-_CHECK:] else None


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


def _name(key: bytes) -> str:
    return repr(key.decode(errors="replace"))
