"""A caller's deadline is fixed when its request is here."""

import asyncio

import pytest

from engines import in_virtual_time
from relaygr.errors import DeadlineExceeded
from relaygr.serving.until import LATEST_S, Until


@in_virtual_time
async def test_what_is_left_shrinks_as_time_passes() -> None:
    until = Until(100.0)
    await asyncio.sleep(0.03)
    assert until.left_ms() == pytest.approx(70.0)
    await asyncio.sleep(0.2)
    assert until.left_ms() == 0.0


@in_virtual_time
async def test_work_that_does_not_end_is_given_up_soon_after_the_deadline() -> None:
    loop = asyncio.get_running_loop()
    began, until = loop.time(), Until(100.0)
    assert until.late_at == pytest.approx(began + 0.1 + LATEST_S)
    with pytest.raises(DeadlineExceeded):
        await until.bound(asyncio.sleep(60))
    assert loop.time() == pytest.approx(until.late_at)


@in_virtual_time
async def test_without_a_deadline_nothing_is_given_up() -> None:
    until = Until(None)
    assert await until.bound(asyncio.sleep(3600, "done")) == "done"
    assert until.left_ms() is None
    assert until.late_at is None


@in_virtual_time
async def test_other_errors_pass() -> None:
    async def fail() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        await Until(100.0).bound(fail())
