"""A user's behaviours, oldest first, as a structure of arrays."""

import operator
from collections.abc import Sequence
from typing import Any, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt

from relaygr.errors import InvalidInput
from relaygr.history.digest import EMPTY, PAGE, chain, page_hash, page_hashes

__all__ = ["History", "frozen", "index", "integers"]

_LONGEST_GAP: Final = np.iinfo(np.int64).max

_Int = TypeVar("_Int", np.int32, np.int64)


def integers(field: str, values: Any, dtype: type[_Int]) -> npt.NDArray[_Int]:
    """`values` as a contiguous 1-D array of `dtype`, not copied when it already is one.

    Raises InvalidInput naming `field` for other shapes, for floats, and for integers that do not fit.
    """
    if type(values) is np.ndarray and values.dtype == dtype and values.ndim == 1 and values.flags.c_contiguous:
        return values
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(field, f"is not an array of integers: {error}") from error
    if array.ndim != 1:
        raise InvalidInput(field, f"must be one-dimensional, not of shape {array.shape}")
    if array.size == 0 and not isinstance(values, np.ndarray):
        return np.empty(0, dtype)
    if array.dtype == dtype:
        return np.ascontiguousarray(array)
    if array.dtype.kind not in "iu":
        raise InvalidInput(field, f"must hold integers, not {array.dtype}")
    cast = array.astype(dtype)
    if not np.array_equal(cast, array):
        raise InvalidInput(field, f"has values that do not fit {np.dtype(dtype).name}")
    return cast


