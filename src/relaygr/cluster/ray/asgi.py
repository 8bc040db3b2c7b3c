"""An ASGI app called without a socket, and one that Serve can call: below a prefix, with a lifespan."""

import asyncio
from collections.abc import Mapping
from typing import Any

from relaygr.serving.client import Response
from relaygr.serving.http import Receive, Scope, Send

__all__ = ["Mounted", "call"]


async def call(app: Any, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
    """One exchange with an app in this process. The app's work is cancelled with the caller."""
    started: dict[str, Any] = {}
    parts: list[bytes] = []
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return incoming.pop() if incoming else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
        else:
            parts.append(message.get("body", b""))

    named = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await app({"type": "http", "method": method, "path": path, "headers": named}, receive, send)
    told = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in started["headers"]}
    return Response(started["status"], told, b"".join(parts))


class Mounted:
    """The app below a prefix of paths. Servers that tell when they start and stop are answered: it needs neither."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            await self._app({**scope, "path": path or "/"}, receive, send)
            return
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
