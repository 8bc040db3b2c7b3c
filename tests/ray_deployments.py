"""The ways a sender reaches instances that Ray runs: those of `deployments`, with Ray.

Import it only where Ray is there.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ray.exceptions import ActorUnavailableError

from deployments import Plain, Ranks, Sender
from faulty_network import DELAY_S, Fault
from ray_fleet import SUITE, RayFleet
from relaygr import History
from relaygr.clock import RealClock
from relaygr.cluster.ray.directory import directory, follow
from relaygr.cluster.ray.handle_client import HandleClient
from relaygr.cluster.ray.slot_router import KEY, SLOT, TOKENS
from relaygr.cluster.ray.slots import Held
from relaygr.relay import Evidence, Membership, Router, RouterConfig, Trigger
from relaygr.serving.client import HttpClient
from relaygr.serving.ranking import RelayRanking

__all__ = ["FaultyHandle", "Handled", "direct", "handled"]

FOLLOW_S = 0.1
LOST = "the network lost it"


@contextlib.asynccontextmanager
async def direct(fleet: RayFleet, folder: Path) -> AsyncIterator[Plain]:
    """As a gateway on Ray does by default: its own router over the slots that the directory tells, by HTTP."""
    membership, slots = Membership(), directory(SUITE)

    def address(held: Held) -> str:
        return held.address if fleet.through is None else fleet.through[held.slot]

    async def following() -> None:
        while True:
            await follow(slots, membership, address)
            await asyncio.sleep(FOLLOW_S)

    def connect(address: str) -> HttpClient:
        return HttpClient.to(address, keep=0)

    router = Router(membership, RouterConfig(quiet_tokens=100_000))
    async with RelayRanking(membership, router, Trigger(), RealClock(), connect=connect) as ranking:
        task = asyncio.create_task(following())
        try:
            yield Plain(ranking)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Handled(Sender):
    """Calls by a handle of Serve, routed by our router inside Serve's."""

    def __init__(self, fleet: RayFleet) -> None:
        super().__init__(HandleClient(fleet.handle))
        self._signalled: dict[str, str] = {}
        self._sent = 0

    async def signal(self, user: str, history: History, within_s: float) -> str:
        self._signalled[user] = await super().signal(user, history, within_s)
        return self._signalled[user]

    async def rank(self, user: str, history: History, items: Any, within_s: float) -> Ranks:
        self._sent += 1
        try:
            return await super().rank(user, history, items, within_s)
        finally:
            self._sent -= 1
            self._signalled.pop(user, None)

    def headers(self, user: str) -> dict[str, str]:
        carried = {SLOT: self._signalled[user]} if user in self._signalled else {}
        return {**super().headers(user), **carried, TOKENS: "500"}

    async def sees(self, slot: str) -> bool:
        """Whether a message whose key belongs to the slot comes there. One that nobody answers was still sent there."""
        try:
            async with asyncio.timeout(1.0):
                reply = await self._client.request("GET", "/readyz", b"", {KEY: _key_of(slot)})
        except TimeoutError:
            return True
        return reply.status == 200 and reply.headers[SLOT] == slot

    async def idle(self) -> bool:
        return not self._sent

    async def forget(self) -> None:
        self._signalled.clear()


def _key_of(slot: str) -> str:
    """A key whose own slot this is, whichever of the first few others there are."""
    membership = Membership()
    for number in range(8):
        membership.add(f"slot-{number}", "")
        membership.observe(f"slot-{number}", Evidence.READY)
    router = Router(membership)
    return next(key for key in map(str, range(10_000)) if router.order(key)[0] == slot)


@contextlib.asynccontextmanager
async def handled(fleet: RayFleet, folder: Path) -> AsyncIterator[Handled]:
    yield Handled(fleet)


class FaultyHandle:
    """A handle whose calls are lost, late, broken off or never answered, by a seeded draw, while `faulty`."""

    def __init__(self, handle: Any, draw: random.Random) -> None:
        self._handle, self._draw = handle, draw
        self.faulty = False
        self.faults: Counter[Fault] = Counter()

    @property
    def call(self) -> "FaultyHandle":
        return self

    async def remote(self, *arguments: Any, **named: Any) -> Any:
        fault = self._draw.choice(list(Fault)) if self.faulty and self._draw.random() < 0.5 else None
        if fault is not None:
            self.faults[fault] += 1
        if fault is Fault.DROP:
            raise ActorUnavailableError(LOST, None)
        answer = await self._handle.call.remote(*arguments, **named)
        if fault is Fault.DELAY:
            await asyncio.sleep(DELAY_S)
        elif fault is Fault.TRUNCATE:
            raise ActorUnavailableError(LOST, None)
        elif fault is Fault.SWALLOW:
            await asyncio.get_running_loop().create_future()
        return answer
