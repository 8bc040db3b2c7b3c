"""Leases: owned handles that keep a prefix resident while a request needs it."""

from types import TracebackType
from typing import Self

from relaygr.cache.pages import Leased, PagePool, Pages

__all__ = ["Lease"]


class Lease:
    """Pins pages until released. Leaving the `with` block releases; releasing twice is harmless.

    A lease can be extended to later times, never shortened. Its end ends a claim: a step or a copy that was
    launched on the pages has pins of its own.
    """

    __slots__ = ("_leased", "_pool", "expires", "user")

    def __init__(self, pool: PagePool, user: str, pages: Pages, expires: float) -> None:
        self._leased: Leased | None = pool.lease(user, pages)
        self._pool = pool
        self.user = user
        self.expires = expires

    @property
    def held(self) -> bool:
        return self._leased is not None

    def extend(self, expires: float) -> None:
        """Keep the pages until `expires` at least."""
        self.expires = max(self.expires, expires)

    def release(self) -> None:
        if self._leased is not None:
            self._pool.end_leases((self._leased,))
            self._leased = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
