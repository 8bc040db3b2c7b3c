"""Where histories are kept: the interface all stores share, and what they raise."""

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Protocol, Self, runtime_checkable

from relaygr.errors import InvalidInput, RelayError
from relaygr.history.history import History

__all__ = ["MAX_USER_BYTES", "HistoryStore", "StoreCorrupt", "StoreError", "StoreFull", "user_key"]

MAX_USER_BYTES: Final = 511
"""The longest user id any store takes, in UTF-8."""


class StoreError(RelayError):
    """The store cannot do this as it is; the message says why and what to do."""


class StoreCorrupt(StoreError):
    """What is stored is not what was written. No wrong history is ever returned instead."""


class StoreFull(StoreError):
    """There is no room for this write. Nothing of it was stored; what is stored can still be read."""


@runtime_checkable
class HistoryStore(Protocol):
    """Keeps the histories of many users, with the hashes of their pages.

    Every operation is atomic and sees one consistent state: a reader sees all of an append or nothing of it,
    in this process and in others. An operation that raises has changed nothing. A later operation, of any
    process, sees what a finished one wrote; whether it survives a crash of the machine is for each store to say.

    A user nobody has written is a user with an empty history. User ids are non-empty strings of at most
    MAX_USER_BYTES bytes in UTF-8. Stores are safe to use from many threads.

    Any operation raises InvalidInput naming the field for bad arguments, StoreCorrupt for damaged records,
    Unavailable after `close`, and StoreError for whatever else keeps the store from answering.
    """

    def append(self, user: str, items: Any, actions: Any, timestamps: Any) -> int:
        """Puts behaviours, oldest first, behind the user's last. Returns the new length.

        Takes what `History` takes; times may not go back behind the last one stored. Costs the behaviours
        given and at most one page, however long the history is. Raises StoreFull.
        """
        ...

    def append_many(self, behaviours: Mapping[str, History]) -> dict[str, int]:
        """Appends for many users: all of it is stored, or nothing is. Returns their new lengths.

        Only the behaviours of each History count, not its `start`. Raises as `append` does.
        """
        ...

    def replace(self, user: str, items: Any, actions: Any, timestamps: Any) -> int:
        """Puts these behaviours in place of the user's history: a correction. Returns the new length."""
        ...

    def delete(self, user: str) -> bool:
        """Forgets the user. Returns whether there was anything to forget."""
        ...

    def read(self, user: str, last: int | None = None, *, start: int = 0, known: History | None = None) -> History:
        """The user's behaviours from `start` on, and of these the newest `last` (all of them by default).

        The History says where it starts. It owns its arrays, and brings the stored page hashes where it
        starts at a page. A `start` behind the end gives an empty History that starts at the end.

        `known` is what was read before: pages of it that are stored still, by their hashes, need not be read again. It
        changes nothing about the answer.
        """
        ...

    def length(self, user: str) -> int:
        """How many behaviours the user has."""
        ...

    def span(self, user: str) -> tuple[int, int] | None:
        """The first and the last timestamp, or None for an empty history."""
        ...

    def digest(self, user: str, length: int | None = None, *, start: int = 0) -> bytes:
        """What `read(user, start=start).digest(length)` is, without reading it all.

        `start` must be a multiple of the page. Costs one chained hash per page, and at most one page read.
        """
        ...

    def users(self) -> Iterator[str]:
        """All users with behaviours, in no promised order.

        Not one atomic look: users written or deleted meanwhile may or may not appear; all others do, once.
        """
        ...

    def close(self) -> None:
        """Lets go of everything held. Does nothing the second time."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def user_key(user: str) -> bytes:
    """The user id as stores keep it. Raises InvalidInput for what no store takes."""
    if not isinstance(user, str):
        raise InvalidInput("user", f"must be a string, not {type(user).__name__}")
    try:
        key = user.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("user", f"cannot be written in UTF-8: {error.reason}") from error
    if not 0 < len(key) <= MAX_USER_BYTES:
        raise InvalidInput("user", f"must have 1 to {MAX_USER_BYTES} bytes in UTF-8, not {len(key)}")
    return key
