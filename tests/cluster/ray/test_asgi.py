"""An app of ours called without a socket, and below a prefix as Serve calls it."""

import asyncio
from typing import Any

import msgspec

from relaygr.cluster.ray.asgi import Mounted, call


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = (await receive())["body"]
    told = {"method": scope["method"], "path": scope["path"], "body": body.decode(), "headers": len(scope["headers"])}
    await send({"type": "http.response.start", "status": 207, "headers": [(b"X-Relaygr-Slot", b"slot-1")]})
    await send({"type": "http.response.body", "body": msgspec.json.encode(told)})


def test_an_exchange_is_what_it_is_over_http() -> None:
    reply = asyncio.run(call(echo, "POST", "/v1/rank", {"X-RelayGR-Key": "user-7"}, b"candidates"))
    assert (reply.status, reply.headers) == (207, {"x-relaygr-slot": "slot-1"})
    told = {"method": "POST", "path": "/v1/rank", "body": "candidates", "headers": 1}
    assert msgspec.json.decode(reply.body) == told


def test_a_prefix_that_serve_routes_by_is_no_part_of_the_path() -> None:
    paths = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])

    async def main() -> None:
        for root, path in (("", "/v1/rank"), ("/relay", "/relay/v1/rank"), ("/relay", "/relay")):
            await Mounted(app)({"type": "http", "root_path": root, "path": path}, None, None)  # type: ignore[arg-type]

    asyncio.run(main())
    assert paths == ["/v1/rank", "/v1/rank", "/"]


def test_a_server_that_starts_and_stops_is_answered() -> None:
    async def main() -> list[str]:
        asked, answered = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}], []

        async def receive() -> Any:
            return asked.pop(0)

        async def send(message: Any) -> None:
            answered.append(message["type"])

        await Mounted(echo)({"type": "lifespan"}, receive, send)
        return answered

    assert asyncio.run(main()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
