"""Writes that wait for the store keep nothing else waiting, are bounded, and outlive their callers."""

import asyncio
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from relaygr import History
from relaygr.errors import DeadlineExceeded, Overloaded
from relaygr.serving.gateway import MAX_WRITES, GatewayApp
from relaygr.serving.http import Request
from relaygr.serving.wire import Encoding

NEW = History(np.array([3]), np.array([1]), np.array([1_700_000_000]))


class Held:
    """A store whose appends wait until they are let go; beside it, a pipeline that notes what it is told."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.known: list[int] = []

    def append(self, user: str, items: Any, actions: Any, timestamps: Any) -> int:
        self.free.wait()
        if user == "refused":
            raise OSError("the disk is full")
        return 7

    def appended(self, user: str, new: History, length: int) -> None:
        self.known.append(length)

    def check_actions(self, actions: Any) -> None:
        """All are known."""


def app_over(held: Held) -> GatewayApp:
    return GatewayApp(held, held, held)  # type: ignore[arg-type]


def test_writes_that_wait_leave_the_threads_of_reads_alone_and_are_refused_past_a_bound() -> None:
    async def main() -> None:
        held = Held()
        app = app_over(held)
        try:
            waiting = [app._write("user-1", NEW) for _ in range(MAX_WRITES)]
            with pytest.raises(Overloaded, match="appends wait"):
                app._write("user-1", NEW)
            reads = [asyncio.to_thread(lambda: "read") for _ in range(50)]
            assert set(await asyncio.gather(*reads)) == {"read"}
        finally:
            held.free.set()
        assert await asyncio.gather(*waiting) == [7] * MAX_WRITES
        assert await app._write("user-1", NEW) == 7

    asyncio.run(main())


def asked(user: str, deadline_ms: str) -> Request:
    did = {"item": 3, "action": 1, "timestamp": 1_700_000_000}
    body = msgspec.json.encode({"user": user, "behaviours": [did]})
    return Request("POST", "/v1/behaviours", {b"x-relaygr-deadline-ms": deadline_ms.encode()}, body)


@pytest.mark.parametrize(("user", "known"), [("user-1", [7]), ("refused", [])])
def test_an_append_past_its_deadline_is_answered_and_what_it_stored_is_known(user: str, known: list[int]) -> None:
    async def main() -> None:
        held = Held()
        app = app_over(held)
        try:
            with pytest.raises(DeadlineExceeded, match="20 ms have passed"):
                await app._append(asked(user, "20"), Encoding.JSON)
            assert app._writing == 1
        finally:
            held.free.set()
        while app._writing:  # noqa: ASYNC110  (it tells nobody)
            await asyncio.sleep(0.001)
        assert held.known == known

    asyncio.run(main())


def test_an_append_whose_caller_has_no_time_left_is_not_begun() -> None:
    async def main() -> None:
        app = app_over(Held())
        with pytest.raises(DeadlineExceeded):
            await app._append(asked("user-1", "0"), Encoding.JSON)
        assert app._writing == 0

    asyncio.run(main())
