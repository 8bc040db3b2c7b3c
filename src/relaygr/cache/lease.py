"""Leases: owned handles that keep a prefix resident while a request needs it."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np

from relaygr.cache.pages import PagePool, Pages

__all__ = ["Lease"]


class Lease:
    """Pins pages until released. Leaving the `with` block releases; releasing twice is harmless.

    A lease can be extended to later times, never shortened. Its end ends a claim: a step or a copy that was
    launched on the pages has pins of its own.
    """

    __slots__ = ("_pages", "_pool", "expires", "user")

    def __init__(self, pool: PagePool, user: str, pages: Pages, expires: float) -> None:
        pool.pin(pages)
        self._pool = pool
        self._pages: Pages | None = pages
        self.user = user
        self.expires = expires

    @property
    def held(self) -> bool:
        return self._pages is not None

    def extend(self, expires: float) -> None:
        """Keep the pages until `expires` at least."""
        self.expires = max(self.expires, expires)

    def release(self) -> None:
        if self._pages is not None:
            self._pool.unpin(self._pages)
            self._pages = None

    @staticmethod
    def release_all(leases: "Sequence[Lease]") -> None:
        """Release leases of one pool together, which is cheaper than one by one."""
        users: set[str] = set()
        together = []
        for lease in leases:
            if lease._pages is None:
                continue
            if lease.user in users:  # pages of different users are different pages
                lease.release()
            else:
                users.add(lease.user)
                together.append(lease._pages)
                lease._pages = None
        if together:
            leases[0]._pool.unpin(together[0] if len(together) == 1 else np.concatenate(together))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
