"""Our router inside Serve's: with replicas that are none, on Serve's own machinery, in its own loop."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from optional import require

require("ray", "make test installs it where it can be had")

from ray.exceptions import ActorDiedError  # noqa: E402
from ray.serve._private.common import (  # noqa: E402
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve._private.request_router.common import PendingRequest  # noqa: E402

from relaygr.cluster.ray.slot_router import AVOID, KEY, SLOT, TOKENS, SlotRouter, hints  # noqa: E402
from relaygr.relay import Evidence, Membership, Router  # noqa: E402

DEPLOYMENT = DeploymentID("Instance", "relaygr")


class Replica:
    """As a router sees one; `fails` is what it answers to a sign of life."""

    def __init__(self, slot: str, run: int = 0) -> None:
        self.replica_id = ReplicaID(f"{slot}-{run}", DEPLOYMENT)
        self.replica_metadata = {"slot": slot}
        self.routing_stats: dict[str, Any] = {}
        self.max_ongoing_requests = 1000
        self.actor_id = f"{slot}-{run}"
        self.fails: BaseException | None = None

    @property
    def slot(self) -> str:
        return self.replica_metadata["slot"]

    async def get_queue_len(self, *, deadline_s: float) -> int:
        if self.fails is not None:
            raise self.fails
        return 0


class Requests:
    """A router, and requests to it that are under way until they are completed."""

    def __init__(self, replicas: list[Replica], **options: Any) -> None:
        self.router = SlotRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        self.router.initialize_state(**options)
        self.router.update_replicas(replicas)
        self._number = 0
        self._under_way: dict[str, tuple[Any, Any]] = {}

    async def send(self, **headers: str) -> str:
        """The slot it goes to; it stays under way."""
        self._number += 1
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        metadata = RequestMetadata(request_id=str(self._number), internal_request_id=str(self._number))
        pending = PendingRequest(args=[], kwargs={"headers": named}, metadata=metadata)
        async with asyncio.timeout(10):
            replica = await self.router._choose_replica_for_request(pending)
        self._under_way[str(self._number)] = replica.replica_id, replica
        return str(replica.slot)

    def complete(self) -> None:
        for number, (replica_id, _) in self._under_way.items():
            self.router.on_request_completed(replica_id, number)
        self._under_way.clear()

    def end(self) -> None:
        assert self.router._probing is not None
        self.router._probing.cancel()


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(main())  # type: ignore[arg-type]


def key(value: str) -> dict[str, str]:
    return {KEY: value}


def homes(keys: list[str], slots: list[str]) -> dict[str, str]:
    membership = Membership()
    for slot in slots:
        membership.add(slot, slot)
        membership.observe(slot, Evidence.READY)
    router = Router(membership)
    return {key: router.order(key)[0] for key in keys}


KEYS = [f"user-{number}" for number in range(40)]
SLOTS = [f"slot-{number}" for number in range(4)]


def test_a_key_goes_where_the_relay_s_router_would_send_it_whatever_serve_calls_the_replica() -> None:
    async def main() -> None:
        requests = Requests([Replica(slot) for slot in SLOTS], quiet_tokens=1000)
        expected = homes(KEYS, SLOTS)
        for user in KEYS:
            assert await requests.send(**key(user)) == expected[user]
        requests.router.update_replicas([Replica(slot, run=1) for slot in SLOTS])  # all started anew
        requests.complete()
        for user in KEYS:
            assert await requests.send(**key(user)) == expected[user]
        requests.end()

    run(main)


def test_load_is_bounded_in_tokens_and_given_back_when_requests_complete() -> None:
    async def main() -> None:
        requests = Requests([Replica(slot) for slot in SLOTS])
        user = KEYS[0]
        home = homes(KEYS, SLOTS)[user]
        assert await requests.send(**key(user), **{TOKENS: "1000"}) == home
        assert await requests.send(**key(user), **{TOKENS: "1000"}) != home  # it has more than the mean already
        requests.complete()
        assert not any(requests.router._slots.loads().values())
        assert await requests.send(**key(user)) == home
        requests.end()

    run(main)


def test_the_carried_slot_is_followed_whatever_its_load_and_left_when_it_is_gone() -> None:
    async def main() -> None:
        requests = Requests([Replica(slot) for slot in SLOTS])
        for _ in range(5):
            assert await requests.send(**key(KEYS[1]), **{SLOT: "slot-2", TOKENS: "500"}) == "slot-2"
        requests.complete()
        requests.router.update_replicas([Replica(slot) for slot in SLOTS if slot != "slot-2"])
        expected = homes(KEYS, [slot for slot in SLOTS if slot != "slot-2"])
        assert await requests.send(**key(KEYS[1]), **{SLOT: "slot-2"}) == expected[KEYS[1]]
        requests.end()

    run(main)


def test_a_slot_that_goes_moves_its_own_keys_and_no_others() -> None:
    async def main() -> None:
        requests = Requests([Replica(slot) for slot in SLOTS], quiet_tokens=1000)
        before = {user: await requests.send(**key(user)) for user in KEYS}
        requests.router.update_replicas([Replica(slot) for slot in SLOTS[1:]])
        after = {user: await requests.send(**key(user)) for user in KEYS}
        assert all(after[user] == slot for user, slot in before.items() if slot != "slot-0")
        assert "slot-0" not in after.values()
        requests.end()

    run(main)


def test_one_that_drains_gets_no_new_requests_and_those_it_has_still_come() -> None:
    async def main() -> None:
        replicas = [Replica(slot) for slot in SLOTS]
        requests = Requests(replicas, quiet_tokens=1000)
        user = KEYS[0]
        home = homes(KEYS, SLOTS)[user]
        elsewhere = await requests.send(**key(user), **{AVOID: home})  # the sender was refused there
        assert elsewhere != home
        assert await requests.send(**key(user)) == elsewhere
        assert await requests.send(**key(user), **{SLOT: home}) == home
        await requests.router._probe(home, next(replica for replica in replicas if replica.slot == home))
        assert await requests.send(**key(user)) == home  # it said that it does not drain, and lives
        requests.end()

    run(main)


def test_what_gives_no_sign_of_life_is_left_alone_and_found_again() -> None:
    async def main() -> None:
        replicas = [Replica(slot) for slot in SLOTS]
        requests = Requests(replicas, quiet_tokens=1000, fail_after=2)
        user = KEYS[0]
        home = homes(KEYS, SLOTS)[user]
        victim = next(replica for replica in replicas if replica.slot == home)
        assert await requests.send(**key(user)) == home
        victim.fails = TimeoutError()
        await requests.router._probe(home, victim)
        assert await requests.send(**key(user)) == home  # once may be chance
        await requests.router._probe(home, victim)
        assert await requests.send(**key(user)) != home
        victim.fails = None
        await requests.router._probe(home, victim)
        assert await requests.send(**key(user)) == home
        victim.fails = ActorDiedError()
        await requests.router._probe(home, victim)
        assert await requests.send(**key(user)) != home
        requests.end()

    run(main)


def test_a_sender_that_gives_up_while_it_waits_leaves_no_load_behind() -> None:
    async def main() -> None:
        replica = Replica("slot-0")
        replica.max_ongoing_requests = 0  # it takes nothing
        requests = Requests([replica])
        waiting = asyncio.create_task(requests.send(**key("user-1"), **{TOKENS: "700"}))
        while requests.router._slots.loads() != {"slot-0": 700}:  # noqa: ASYNC110  (Serve's machinery tells nobody)
            await asyncio.sleep(0.001)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        for _ in range(10):
            await asyncio.sleep(0)
        assert requests.router._slots.loads() == {"slot-0": 0}
        requests.end()

    run(main)


def test_where_a_message_belongs_is_read_from_calls_and_from_what_the_proxy_carries() -> None:
    assert hints([], {"headers": {"X-RelayGR-Key": "user-7"}})[KEY] == "user-7"
    scope = {"headers": [(b"x-relaygr-key", b"user-8"), (b"x-relaygr-slot", b"slot-1")]}
    told = hints([SimpleNamespace(asgi_scope=scope)], {})
    assert (told[KEY], told[SLOT]) == ("user-8", "slot-1")
    assert hints(["GET", 1], {}) == {}
