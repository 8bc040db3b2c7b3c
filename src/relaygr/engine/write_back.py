"""Copies of prefixes to host memory, one at a time, beside everything else."""

import math
from collections.abc import Callable

import numpy as np

from relaygr.cache import Lease, Pages, Prefix, Tier, WriteBackQueue
from relaygr.engine.device import Copy
from relaygr.engine.step import Direction, PageCopy
from relaygr.history import PAGE

__all__ = ["WriteBack"]


class WriteBack:
    """Takes prefixes from the queue when the last copy is done. Only pages the host does not have are copied."""

    def __init__(
        self, device: Tier, host: Tier, queue: WriteBackQueue, copy: Copy, last: Callable[[str], float]
    ) -> None:
        """`last`: when a user was last here."""
        self.queue = queue
        self.written = 0
        self._device = device
        self._host = host
        self._copy = copy
        self._last = last
        self._writing: Prefix | None = None
        self._keep = True

    def forget(self, user: str) -> None:
        """Nothing of this user is to reach the host, not even what is being copied."""
        self.queue.forget(user)
        if self._writing is not None and self._writing.user == user:
            self._keep = False

    def forget_all(self) -> None:
        self.queue.clear()
        self._keep = False

    def turn(self) -> None:
        """Begin the next copy, if none is under way."""
        while self._writing is None and (prefix := self.queue.take()) is not None:
            if self._device.find(prefix.user) is not prefix:
                continue  # evicted or replaced before its turn
            old = self._host.find(prefix.user)
            kept: Pages = np.empty(0, np.int64)
            if old is not None and old.lineage == prefix.lineage:
                if old.identity == prefix.identity:
                    continue
                kept = old.pages[: (prefix.lineage.context_tokens + old.shares(prefix)) // PAGE]
            fresh = self._host.reserve(len(prefix.pages) - len(kept), kept)
            if fresh is not None:
                self._begin(prefix, np.concatenate((kept, fresh)), len(kept))

    def _begin(self, prefix: Prefix, target: Pages, kept: int) -> None:
        self._writing, self._keep = prefix, True
        lease = Lease(self._device.pool, prefix.user, prefix.pages, math.inf)

        def done(error: BaseException | None) -> None:
            lease.release()
            if error is None and self._keep:
                self._host.install(prefix.on(target), self._last(prefix.user))
                self.written += 1
            self._host.pool.unpin(target)
            self._writing = None

        self._copy(PageCopy(Direction.OUT, prefix.pages[kept:], target[kept:]), done)
