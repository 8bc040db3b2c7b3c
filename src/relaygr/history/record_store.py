"""What stores do with records, whatever holds them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from relaygr.errors import InvalidInput
from relaygr.history.digest import EMPTY, PAGE, chain, page_hash
from relaygr.history.history import History, index
from relaygr.history.records import Records, User
from relaygr.history.store import user_key

__all__ = ["RecordStore"]

_T = TypeVar("_T")


class RecordStore(ABC):
    """A HistoryStore over `Records`. A kind of store runs work on them in one transaction, and lists its users."""

    @abstractmethod
    def _run(self, work: Callable[[Records], _T], *, write: bool = False) -> _T:
        """What the work returns, run on one consistent state. It may run more than once."""

    @abstractmethod
    def users(self) -> Iterator[str]: ...

    @abstractmethod
    def close(self) -> None: ...

    def append(self, user: str, items: Any, actions: Any, timestamps: Any) -> int:
        return self.append_many({user: History(items, actions, timestamps)})[user]

    def append_many(self, behaviours: Mapping[str, History]) -> dict[str, int]:
        keys = {user: user_key(user) for user in behaviours}
        for user, new in behaviours.items():
            if not isinstance(new, History):
                raise InvalidInput("behaviours", f"of user {user!r} must be a History, not {type(new).__name__}")

        def work(records: Records) -> dict[str, int]:
            records.expect_appends(list(keys.values()))
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

    def read(self, user: str, last: int | None = None, *, start: int = 0, known: History | None = None) -> History:
        key, start = user_key(user), _count("start", start)
        last = None if last is None else _count("last", last)

        def work(records: Records) -> History:
            entry = records.user(key)
            length = entry.length if entry else 0
            low = min(length, start if last is None else max(start, length - last))
            if entry is None or low == length:
                return History((), (), (), start=low)
            page, skip = divmod(low, PAGE)
            end = -(-length // PAGE)
            records.expect(key, page, end)
            hashes = records.hashes(key, entry, page, end)
            if not skip and known is not None and known.start == low and known.all_hashes() == hashes:
                return known
            whole = () if skip else hashes[: length // PAGE - page]
            shared = _shared(known.page_hashes(), whole) if known is not None and known.start == low else 0
            if not shared:
                items, actions, timestamps = records.columns(key, entry, page, hashes)
                return History.from_store(items[skip:], actions[skip:], timestamps[skip:], start=low, page_hashes=whole)
            assert known is not None
            kept, rest = known[: shared * PAGE], hashes[shared:]
            return kept.append(*records.columns(key, entry, page + shared, rest)) if rest else kept

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _user(self, user: str) -> User | None:
        key = user_key(user)
        return self._run(lambda records: records.user(key))


def _shared(ours: Sequence[bytes], stored: Sequence[bytes]) -> int:
    """How many pages from the first on are the same."""
    pairs = zip(ours, stored, strict=False)
    return next((page for page, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(ours), len(stored)))


def _count(field: str, value: int) -> int:
    value = index(field, value)
    if value < 0:
        raise InvalidInput(field, f"must not be negative, but is {value}")
    return value
