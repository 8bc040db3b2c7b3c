"""The slots of an application, kept by an actor that outlives every version of it: an upgrade changes no slot."""

import asyncio
import contextlib
import time
import warnings
from collections.abc import Callable
from typing import Any, Final, Protocol

import ray

from relaygr.cluster.ray.slots import Held, Slots
from relaygr.errors import Unavailable
from relaygr.relay import Membership

__all__ = ["ANNOUNCE_S", "Directory", "SlotsActor", "directory", "follow"]

ANNOUNCE_S: Final = 0.5
"""How often a holder says what it holds, and a gateway asks who there is."""
RECOVER_S: Final = 4 * ANNOUNCE_S
"""How long an actor that was started anew listens before it gives out slots."""
NAMESPACE: Final = "serve"
"""Where Serve's replicas have their names."""


class Directory(Protocol):
    """Whoever knows the slots. Raises Unavailable when it cannot be asked."""

    async def claim(self, holder: str, address: str, pid: int) -> Held: ...

    async def announce(self, held: Held) -> bool: ...

    async def leave(self, holder: str) -> None: ...

    async def release(self, holder: str) -> None: ...

    async def table(self) -> tuple[Held, ...] | None:
        """None while it is not known who holds what."""
        ...


class SlotsActor:
    """Slots in a process of their own, restarted by Ray."""

    def __init__(self) -> None:
        self._slots = Slots()
        with warnings.catch_warnings():  # Ray warns of its own use of it
            warnings.simplefilter("ignore")
            anew = ray.get_runtime_context().was_current_actor_reconstructed
        self._known_at = time.monotonic() + (RECOVER_S if anew else 0.0)

    async def claim(self, holder: str, address: str, pid: int) -> Held:
        await asyncio.sleep(self._known_at - time.monotonic())
        alive = await asyncio.to_thread(lambda: {held.holder: _alive(held.holder) for held in self._slots.table()})
        return self._slots.claim(holder, address, pid, lambda name: alive.get(name, True))

    async def announce(self, held: Held) -> bool:
        return self._slots.announce(held)

    async def leave(self, holder: str) -> None:
        self._slots.leave(holder)

    async def release(self, holder: str) -> None:
        self._slots.release(holder)

    async def table(self) -> tuple[Held, ...] | None:
        return self._slots.table() if time.monotonic() >= self._known_at else None


def _alive(holder: str) -> bool:
    """Whether Ray still has an actor of that name: it forgets those that died."""
    try:
        ray.get_actor(holder, namespace=NAMESPACE)
    except ValueError:
        return False
    return True


class ActorDirectory:
    """The actor of an application, made by whoever asks first. It is looked up again when it was lost."""

    def __init__(self, app: str) -> None:
        self._name = f"relaygr-slots-{app}"
        self._actor: Any = None

    async def claim(self, holder: str, address: str, pid: int) -> Held:
        held: Held = await self._call("claim", holder, address, pid)
        return held

    async def announce(self, held: Held) -> bool:
        mine: bool = await self._call("announce", held)
        return mine

    async def leave(self, holder: str) -> None:
        await self._call("leave", holder)

    async def release(self, holder: str) -> None:
        await self._call("release", holder)

    async def table(self) -> tuple[Held, ...] | None:
        told: tuple[Held, ...] | None = await self._call("table")
        return told

    def end(self) -> None:
        """Nobody serves any more: the actor goes, too."""
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(self._name, namespace=NAMESPACE))

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(self._get)
            return await getattr(self._actor, method).remote(*arguments)
        except Exception as error:
            self._actor = None
            raise Unavailable(f"the directory of slots cannot be asked: {error}") from error

    def _get(self) -> Any:
        kind = ray.remote(SlotsActor).options(
            name=self._name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0, max_restarts=-1
        )
        return kind.remote()


def directory(app: str) -> ActorDirectory:
    """That of a Serve application."""
    return ActorDirectory(app)


async def follow(slots: Directory, membership: Membership, address: Callable[[Held], str]) -> tuple[Held, ...] | None:
    """Bring the membership up to what the directory tells, and return that. While it cannot tell, nothing changes."""
    try:
        table = await slots.table()
    except Unavailable:
        return None
    if table is None:
        return None
    for held in table:
        membership.add(held.slot, address(held))
    for member in membership.members():
        if member.slot not in {held.slot for held in table}:
            membership.remove(member.slot)
    return table
