"""A caller's deadline is fixed when its request is here."""

import asyncio

import pytest

from engines import in_virtual_time
from relaygr.errors import DeadlineExceeded
from relaygr.serving.instance import LATEST_S, _Until


@in_virtual_time
async def test_what_is_left_shrinks_as_time_passes() -> None:
    until = _Until(100.0)
    await asyncio.sleep(0.03)
    assert until.left_ms() == pytest.approx(70.0)
    await asyncio.sleep(0.2)
    assert until.left_ms() == 0.0


@in_virtual_time
async def test_an_engine_that_says_nothing_is_given_up_soon_after_the_deadline() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(DeadlineExceeded):
        async with _Until(100.0):
            await asyncio.sleep(60)
    assert loop.time() - began == pytest.approx(0.1 + LATEST_S)


@in_virtual_time
async def test_without_a_deadline_nothing_is_given_up() -> None:
    until = _Until(None)
    async with until:
        await asyncio.sleep(3600)
    assert until.left_ms() is None


@in_virtual_time
async def test_other_errors_pass() -> None:
    with pytest.raises(KeyError):
        async with _Until(100.0):
            raise KeyError("mine")
