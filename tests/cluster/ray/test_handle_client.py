"""Messages by handle: sent again elsewhere where a replica died or drains, and each a call of its own."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from optional import require

require("ray", "make test installs it where it can be had")

from ray.exceptions import ActorDiedError, RayTaskError  # noqa: E402
from ray.serve.exceptions import BackPressureError  # noqa: E402

from relaygr.cluster.ray.handle_client import TRIES, HandleClient  # noqa: E402
from relaygr.cluster.ray.slot_router import AVOID, SLOT  # noqa: E402
from relaygr.errors import Unavailable  # noqa: E402

PARENT: contextvars.ContextVar[str] = contextvars.ContextVar("PARENT", default="none")


class Handle:
    """A handle whose calls go to a function, and what was asked of it."""

    def __init__(self, answer: Callable[[int, dict[str, str]], Awaitable[Any]]) -> None:
        self._answer = answer
        self.asked: list[dict[str, str]] = []
        self.parents: list[str] = []

    @property
    def call(self) -> "Handle":
        return self

    async def remote(self, method: str, path: str, *, headers: dict[str, str], body: bytes) -> Any:
        self.asked.append(dict(headers))
        self.parents.append(PARENT.get())
        return await self._answer(len(self.asked), headers)


def test_a_replica_that_died_costs_another_try_that_names_no_slot() -> None:
    async def answer(number: int, headers: dict[str, str]) -> Any:
        if number < 3:
            raise ActorDiedError
        return 200, {SLOT: "slot-2"}, b"well"

    handle = Handle(answer)
    reply = asyncio.run(HandleClient(handle).request("POST", "/v1/rank", b"", {SLOT: "slot-1"}))
    assert (reply.status, reply.body) == (200, b"well")
    assert [SLOT in headers for headers in handle.asked] == [True, False, False]


def test_one_that_drains_is_told_to_the_router_and_avoided() -> None:
    async def answer(number: int, headers: dict[str, str]) -> Any:
        return (503, {SLOT: f"slot-{number}"}, b"") if number < 3 else (202, {SLOT: "slot-9"}, b"")

    handle = Handle(answer)
    assert asyncio.run(HandleClient(handle).request("POST", "/v1/pre-infer")).headers[SLOT] == "slot-9"
    assert [headers.get(AVOID) for headers in handle.asked] == [None, "slot-1", "slot-1,slot-2"]


def test_after_enough_tries_it_says_so() -> None:
    async def dies(number: int, headers: dict[str, str]) -> Any:
        raise ActorDiedError

    async def drains(number: int, headers: dict[str, str]) -> Any:
        return 503, {SLOT: "slot-0"}, b"draining"

    handle = Handle(dies)
    with pytest.raises(Unavailable):
        asyncio.run(HandleClient(handle).request("POST", "/v1/rank"))
    assert len(handle.asked) == TRIES
    assert asyncio.run(HandleClient(Handle(drains)).request("POST", "/v1/rank")).status == 503


def test_for_one_slot_a_refusal_is_the_answer_for_the_gateway_s_router_chooses() -> None:
    async def drains(number: int, headers: dict[str, str]) -> Any:
        return 503, {SLOT: "slot-4"}, b"draining"

    handle = Handle(drains)
    assert asyncio.run(HandleClient(handle, "slot-4").request("POST", "/v1/rank")).status == 503
    assert handle.asked == [{SLOT: "slot-4"}]


@pytest.mark.parametrize(
    "error",
    [BackPressureError(num_queued_requests=1, max_queued_requests=1), RayTaskError("call", "trace", ValueError())],
)
def test_what_serve_refuses_or_fails_at_is_unavailable(error: Exception) -> None:
    async def fails(number: int, headers: dict[str, str]) -> Any:
        raise error

    with pytest.raises(Unavailable):
        asyncio.run(HandleClient(Handle(fails)).request("POST", "/v1/rank"))


def test_calls_from_inside_one_request_are_calls_of_their_own() -> None:
    async def answer(number: int, headers: dict[str, str]) -> Any:
        return 200, {}, b""

    handle = Handle(answer)

    async def inside() -> None:
        PARENT.set("a request of Serve")
        client = HandleClient(handle)
        await asyncio.gather(client.request("POST", "/v1/pre-infer"), client.request("POST", "/v1/rank"))

    asyncio.run(inside())
    assert handle.parents == ["none", "none"]


def test_a_caller_that_gives_up_takes_its_call_along() -> None:
    ended: list[str] = []

    async def forever(number: int, headers: dict[str, str]) -> Any:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def main() -> None:
        asked = asyncio.create_task(HandleClient(Handle(forever)).request("POST", "/v1/rank"))
        for _ in range(3):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert ended == ["cancelled"]
