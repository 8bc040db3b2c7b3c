"""A membership that follows the directory, and what it does while the directory cannot tell."""

import asyncio

import msgspec

from optional import require

require("ray", "make test installs it where it can be had")

from relaygr.cluster.ray.directory import follow  # noqa: E402
from relaygr.cluster.ray.gateway import address_of, connector, targets  # noqa: E402
from relaygr.cluster.ray.handle_client import HandleClient  # noqa: E402
from relaygr.cluster.ray.slots import Held  # noqa: E402
from relaygr.errors import Unavailable  # noqa: E402
from relaygr.relay import Evidence, Health, Membership  # noqa: E402
from relaygr.serving.client import HttpClient  # noqa: E402
from relaygr.serving.ray_settings import DataPath  # noqa: E402


def held(slot: str, holder: str = "a", port: int = 1) -> Held:
    return Held(slot, holder, f"http://10.0.0.1:{port}", 1)


class Told:
    """A directory that tells what it is told to."""

    def __init__(self, table: tuple[Held, ...] | None) -> None:
        self.now: tuple[Held, ...] | Exception | None = table

    async def table(self) -> tuple[Held, ...] | None:
        if isinstance(self.now, Exception):
            raise self.now
        return self.now

    async def claim(self, holder: str, address: str, pid: int) -> Held:
        raise NotImplementedError

    async def announce(self, held: Held) -> bool:
        raise NotImplementedError

    async def leave(self, holder: str) -> None:
        raise NotImplementedError

    async def release(self, holder: str) -> None:
        raise NotImplementedError


def followed(membership: Membership, told: Told) -> None:
    asyncio.run(follow(told, membership, lambda held: held.address))


def test_slots_come_move_and_go() -> None:
    membership, told = Membership(), Told((held("slot-0"), held("slot-1", "b", 2)))
    followed(membership, told)
    membership.observe("slot-0", Evidence.READY)
    membership.observe("slot-1", Evidence.READY)
    told.now = (held("slot-0"), held("slot-1", "c", 3))
    followed(membership, told)
    assert membership.health("slot-0") is Health.UP
    assert (membership.health("slot-1"), membership.address("slot-1")) == (Health.JOINING, "http://10.0.0.1:3")
    told.now = (held("slot-0"),)
    followed(membership, told)
    assert [member.slot for member in membership.members()] == ["slot-0"]


def test_a_directory_that_is_lost_or_recovers_takes_nobody_away() -> None:
    membership, told = Membership(), Told((held("slot-0"),))
    followed(membership, told)
    for nothing in (None, Unavailable("it is gone")):
        told.now = nothing
        followed(membership, told)
        assert [member.slot for member in membership.members()] == ["slot-0"]


def test_prometheus_is_told_where_instances_tell_their_metrics() -> None:
    told = msgspec.json.decode(targets((held("slot-0", port=40123), held("slot-1", "b", 40124))))
    assert told == [
        {"targets": ["10.0.0.1:40123"], "labels": {"slot": "slot-0"}},
        {"targets": ["10.0.0.1:40124"], "labels": {"slot": "slot-1"}},
    ]


def test_by_handle_a_new_holder_is_another_address_and_messages_name_the_slot() -> None:
    first, second = (address_of(DataPath.HANDLE, held("slot-1", holder)) for holder in ("a#b#c", "a#b#d"))
    assert first != second
    assert address_of(DataPath.DIRECT, held("slot-1")) == "http://10.0.0.1:1"

    class Handle:
        call = None

    client = connector(Handle())(first)
    assert isinstance(client, HandleClient)
    assert client.slot == "slot-1"
    assert isinstance(connector(Handle())("http://10.0.0.1:1"), HttpClient)
