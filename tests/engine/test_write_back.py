"""Host memory gets copies of what is worth more there than what would go for it, and of what is new of what it has."""

import asyncio
import random
from dataclasses import replace

import pytest

from behaviours import numbered
from engines import COSTS, Bench, WatchedDevice, in_virtual_time, opened
from relaygr import Path
from relaygr.engine.loop import EngineLoop
from relaygr.engine.step import Direction


def quick() -> WatchedDevice:
    """Three pages take it 1.2 ms."""
    return WatchedDevice(replace(COSTS, token=4e-6))


def loop_of(bench: Bench) -> EngineLoop:
    assert bench.engine._loop is not None
    return bench.engine._loop


def learn(bench: Bench, gap: tuple[float, float], *, users: int = 100, visits: int = 8) -> None:
    """So many users have come, each so often, so many seconds apart, all of them until now."""
    draw, events = random.Random(0), []
    for user in range(users):
        at = bench.now
        for _ in range(visits):
            events.append((f"past {user}", at))
            at -= draw.uniform(*gap)
    bench.engine.learn_visits(sorted(events, key=lambda event: event[1]))


def pages_out(bench: Bench) -> list[int]:
    """Of each copy to host memory."""
    return [len(copy.source) for copy in bench.device.copies if copy.direction is Direction.OUT]


async def fill_host(bench: Bench, users: int) -> None:
    """So many users of three pages each, all of them in both tiers."""
    for user in range(users):
        await bench.rank(f"u{user}", numbered(300, salt=user))
        await bench.settle()
    assert len(loop_of(bench).host) == users
    assert loop_of(bench).host.pool.free < 3
    bench.device.forget()


@in_virtual_time
async def test_where_users_are_due_later_nobody_who_was_just_here_takes_the_place_of_one_who_is_due() -> None:
    async with opened(spare=40, host=15, device=quick()) as bench:
        learn(bench, (2.0, 10.0))
        await fill_host(bench, 5)
        await asyncio.sleep(4.0)
        await bench.rank("new", numbered(300, salt=9))
        await bench.settle()
        assert pages_out(bench) == []
        assert loop_of(bench).host.find("new") is None
        await asyncio.sleep(60.0)  # nobody expects them any more
        await bench.rank("newer", numbered(300, salt=10))
        await bench.settle()
        assert pages_out(bench) == [3]
        assert loop_of(bench).host.find("newer") is not None


@in_virtual_time
async def test_where_users_return_at_once_or_never_who_was_just_here_takes_the_place_of_others() -> None:
    async with opened(spare=40, host=15, device=quick()) as bench:
        learn(bench, (0.05, 0.3), visits=3)
        await fill_host(bench, 5)
        await asyncio.sleep(1.0)
        await bench.rank("new", numbered(300, salt=9))
        await bench.settle()
        assert pages_out(bench) == [3]
        assert loop_of(bench).host.find("new") is not None


@in_virtual_time
async def test_of_a_user_host_memory_has_what_is_new_is_copied() -> None:
    async with opened(spare=40, host=16, device=quick()) as bench:
        learn(bench, (2.0, 10.0))
        await fill_host(bench, 5)
        await asyncio.sleep(4.0)
        await bench.rank("u3", numbered(400, salt=3))
        await bench.settle()
        assert pages_out(bench) == [2]
        kept = loop_of(bench).host.find("u3")
        assert kept is not None
        assert kept.length == 400


@pytest.mark.parametrize("known", [True, False])
@in_virtual_time
async def test_while_it_is_not_known_when_users_return_everything_is_copied(known: bool) -> None:
    async with opened(spare=40, host=15, device=quick()) as bench:
        learn(bench, (2.0, 10.0), users=100 if known else 7)
        await fill_host(bench, 5)
        await asyncio.sleep(4.0)
        await bench.rank("new", numbered(300, salt=9))
        await bench.settle()
        assert pages_out(bench) == ([] if known else [3])


@pytest.mark.parametrize("dear", [True, False])
@in_virtual_time
async def test_what_takes_long_to_compute_is_always_copied_for_only_heads_of_others_go(dear: bool) -> None:
    async with opened(spare=80, host=15, max_history=1000, device=quick()) as bench:
        learn(bench, (2.0, 10.0))
        await fill_host(bench, 5)
        await asyncio.sleep(4.0)
        loop_of(bench).cost.steps.coefficients = (1e-4, 1e-5 if dear else 4e-6, 0.0, 0.0, 0.0)
        await bench.rank("new", numbered(300, salt=9))
        await bench.settle()
        assert bool(pages_out(bench)) is dear


@in_virtual_time
async def test_what_both_tiers_have_goes_from_the_device_and_not_from_host_memory() -> None:
    async with opened(spare=16, host=15, device=quick()) as bench:
        learn(bench, (2.0, 10.0))
        await fill_host(bench, 5)
        held = set(loop_of(bench).host._prefixes)
        await asyncio.sleep(4.0)
        for number in range(9):
            await bench.rank(f"new {number}", numbered(300, salt=20 + number))
        await bench.settle()
        assert set(loop_of(bench).host._prefixes) == held
        gone = [user for user in sorted(held) if loop_of(bench).tier.find(user) is None]
        assert len(gone) >= 4
        for user in gone:
            assert (await bench.rank(user, numbered(300, salt=int(user[1:])))).path is Path.RELOADED
            await bench.settle()
