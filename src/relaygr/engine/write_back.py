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
            held = self._device.find(prefix.user)
            if held is None or held.identity != prefix.identity:
                continue  # evicted or replaced before its turn
            prefix = held  # its head may be gone by now
            old = self._host.find(prefix.user)
            kept: Pages = np.empty(0, np.int64)
            missing = prefix.missing
            if old is not None and old.missing > missing and self._host.pool.free >= len(prefix.pages):
                old = None  # there is room for its head again: all of it is written anew
            if old is not None and old.lineage == prefix.lineage:
                if old.identity == prefix.identity or (old.includes(prefix) and old.missing <= missing):
                    continue
                alike = (prefix.lineage.context_tokens + old.shares(prefix)) // PAGE
                if alike > old.missing and alike >= missing:
                    kept, missing = old.pages[: alike - old.missing], old.missing
            written = prefix.pages[missing + len(kept) - prefix.missing :]
            fresh = self._host.reserve(len(written), kept)
            if fresh is not None:
                self._begin(prefix, written, fresh, prefix.on(np.concatenate((kept, fresh)), missing))

    def _begin(self, prefix: Prefix, source: Pages, target: Pages, copied: Prefix) -> None:
        """Copy these pages; with them, the host has `copied`, whose pages are pinned."""
        self._writing, self._keep = prefix, True
        lease = Lease(self._device.pool, prefix.user, prefix.pages, math.inf)

        def done(error: BaseException | None) -> None:
            lease.release()
            if error is None and self._keep:
                self._host.install(copied, self._last(prefix.user))
                self.written += 1
            self._host.pool.unpin(copied.pages)
            self._writing = None

        self._copy(PageCopy(Direction.OUT, source, target), done)
