"""What the relay promises, whatever carries its messages. A new deployment is one more name in DEPLOYMENTS.

Scores are compared with the oracle at every answer. Senders do not retry.
"""

import asyncio
import contextlib
import dataclasses
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments import Deployment, Fleet, balanced, instances, plain, until
from faulty_network import FaultyNetwork
from haproxy_server import program
from relay_load import ITEMS, PLENTY_S, USERS, Load, checked, history, saved
from relaygr.errors import DeadlineExceeded, Overloaded, Unavailable

SLOTS = ("slot-0", "slot-1", "slot-2")
DEPLOYMENTS = (
    "plain",
    "haproxy",
    pytest.param("ray-direct", marks=pytest.mark.ray),
    pytest.param("ray-handle", marks=pytest.mark.ray),
)

Test = Callable[[Deployment, Fleet], Awaitable[None]]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = saved(tmp_path_factory.mktemp("fleet"))
    with instances(folder, folder / "a.safetensors", SLOTS) as running:
        yield running


@pytest.fixture(scope="module")
def on_ray(ray_running: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    from ray_fleet import RayFleet, settings_for

    folder = saved(tmp_path_factory.mktemp("ray"))
    text = f"""
    [data]
    model = "{folder}/a.safetensors"
    [engine]
    device_cache = "16MiB"
    host_cache = "16MiB"
    [instance]
    threads = 1
    drain_s = 5.0
    [router]
    quiet_tokens = 100000
    [ray]
    instances = {len(SLOTS)}
    gateways = 0
    health_timeout_s = 60.0
    """
    with RayFleet(folder, settings_for(folder, text)).running() as running:
        yield running


Deployed = Callable[[Any, Path], contextlib.AbstractAsyncContextManager[Deployment]]


@pytest.fixture(params=DEPLOYMENTS)
def deployed(request: pytest.FixtureRequest) -> tuple[Fleet, Deployed]:
    """The instances, and how a sender reaches them."""
    match request.param:
        case "haproxy":
            program()
            return request.getfixturevalue("processes"), balanced
        case "ray-direct" | "ray-handle":
            fleet = request.getfixturevalue("on_ray")
            from ray_deployments import direct, handled

            return fleet, direct if request.param == "ray-direct" else handled
    return request.getfixturevalue("processes"), plain


@pytest.fixture
def run(deployed: tuple[Fleet, Deployed], tmp_path: Path) -> Iterator[Callable[[Test], None]]:
    fleet, make = deployed

    async def main(test: Test) -> None:
        async with make(fleet, tmp_path) as deployment:
            for slot in SLOTS:
                await until(lambda slot=slot: deployment.sees(slot))
            await test(deployment, fleet)

    def runs(test: Test) -> None:
        asyncio.run(main(test))

    yield runs
    fleet.restore()


async def homes(deployment: Deployment) -> dict[str, str]:
    """Where every user's requests go, one after the other, without leases."""
    await deployment.forget()
    found = {}
    for user in USERS:
        await until(deployment.idle)
        found[user] = (await checked(deployment, user)).slot
    return found


def test_a_key_goes_to_the_same_instance_and_keys_go_to_all(run: Callable[[Test], None]) -> None:
    async def test(deployment: Deployment, fleet: Fleet) -> None:
        first = await homes(deployment)
        assert set(first.values()) == set(SLOTS)
        for _ in range(2):
            assert await homes(deployment) == first

    run(test)


def test_signal_and_rank_meet_and_the_rank_finds_its_prefix(run: Callable[[Test], None]) -> None:
    async def test(deployment: Deployment, fleet: Fleet) -> None:
        for user in USERS:
            slot = await deployment.signal(user, history(user), PLENTY_S)
            ranked = await checked(deployment, user)
            assert ranked.slot == slot
            assert ranked.path in ("RESIDENT", "WAITED")

    run(test)


def test_signal_and_rank_meet_under_load(run: Callable[[Test], None]) -> None:
    async def test(deployment: Deployment, fleet: Fleet) -> None:
        async with Load(deployment).running() as load:
            for number in range(20):
                user = f"own-{number}"
                slot = await deployment.signal(user, history(user), PLENTY_S)
                ranked = await checked(deployment, user)
                assert (ranked.slot, ranked.path in ("RESIDENT", "WAITED")) == (slot, True)
            await load.more(10)

    run(test)


@pytest.mark.parametrize("seed", [0])
def test_a_kill_under_load_fails_no_request_moves_the_keys_of_the_dead_alone_and_a_rejoin_brings_them_back(
    run: Callable[[Test], None], seed: int
) -> None:
    async def test(deployment: Deployment, fleet: Fleet) -> None:
        draw = random.Random(seed)
        before, victim = await homes(deployment), draw.choice(SLOTS)
        async with Load(deployment).running() as load:
            await load.more(draw.randrange(5, 40))
            fleet.kill(victim)
            await load.more(60)
        await until(lambda: gone(deployment, victim))
        during = await homes(deployment)
        assert {user: slot for user, slot in during.items() if before[user] != victim} == {
            user: slot for user, slot in before.items() if slot != victim
        }
        assert victim not in during.values()
        async with Load(deployment).running() as load:
            await load.more(5)
            await asyncio.to_thread(fleet.start, victim)
            await until(lambda: deployment.sees(victim))
            await load.more(20)
        assert await homes(deployment) == before

    run(test)


async def gone(deployment: Deployment, slot: str) -> bool:
    return not await deployment.sees(slot)


def test_a_frozen_instance_costs_no_wrong_answer_and_no_late_one_and_gets_its_keys_back(
    run: Callable[[Test], None],
) -> None:
    async def test(deployment: Deployment, fleet: Fleet) -> None:
        before = await homes(deployment)
        await deployment.forget()
        victim, within_s = before[USERS[0]], 1.0

        async def asked(user: str) -> None:
            began = time.monotonic()
            with contextlib.suppress(DeadlineExceeded, Unavailable, Overloaded):
                await checked(deployment, user, within_s=within_s)
            assert time.monotonic() - began < within_s + 5.0, "answered within the deadline, and what the machine adds"

        fleet.freeze(victim)
        try:
            await asyncio.gather(*(asked(user) for user in USERS if before[user] == victim))
            await until(lambda: gone(deployment, victim))
            during = await homes(deployment)
            assert victim not in during.values()
            assert all(during[user] == slot for user, slot in before.items() if slot != victim)
        finally:
            fleet.thaw(victim)
        await until(lambda: deployment.sees(victim))
        assert await homes(deployment) == before

    run(test)


def test_a_drain_under_load_fails_no_request_and_its_end_brings_the_keys_back(run: Callable[[Test], None]) -> None:
    async def test(deployment: Deployment, fleet: Fleet) -> None:
        before = await homes(deployment)
        victim = before[USERS[0]]
        async with Load(deployment).running() as load:
            await load.more(10)
            await fleet.admin(victim, "drain")
            try:
                await load.more(30)
                await until(lambda: gone(deployment, victim))
                await load.more(10)
                for user in USERS:
                    assert (await checked(deployment, user)).slot != victim
            finally:
                await fleet.admin(victim, "drain", draining=False)
            await until(lambda: deployment.sees(victim))
            await load.more(10)
        assert await homes(deployment) == before

    run(test)


def test_a_swap_under_load_fails_no_request_and_every_answer_is_of_one_model(run: Callable[[Test], None]) -> None:
    async def test(deployment: Deployment, fleet: Fleet) -> None:
        async with Load(deployment, models="ab").running() as load:
            await load.more(10)
            try:
                for slot in SLOTS:
                    await fleet.admin(slot, "swap", model=str(fleet.folder / "b.safetensors"))
                    await load.more(5)
                for user in USERS:
                    await checked(deployment, user, "b")
            finally:
                for slot in SLOTS:
                    await fleet.admin(slot, "swap", model=str(fleet.folder / "a.safetensors"))
            await load.more(10)
        await homes(deployment)

    run(test)


@contextlib.asynccontextmanager
async def behind_faults(fleet: Any, make: Deployed, draw: random.Random) -> AsyncIterator[tuple[Any, list[Any]]]:
    """The fleet as it is reached through what may be faulty: a network before each, or the handle that all go by."""
    if make.__name__ == "handled":
        from ray_deployments import FaultyHandle

        handle = FaultyHandle(fleet.handle, draw)
        yield dataclasses.replace(fleet, handle=handle), [handle]
        return
    async with contextlib.AsyncExitStack() as stack:
        networks = {slot: FaultyNetwork(address, draw) for slot, address in fleet.addresses.items()}
        for network in networks.values():
            await stack.enter_async_context(network)
        addresses = {slot: network.address for slot, network in networks.items()}
        field = "through" if make.__name__ == "direct" else "addresses"
        yield dataclasses.replace(fleet, **{field: addresses}), list(networks.values())


@pytest.mark.parametrize("seed", [0])
def test_a_network_that_drops_delays_and_truncates_costs_no_wrong_answer_and_no_late_one(
    deployed: tuple[Fleet, Deployed], tmp_path: Path, seed: int
) -> None:
    fleet, make = deployed

    async def main() -> None:
        draw = random.Random(seed)
        async with (
            behind_faults(fleet, make, draw) as (behind, networks),
            make(behind, tmp_path) as deployment,
        ):
            for slot in SLOTS:
                await until(lambda slot=slot: deployment.sees(slot))
            outcomes: Counter[str] = Counter()

            async def asked(user: str) -> None:
                began, within_s = time.monotonic(), 1.0
                try:
                    await checked(deployment, user, within_s=within_s)
                    outcomes["answered"] += 1
                except (DeadlineExceeded, Unavailable, Overloaded) as error:
                    outcomes[type(error).__name__] += 1
                assert time.monotonic() - began < within_s + 5.0

            for network in networks:
                network.faulty = True
            for _ in range(5):
                await asyncio.gather(*(asked(user) for user in USERS))
            assert outcomes["answered"] > 20, outcomes
            # That there were faults: how many depends on how many messages are sent, and so on the machine.
            assert sum(network.faults.total() for network in networks) > 5
            for network in networks:
                network.faulty = False
            for slot in SLOTS:
                await until(lambda slot=slot: deployment.sees(slot))
            for user in USERS:
                await checked(deployment, user)

    asyncio.run(main())


def test_an_evicted_user_is_computed_anew(run: Callable[[Test], None]) -> None:
    async def test(deployment: Deployment, fleet: Fleet) -> None:
        user = "leaving"
        await checked(deployment, user)
        again = await checked(deployment, user)
        assert again.path == "RESIDENT"
        dropped = await fleet.admin(again.slot, "evict", user=user)
        assert dropped["prefixes"][again.slot] >= 1
        assert (await checked(deployment, user)).path == "FULL"

    run(test)


def test_a_deadline_that_cannot_be_kept_is_told_and_changes_nothing_for_others(run: Callable[[Test], None]) -> None:
    async def test(deployment: Deployment, fleet: Fleet) -> None:
        async with Load(deployment).running() as load:
            for user in USERS[:6]:
                with pytest.raises(DeadlineExceeded):
                    await deployment.rank(user, history(user), ITEMS, 1e-6)
            await load.more(10)

    run(test)
