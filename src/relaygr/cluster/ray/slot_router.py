"""The relay's router inside Serve's: every handle to the instances, and Serve's proxy, route by it.

    handle.call.remote(…, headers) ──▶ SlotRouter ─┬─ x-relaygr-slot names a slot that lives: there
                                                   └─ else by x-relaygr-key: the key's slot, or the next with room

Replicas are known by their slots, which `record_replica_metadata` tells once: a replica that Serve has started anew
has another id and the same slot, and so the same keys.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ray.exceptions import ActorDiedError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from relaygr.errors import Unavailable
from relaygr.relay import Evidence, Health, Membership, MembershipConfig, Route, Router, RouterConfig

__all__ = ["AVOID", "KEY", "SLOT", "TOKENS", "SlotRouter", "hints"]

KEY: Final = "x-relaygr-key"
SLOT: Final = "x-relaygr-slot"
"""The slot that the answer to an earlier message of the same request named."""
TOKENS: Final = "x-relaygr-tokens"
"""What the slot is charged with meanwhile: the tokens of the history and the candidates. 1 where none is given."""
AVOID: Final = "x-relaygr-avoid"
"""Slots that refused this message already, because they drain."""
PROBE_S: Final = 0.5
"""How often a replica is asked for a sign of life, and how long that may take."""


class SlotRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """Consistent hashing with bounded load on slots, as gateways do it over HTTP."""

    def initialize_state(
        self, load_factor: float = 1.25, quiet_tokens: int = 0, affinity: bool = True, fail_after: int = 3
    ) -> None:
        """Serve calls it with the `request_router_kwargs` of the deployment: settings of router and membership."""
        self._membership = Membership(MembershipConfig(fail_after))
        self._slots = Router(self._membership, RouterConfig(load_factor, quiet_tokens, affinity))
        self._by_slot: dict[str, RunningReplica] = {}
        self._routes: dict[str, Route] = {}
        """What is under way, by Serve's id of the request."""
        self._probing: asyncio.Task[None] | None = None

    # ---- who there is

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._by_slot = {slot: replica for replica in replicas if (slot := _slot(replica))}
        for slot, replica in self._by_slot.items():
            self._membership.add(slot, replica.replica_id.unique_id)
            if _draining(replica):
                self._membership.observe(slot, Evidence.DRAINING)
            elif self._membership.health(slot) is Health.JOINING:  # Serve lists those that are ready
                self._membership.observe(slot, Evidence.READY)
        for member in self._membership.members():
            if member.slot not in self._by_slot:
                self._membership.remove(member.slot)
        if self._probing is None:
            self._probing = self._event_loop.create_task(self._probe_on())

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        for slot, replica in self._by_slot.items():
            if replica.replica_id == replica_id:
                self._membership.observe(slot, Evidence.REFUSED)

    async def _probe_on(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            await asyncio.gather(*(self._probe(slot, replica) for slot, replica in self._by_slot.items()))

    async def _probe(self, slot: str, replica: RunningReplica) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                await replica.get_queue_len(deadline_s=PROBE_S)
        except ActorDiedError:
            evidence = Evidence.REFUSED
        except Exception:  # whatever it is, there was no sign of life, and the next must be waited for
            evidence = Evidence.FAILED
        else:
            evidence = Evidence.DRAINING if _draining(replica) else Evidence.READY
        if self._by_slot.get(slot) is replica:
            self._membership.observe(slot, evidence)

    # ---- where a message goes

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The slot's replica alone: Serve asks again, after a while, where that one cannot take it."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        told = hints(pending_request.args, pending_request.kwargs)
        for slot in filter(None, told.get(AVOID, "").split(",")):
            self._membership.observe(slot, Evidence.DRAINING)
        if KEY not in told and SLOT not in told:
            return [candidate_replicas]
        request_id = pending_request.metadata.internal_request_id
        self._release(request_id)
        try:
            route = self._place(told)
        except Unavailable:
            return [[]]
        replica = self._by_slot.get(route.slot)
        if replica is None or replica.replica_id not in self._replicas:
            route.release()
            return [[]]
        self._routes[request_id] = route
        pending_request.future.add_done_callback(
            lambda future: self._release(request_id) if future.cancelled() else None
        )
        return [[replica]]

    def _place(self, told: Mapping[str, str]) -> Route:
        key, slot = told.get(KEY, ""), told.get(SLOT)
        tokens = int(told[TOKENS]) if told.get(TOKENS, "").isdigit() else 1
        return self._slots.follow(slot, key, tokens) if slot else self._slots.place(key, tokens)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._release(internal_request_id)

    def _release(self, request_id: str) -> None:
        route = self._routes.pop(request_id, None)
        if route is not None:
            route.release()


def hints(arguments: Iterable[Any], named: Mapping[str, Any]) -> dict[str, str]:
    """The headers that say where a message belongs, of a call by handle or of a request that Serve's proxy carries."""
    headers = named.get("headers")
    if isinstance(headers, Mapping):
        return {str(name).lower(): str(value) for name, value in headers.items()}
    for argument in arguments:
        scope = getattr(argument, "asgi_scope", None)
        if scope is not None:
            with contextlib.suppress(KeyError, UnicodeDecodeError):
                return {name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]}
    return {}


def _slot(replica: RunningReplica) -> str | None:
    slot = replica.replica_metadata.get("slot")
    return slot if isinstance(slot, str) and slot else None


def _draining(replica: RunningReplica) -> bool:
    return bool(replica.routing_stats.get("draining"))
