"""A gateway as a replica of Ray Serve: the cascade behind Serve's proxy, over instances that the directory tells."""

import asyncio
import contextlib
from typing import Any, Final

from ray import serve

from relaygr.cluster.ray import asgi
from relaygr.cluster.ray.directory import ANNOUNCE_S, Directory, directory, follow
from relaygr.cluster.ray.handle_client import HandleClient
from relaygr.cluster.ray.slots import Held
from relaygr.relay import Membership
from relaygr.serving.client import Client, HttpClient
from relaygr.serving.garbage import settle
from relaygr.serving.ray_settings import DataPath
from relaygr.serving.run import gateway_app
from relaygr.serving.settings import Settings

__all__ = ["Gateway", "address_of", "connector"]

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


class Gateway:
    """What Serve starts and stops. Serve's proxy waits for its answers, and so drains it."""

    async def __init__(self, settings: Settings, instances: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        self._stack = contextlib.AsyncExitStack()
        self._path = settings.ray.data_path
        self._membership = Membership(settings.membership)
        self._directory: Directory = directory(serve.get_replica_context().app_name)
        await self._follow()
        _, self._whole = await self._stack.enter_async_context(
            gateway_app(settings, self._membership, connector(instances))
        )
        self._following = asyncio.create_task(self._follow_on())
        settle()

    async def _follow_on(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            await self._follow()

    async def _follow(self) -> None:
        await follow(self._directory, self._membership, lambda held: address_of(self._path, held))

    def __serve_build_asgi_app__(self) -> Any:
        return asgi.Mounted(self._whole)

    async def __del__(self) -> None:
        if hasattr(self, "_following"):
            self._following.cancel()
        await self._stack.aclose()
