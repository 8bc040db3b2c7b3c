"""An instance as a replica of Ray Serve: an engine process, its frontend, and a slot of its own."""

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec
import ray
from ray import serve

from relaygr.cluster.ray import asgi
from relaygr.cluster.ray.autoscaling import BUSY, LEASED
from relaygr.cluster.ray.directory import ANNOUNCE_S, Directory, directory
from relaygr.cluster.ray.slot_router import SLOT
from relaygr.cluster.ray.slots import Held
from relaygr.errors import RelayError, Unavailable
from relaygr.serving import link
from relaygr.serving.admin import Beside
from relaygr.serving.garbage import settle
from relaygr.serving.instance import InstanceApp
from relaygr.serving.instance_metrics import EngineTold
from relaygr.serving.run import RunningEngine, bind, drain, instance_app, listening, running_engine, url
from relaygr.serving.settings import Settings

__all__ = ["Instance"]

WILDCARDS: Final = ("0.0.0.0", "::")
LINGER_S: Final = 8 * ANNOUNCE_S
"""How long an instance that is to go takes new work: until gateways know who came before it went."""


class Instance:
    """What Serve starts, asks for its health, and stops.

    It takes the same calls three ways: over HTTP at an address of its own, which the directory tells; by handle
    (`call`); and behind Serve's proxy, where there is no gateway.

    Its life: the engine is started, a slot is claimed, requests are taken. Told to stop, it gives its slot away first,
    goes on for a little while, then refuses new work, and finishes what it has.
    """

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        self._settings = settings
        self._stack = contextlib.AsyncExitStack()
        self._begun = self._stopping = False
        self._model = settings.data.model
        context = serve.get_replica_context()
        self._directory: Directory = directory(context.app_name)
        self._holder = context.replica_id.to_full_id_str()
        own = settings.instance
        try:
            bound = self._stack.enter_context(bind(own.host, 0))
            host = ray.util.get_node_ip_address() if own.host in WILDCARDS else own.host
            address = url(host, bound.getsockname()[1])
            self._engine: RunningEngine = await self._stack.enter_async_context(running_engine(settings))
            self._lost = asyncio.create_task(self._engine.process.ended())
            self._held: Held = await self._directory.claim(self._holder, address, os.getpid())
            named = replace(settings, instance=replace(own, slot=self._held.slot))
            self._app: InstanceApp
            self._whole: Beside
            self._app, self._whole = instance_app(named, self._engine)
            self._app.draining = True  # until Serve has told the model, and asks for its health
            await self._stack.enter_async_context(listening(self._whole, bound))
        except BaseException:
            await self._stack.aclose()
            raise
        self._mine = True
        self._announcing = asyncio.create_task(self._announce_on())
        self._seen = (time.monotonic(), 0.0)
        settle()

    async def _announce_on(self) -> None:
        """A directory that was lost and started anew learns by this who there is."""
        while not self._stopping:
            with contextlib.suppress(Unavailable):
                self._mine = await self._directory.announce(self._held)
            await asyncio.sleep(ANNOUNCE_S)

    # ---- calls

    async def call(self, method: str, path: str, *, headers: Mapping[str, str], body: bytes) -> tuple[Any, ...]:
        """One exchange with the app, as over HTTP: status, headers with lower-case names, body."""
        reply = await asgi.call(self._whole, method, path, headers, body)
        reply.headers.setdefault(SLOT, self._held.slot)
        return tuple(reply)

    def __serve_build_asgi_app__(self) -> Any:
        return asgi.Mounted(self._whole)

    # ---- what Serve asks

    def check_health(self) -> None:
        """Raises where Serve should start another in its place. The first time it begins to take work."""
        if self._lost.done():
            raise Unavailable(f"the engine process ended with status {self._lost.result()}")
        if not self._mine:
            raise Unavailable(f"another instance holds {self._held.slot}")
        if not self._begun:
            self._begun, self._app.draining = True, False

    def record_replica_metadata(self) -> dict[str, Any]:
        return {"slot": self._held.slot, "address": self._held.address}

    def record_routing_stats(self) -> dict[str, Any]:
        return {"draining": self._app.draining}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The shares of device time and of device memory that are in use, since the last time it was asked."""
        try:
            told = msgspec.convert(await self._engine.link.call(link.Status()), EngineTold)
        except RelayError:
            return {}
        status, now = told.status, time.monotonic()
        began, busy = self._seen
        self._seen = now, status.device_busy_s
        share = (status.device_busy_s - busy) / max(now - began, 1e-3)
        return {BUSY: min(max(share, 0.0), 1.0), LEASED: status.device_pages_pinned / max(status.device_pages, 1)}

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Another model, with the same engine and its memory: `user_config: {model: path}` of a Serve configuration."""
        model = user_config.get("model")
        if model is not None and model != self._model:
            await self._engine.link.call(link.Swap(model))
            self._model = model

    async def __del__(self) -> None:
        """Serve calls it once it sends nothing more; what comes over HTTP is drained here.

        In an upgrade the next one is told to go as soon as this one's successor runs. It goes on for a while, so that
        gateways have found the successor before they lose this one.
        """
        if not hasattr(self, "_mine") or self._stopping:
            return
        self._stopping = True
        self._announcing.cancel()
        with contextlib.suppress(Unavailable):
            await self._directory.leave(self._holder)
        await asyncio.sleep(LINGER_S)
        with contextlib.suppress(Unavailable):
            await self._directory.release(self._holder)
        await drain(self._app, self._settings.instance.drain_s)
        await self._stack.aclose()
        self._lost.cancel()
