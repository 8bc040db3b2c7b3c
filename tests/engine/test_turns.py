"""Turns are taken once, however often they are asked for, and no later than was asked."""

import asyncio

import pytest

from engines import in_virtual_time
from relaygr.clock import VirtualClock, VirtualTimeLoop
from relaygr.engine.turns import Turns


class Taken(Turns):
    """Notes when turns were taken."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        clock = VirtualClock(loop)
        self.at: list[float] = []
        super().__init__(lambda: self.at.append(clock.now()), clock)


@in_virtual_time
async def test_asked_for_many_times_it_is_taken_once_behind_what_runs() -> None:
    turns = Taken()
    for _ in range(3):
        turns.soon()
    assert turns.at == []
    await asyncio.sleep(1.0)
    assert turns.at == [0.0]
    turns.soon()
    await asyncio.sleep(1.0)
    assert turns.at == [0.0, 1.0]


@pytest.mark.parametrize(("asked", "taken"), [((0.2, 0.5), 0.2), ((0.5, 0.2), 0.2), ((0.3, 0.3), 0.3)])
@in_virtual_time
async def test_of_two_times_it_is_taken_at_the_sooner(asked: tuple[float, float], taken: float) -> None:
    turns = Taken()
    for seconds in asked:
        turns.within(seconds)
    await asyncio.sleep(1.0)
    assert turns.at == pytest.approx([taken])
    turns.within(0.5)
    await asyncio.sleep(1.0)
    assert turns.at == pytest.approx([taken, 1.5])


@in_virtual_time
async def test_closed_it_is_taken_at_no_time_any_more() -> None:
    turns = Taken()
    turns.within(0.5)
    turns.close()
    await asyncio.sleep(1.0)
    assert turns.at == []