class History:
    """Behaviours of one user, or a window of them. Immutable; slices and appends share what they can.

    `start` is where the window begins in the user's whole history. Times are in seconds and never go
    backwards. Equality is by content. Raises InvalidInput naming the field for anything else.
    """

    __slots__ = ("_highest_action", "_known", "_tail", "actions", "items", "start", "timestamps")

    def __init__(self, items: Any, actions: Any, timestamps: Any, *, start: int = 0) -> None:
        self.items = frozen(integers("items", items, np.int64))
        self.actions = frozen(integers("actions", actions, np.int32))
        self.timestamps = frozen(integers("timestamps", timestamps, np.int64))
        self.start = index("start", start)
        for field, array in (("actions", self.actions), ("timestamps", self.timestamps)):
            if len(array) != len(self.items):
                raise InvalidInput(field, f"has {len(array)} entries where items has {len(self.items)}")
        for field, array in (("items", self.items), ("actions", self.actions)):
            if array.size and array.min() < 0:
                at = int(array.argmin())
                raise InvalidInput(field, f"must not be negative; entry {at} is {array[at]}")
        if self.start < 0:
            raise InvalidInput("start", "must not be negative")
        late = self.timestamps[1:] < self.timestamps[:-1]
        if late.any():
            raise InvalidInput("timestamps", f"go backwards at behaviour {int(late.argmax()) + 1}")
        # Hashes and digests of the first pages, as far as they are known. Replaced as one, never changed in
        # place: histories share them, and threads may read while one extends them.
        self._known: tuple[Sequence[bytes], Sequence[bytes]] = ((), (EMPTY,))
        self._tail: bytes | None = None
        self._highest_action: int | None = None

    @classmethod
    def empty(cls) -> Self:
        """The history of a user nobody has seen yet."""
        return cls((), (), ())

    @classmethod
    def from_store(
        cls,
        items: npt.NDArray[np.int64],
        actions: npt.NDArray[np.int32],
        timestamps: npt.NDArray[np.int64],
        *,
        start: int,
        page_hashes: Sequence[bytes],
    ) -> Self:
        """For stores: made of arrays and page hashes that were checked when they were stored.

        Nothing is checked, copied or hashed here. The arrays become read-only and nobody else may write to
        them; `page_hashes` are those of the first whole pages from `start` on, as many as are known.
        """
        columns = (_locked(items), _locked(actions), _locked(timestamps))
        return cls._trusted(*columns, start, page_hashes, (EMPTY,))

    @classmethod
    def _trusted(
        cls,
        items: npt.NDArray[np.int64],
        actions: npt.NDArray[np.int32],
        timestamps: npt.NDArray[np.int64],
        start: int,
        hashes: Sequence[bytes],
        digests: Sequence[bytes],
    ) -> Self:
        """Made of parts already checked; `hashes` and `digests` are those of its first whole pages."""
        self = cls.__new__(cls)
        self.items, self.actions, self.timestamps, self.start = items, actions, timestamps, start
        self._known, self._tail, self._highest_action = (hashes, digests), None, None
        return self

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, key: slice) -> "History":
        """A window of this history. It shares the arrays and keeps `start`."""
        if not isinstance(key, slice):
            raise TypeError("a History is sliced, not indexed: history[a:b]")
        low, high, step = key.indices(len(self))
        if step != 1:
            raise InvalidInput("step", "a History is sliced in steps of 1")
        high = max(low, high)
        first, whole = low // PAGE, (high - low) // PAGE
        hashes, digests = self._known
        hashes = hashes[first : first + whole] if low % PAGE == 0 else ()
        digests = digests[: whole + 1] if low == 0 else (EMPTY,)
        return History._trusted(
            self.items[low:high], self.actions[low:high], self.timestamps[low:high], self.start + low, hashes, digests
        )

    def append(self, items: Any, actions: Any, timestamps: Any) -> "History":
        """A new History with these behaviours behind this one's. Hashes of whole pages are kept."""
        new = History(items, actions, timestamps)
        if len(self) and len(new) and new.timestamps[0] < self.timestamps[-1]:
            raise InvalidInput("timestamps", "go backwards at behaviour 0: it is older than the history's last")
        return History._trusted(
            _locked(np.concatenate((self.items, new.items))),
            _locked(np.concatenate((self.actions, new.actions))),
            _locked(np.concatenate((self.timestamps, new.timestamps))),
            self.start,
            *self._known,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with the hashes it knows; unpickled arrays are read-only again."""
        return (_unpickled, (self.items, self.actions, self.timestamps, self.start, *self._known))

    @property
    def highest_action(self) -> int:
        """-1 where there is none. Looked for once: a history is checked with every call."""
        if self._highest_action is None:
            self._highest_action = int(np.maximum.reduce(self.actions)) if len(self.actions) else -1
        return self._highest_action

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        return (
            np.array_equal(self.items, other.items)
            and np.array_equal(self.actions, other.actions)
            and np.array_equal(self.timestamps, other.timestamps)
        )

    __hash__ = None  # type: ignore[assignment]  # compared by content, so not a dictionary key

    def __repr__(self) -> str:
        return f"History({len(self)} behaviours from {self.start})"

    def digest(self, length: int | None = None) -> bytes:
        """The digest of the first `length` behaviours (all of them by default): 16 bytes.

        Costs the pages not hashed yet, plus one unfinished page.
        """
        length = len(self) if length is None else self._within(length)
        whole, rest = divmod(length, PAGE)
        digest = self._pages(whole)[1][whole]
        if not rest:
            return digest
        return chain(digest, self._tail_hash() if length == len(self) else self._hash(whole * PAGE, length))

    def page_hashes(self) -> list[bytes]:
        """The hashes of the whole pages, for a store to keep."""
        whole = len(self) // PAGE
        return list(self._pages(whole)[0][:whole])

    def all_hashes(self) -> list[bytes]:
        """The hashes of all pages, the unfinished one, where there is one, included."""
        hashes = self.page_hashes()
        return [*hashes, self._tail_hash()] if len(self) % PAGE else hashes

    def page_digests(self, length: int) -> list[bytes]:
        """The digests at 0, PAGE, 2·PAGE … up to `length`."""
        whole = self._within(length) // PAGE
        return list(self._pages(whole)[1][: whole + 1])

    def gaps(self, low: int, high: int) -> npt.NDArray[np.int64]:
        """Seconds from the behaviour before, for behaviours low … high; the window's first is 0.

        Never negative: a gap too long for int64 counts as the longest one.
        """
        gaps = np.zeros(max(high - low, 0), np.int64)
        first, times = max(low, 1), self.timestamps
        if high > first:
            np.subtract(times[first:high], times[first - 1 : high - 1], out=gaps[first - low :])
            if int(times[high - 1]) - int(times[first - 1]) > _LONGEST_GAP:  # none is longer than all together
                gaps[gaps < 0] = _LONGEST_GAP
        return gaps

    def _within(self, length: int) -> int:
        length = index("length", length)
        if not 0 <= length <= len(self):
            raise InvalidInput("length", f"is {length} in a history of {len(self)} behaviours")
        return length

    def _pages(self, whole: int) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Page hashes and digests of at least the first `whole` pages."""
        known = self._known
        if len(known[1]) > whole:
            return known
        hashes, digests = map(list, known)
        low, high = len(hashes) * PAGE, whole * PAGE
        hashes += page_hashes(self.items[low:high], self.actions[low:high], self.timestamps[low:high])
        for page in range(len(digests) - 1, whole):
            digests.append(chain(digests[page], hashes[page]))
        self._known = hashes, digests
        return hashes, digests

    def _tail_hash(self) -> bytes:
        """Of the unfinished page."""
        if self._tail is None:
            self._tail = self._hash(len(self) // PAGE * PAGE, len(self))
        return self._tail

    def _hash(self, low: int, high: int) -> bytes:
        return page_hash(self.items[low:high], self.actions[low:high], self.timestamps[low:high])


def frozen(array: npt.NDArray[_Int]) -> npt.NDArray[_Int]:
    """A read-only copy, or the array itself where nobody can ever write to it: a digest must stay true."""
    owner: object = array
    while isinstance(owner, _VIEWS):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return array if isinstance(owner, bytes) else _locked(array.copy())


_VIEWS: Final = (np.ndarray, memoryview)


def _locked(array: npt.NDArray[_Int]) -> npt.NDArray[_Int]:
    array.flags.writeable = False
    return array


def index(field: str, value: Any) -> int:
    """`value` as an int. Raises InvalidInput naming `field` for what is not an integer."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise InvalidInput(field, f"must be an integer, not {type(value).__name__}") from error


def _unpickled(
    items: npt.NDArray[np.int64],
    actions: npt.NDArray[np.int32],
    timestamps: npt.NDArray[np.int64],
    start: int,
    hashes: Sequence[bytes],
    digests: Sequence[bytes],
) -> History:
    return History._trusted(_locked(items), _locked(actions), _locked(timestamps), start, hashes, digests)
