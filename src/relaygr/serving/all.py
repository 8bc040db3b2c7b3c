"""Everything on one machine: a gateway, its instances as processes, and what they need to begin."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from relaygr.cascade.pipeline import PipelineConfig
from relaygr.config import EngineConfig
from relaygr.errors import InvalidInput, Unavailable
from relaygr.files import alone
from relaygr.relay import Membership, RouterConfig, TriggerConfig
from relaygr.serving.garbage import settle
from relaygr.serving.provision import provision
from relaygr.serving.run import bind, running_gateway, stopping, unless
from relaygr.serving.settings import DataSettings, Settings, render

__all__ = ["DEFAULTS", "run_all", "shared"]

_log = logging.getLogger(__name__)

_RESTART_S: Final = 0.5
_SERVES: Final = re.compile(r"serves on (http://\S+)")


DEFAULTS: Final = Settings(
    cascade=PipelineConfig(pipeline_ms=1500.0, ranking_ms=1200.0, signal_grace_ms=20.0),
    trigger=TriggerConfig(target_ms=50.0),
    router=RouterConfig(quiet_tokens=16384),
    engine=EngineConfig(device_cache="256MiB", host_cache="512MiB", on_miss="truncate"),
)
"""What `serve all` starts from, for a CPU that other things run on, and little memory: the trigger aims at 50 ms, the
budget is for the worst case, and a rank that still would be late is served on the newest behaviours, and says so."""


async def run_all(
    settings: Settings,
    data: Path,
    instances: int,
    ready: Callable[[str], None],
    progress: Callable[[str], None] = lambda what: None,
) -> None:
    """Serve until SIGTERM or SIGINT. `ready` gets the gateway's address. Instances that end are started again.

    What the settings name no path for is in `data`, and made there on first use. Unavailable where another serves from
    there.
    """
    if instances < 1:
        raise InvalidInput("instances", "must be at least 1")
    if settings.gateway.instances:
        raise InvalidInput("gateway.instances", "are for `serve gateway`; `serve all` starts its own: remove them")
    async with contextlib.AsyncExitStack() as stack:
        stop = stack.enter_context(stopping())
        bound = stack.enter_context(bind(settings.gateway.host, settings.gateway.port))
        taken = f"another `relaygr serve all` serves from {data}: choose another --data-dir"
        stack.enter_context(alone(data / "serving.lock", "data-dir", taken))
        await asyncio.to_thread(provision, data, progress, named=settings.data)
        settings = shared(settings, data, instances)
        membership = Membership(settings.membership)
        running = [_Instance(f"slot-{number}", settings, data, membership) for number in range(instances)]
        for instance in running:
            stack.push_async_callback(instance.stop)
        progress(f"starting {instances} instances")
        if await unless(stop, _started(running)) is None:
            return
        async with running_gateway(settings, membership, bound) as address:
            keepers = [asyncio.create_task(instance.keep()) for instance in running]
            settle()
            ready(address)
            await stop.wait()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)


async def _started(running: "list[_Instance]") -> bool:
    await asyncio.gather(*(instance.start() for instance in running))
    return True


def shared(settings: Settings, data: Path, instances: int) -> Settings:
    """With a path for everything, the one named or the one that `provision` fills, and the cores divided: one is the
    gateway's and the loops'."""
    named, own = settings.data, settings.instance
    paths = DataSettings(
        model=named.model or str(data / "model.safetensors"),
        catalogue=named.catalogue or str(data / "items.safetensors"),
        store=named.store or str(data / "store"),
    )
    threads = own.threads or max(1, (len(os.sched_getaffinity(0)) - 1) // instances)
    return replace(settings, data=paths, instance=replace(own, threads=threads))


class _Instance:
    """One instance process, started again when it ends, under the same slot name."""

    def __init__(self, slot: str, settings: Settings, data: Path, membership: Membership) -> None:
        self._slot = slot
        self._settings = replace(settings, instance=replace(settings.instance, slot=slot, host="127.0.0.1", port=0))
        self._file = data / f"{slot}.toml"
        self._membership = membership
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it and wait until it serves. Unavailable if it ends instead; it has said why."""
        if self._process is None:
            self._file.write_text(render(self._settings), encoding="utf-8")
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "relaygr", "serve", "instance", "--slot", self._slot, "--config", str(self._file)),
            *("--parent", str(os.getpid())),
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent, which ends it in order
        )
        assert self._process.stdout is not None
        serves = _SERVES.search((await self._process.stdout.readline()).decode())
        if not serves:
            raise Unavailable(f"{self._slot} ended with status {await self._process.wait()}")
        self._membership.add(self._slot, serves[1])

    async def keep(self) -> None:
        """Start it again whenever it ends."""
        while True:
            assert self._process is not None
            _log.warning("%s %s; it is started again", self._slot, _ended(await self._process.wait()))
            await asyncio.sleep(_RESTART_S)
            try:
                await self.start()
            except (Unavailable, OSError) as error:
                _log.warning("%s could not be started: %s", self._slot, error)

    async def stop(self) -> None:
        """Let it drain, then end."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), 2 * self._settings.instance.drain_s)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def _ended(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
