"""A history by name: what identifies it, without its behaviours."""

from relaygr.errors import InvalidInput
from relaygr.history.digest import PAGE

__all__ = ["KnownHistory"]

_UNKNOWN = b""


class KnownHistory:
    """The start, length and digest of a history that the caller does not have at hand.

    It can be ranked on where exactly its prefix is being made, or is cached, alone or as whole pages of a longer one;
    anything else needs the behaviours.
    """

    __slots__ = ("_digest", "_length", "start")

    def __init__(self, start: int, length: int, digest: bytes) -> None:
        if start < 0:
            raise InvalidInput("start", "must not be negative")
        if length < 0:
            raise InvalidInput("length", "must not be negative")
        if len(digest) != 16:
            raise InvalidInput("digest", f"must be 16 bytes, not {len(digest)}")
        self.start = start
        self._length = length
        self._digest = digest

    def __len__(self) -> int:
        return self._length

    def digest(self, length: int | None = None) -> bytes:
        """The digest at its own length; at any other it is not known, and equals none."""
        return self._digest if length is None or length == self._length else _UNKNOWN

    def page_digests(self, length: int) -> list[bytes]:
        """Digests at whole pages, of which only the one at its own length is known."""
        return [self.digest(page * PAGE) or bytes(16) for page in range(length // PAGE + 1)]
