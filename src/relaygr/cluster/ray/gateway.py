"""A gateway as a replica of Ray Serve: the cascade behind Serve's proxy, over instances that the directory tells."""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from ray import serve

from relaygr.cluster.ray import asgi
from relaygr.cluster.ray.directory import ANNOUNCE_S, Directory, directory, follow
from relaygr.cluster.ray.handle_client import HandleClient
from relaygr.cluster.ray.slots import Held
from relaygr.relay import Membership
from relaygr.serving.client import Client, HttpClient
from relaygr.serving.garbage import settle
from relaygr.serving.http import Receive, Reply, Scope, Send, send_reply
from relaygr.serving.ray_settings import DataPath
from relaygr.serving.run import gateway_app
from relaygr.serving.settings import Settings

__all__ = ["TARGETS", "Gateway", "address_of", "connector", "targets"]

TARGETS: Final = "/v1/targets"
"""Asked by Prometheus: instances choose their ports themselves."""
READY_S: Final = 60.0
"""How long a gateway waits for the first instance before it begins without."""
PROBE_S: Final = {DataPath.DIRECT: 0.5, DataPath.HANDLE: 1.0}
"""How often a slot is asked how it is. By handle that takes longer, and Serve's router looks after replicas itself."""
_BY_HANDLE: Final = "serve://"


def address_of(path: DataPath, held: Held) -> str:
    """Where messages to the holder of a slot go. By handle too, a new holder is another address."""
    return held.address if path is DataPath.DIRECT else f"{_BY_HANDLE}{held.slot}/{held.holder}"


def connector(handle: Any) -> Any:
    """What makes a client for an address of either kind."""

    def connect(address: str) -> Client:
        if address.startswith(_BY_HANDLE):
            return HandleClient(handle, address.removeprefix(_BY_HANDLE).partition("/")[0])
        return HttpClient.to(address)

    return connect


def targets(table: Iterable[Held]) -> bytes:
    """Where instances tell their metrics, as Prometheus has it told over HTTP."""
    found = [{"targets": [urlsplit(held.address).netloc], "labels": {"slot": held.slot}} for held in table]
    return msgspec.json.encode(found)


class Gateway:
    """What Serve starts and stops. Serve's proxy waits for its answers, and so drains it."""

    async def __init__(self, settings: Settings, instances: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        self._stack = contextlib.AsyncExitStack()
        self._path = settings.ray.data_path
        self._membership = Membership(settings.membership)
        self._directory: Directory = directory(serve.get_replica_context().app_name)
        self._table: tuple[Held, ...] = ()
        await self._follow()
        _, self._whole = await self._stack.enter_async_context(
            gateway_app(settings, self._membership, connector(instances), PROBE_S[self._path])
        )
        self._following = asyncio.create_task(self._follow_on())
        await self._some_slot()
        settle()

    async def _some_slot(self) -> None:
        """Wait until there is one that is up, for a while: Serve sends requests as soon as this gateway has begun."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                while not self._membership.placeable:  # noqa: ASYNC110  (a membership tells nobody)
                    await asyncio.sleep(0.05)

    async def _follow_on(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            await self._follow()

    async def _follow(self) -> None:
        table = await follow(self._directory, self._membership, lambda held: address_of(self._path, held))
        if table is not None:
            self._table = table

    def __serve_build_asgi_app__(self) -> Any:
        return asgi.Mounted(self._answer)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["method"], scope["path"]) == ("GET", TARGETS):
            await send_reply(send, Reply(200, targets(self._table)))
        else:
            await self._whole(scope, receive, send)

    async def __del__(self) -> None:
        if hasattr(self, "_following"):
            self._following.cancel()
        await self._stack.aclose()
