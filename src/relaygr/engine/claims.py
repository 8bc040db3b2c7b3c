"""What admitted pre-infers hold: leases that end with their rank, or when their time is up."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from relaygr.cache import Lease, Lineage, PagePool, Pages
from relaygr.engine.guard import Guard
from relaygr.engine.work import Build

__all__ = ["Claim", "Claims"]


@dataclass(eq=False)
class Claim:
    """One pre-infer's lease, on a prefix that was there or on one being built."""

    lease: Lease
    lineage: Lineage
    build: Build | None
    """None: the prefix was there before the pre-infer asked."""
    timer: asyncio.TimerHandle | None = None


class Claims:
    """Claims by user, oldest first. `ended` is called with the build of every claim that ends."""

    def __init__(self, pool: PagePool, lease_s: float, ended: Callable[[Build | None], None], guard: Guard) -> None:
        self._pool = pool
        self._lease_s = lease_s
        self._ended = ended
        self._expire = guard.callback(self._end)
        self._claims: dict[str, deque[Claim]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._claims.values()))

    def oldest(self, user: str) -> Claim | None:
        claims = self._claims.get(user)
        return claims[0] if claims else None

    def add(self, user: str, lineage: Lineage, pages: Pages, build: Build | None, now: float) -> None:
        """Lease these pages for the user's coming rank."""
        events = asyncio.get_running_loop()
        lease = Lease(self._pool, user, pages, now + self._lease_s)
        claim = Claim(lease, lineage, build)
        claim.timer = events.call_later(self._lease_s, self._expire, claim)
        self._claims.setdefault(user, deque()).append(claim)
        if build is not None:
            build.claims += 1

    def end_oldest(self, user: str) -> None:
        """The user's rank has ended, and its claim with it, if it had one."""
        claim = self.oldest(user)
        if claim is not None:
            self._end(claim)

    def end_where(self, over: Callable[[Claim], bool], user: str | None = None) -> None:
        """End every claim, or every one of this user, for which `over` is true."""
        chosen = [self._claims.get(user, ())] if user is not None else list(self._claims.values())
        for claim in [claim for claims in chosen for claim in claims if over(claim)]:
            self._end(claim)

    def _end(self, claim: Claim) -> None:
        claims = self._claims[claim.lease.user]
        claims.remove(claim)
        if not claims:
            del self._claims[claim.lease.user]
        if claim.timer is not None:
            claim.timer.cancel()
        claim.lease.release()
        if claim.build is not None:
            claim.build.claims -= 1
        self._ended(claim.build)
