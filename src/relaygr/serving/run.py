"""Servers as processes: ready, drained on SIGTERM, ended within a bound."""

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import uvicorn

from relaygr.cascade.catalogue import Catalogue
from relaygr.cascade.pipeline import Pipeline, PipelineConfig
from relaygr.cascade.pre_processing import FeaturePreProcessing
from relaygr.cascade.retrieval import FaissRetrieval
from relaygr.clock import RealClock
from relaygr.config import EngineConfig
from relaygr.errors import InvalidInput, Unavailable
from relaygr.history import LmdbStore
from relaygr.relay import Membership, Router, RouterConfig, Trigger, TriggerConfig
from relaygr.serving.engine_process import EngineProcess, EngineSettings
from relaygr.serving.gateway import GatewayApp
from relaygr.serving.instance import InstanceApp
from relaygr.serving.link import EngineLink
from relaygr.serving.ranking import RelayRanking

__all__ = ["GatewaySettings", "InstanceSettings", "Listening", "listening", "run_instance", "running_gateway"]

DRAIN_POLL_S: Final = 0.02


@dataclass(frozen=True)
class InstanceSettings:
    """One instance: an engine process and its frontend."""

    model: str
    """The checkpoint to serve."""
    slot: str = "slot-0"
    """Its stable name in the ring: the same after a restart."""
    host: str = "127.0.0.1"
    """The address to listen on; loopback unless told otherwise."""
    port: int = 8100
    store: str | None = None
    """The folder of the history store; without one, callers send whole histories."""
    drain_s: float = 10.0
    """How long it finishes what it has taken when it is told to stop."""
    threads: int | None = None
    """Threads for the model on a CPU; None: as many as there are cores."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if not self.slot:
            raise InvalidInput("slot", "must not be empty")
        if not 0 <= self.port <= 65535:
            raise InvalidInput("port", f"is {self.port}")
        if not self.drain_s > 0:
            raise InvalidInput("drain_s", "must be positive")


class Listening(NamedTuple):
    """A server that takes requests."""

    port: int
    stop: asyncio.Event
    """Set by SIGTERM and SIGINT."""


class Draining(Protocol):
    """An app that can be told to refuse new work."""

    draining: bool
    busy: int


async def run_instance(settings: InstanceSettings, ready: Callable[[int], None] = lambda port: None) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `ready` is called with the port once requests are taken.

    Raises Unavailable when the engine process ends by itself: an instance without its engine is no instance.
    """
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relaygr-")))
        store = stack.enter_context(LmdbStore(settings.store)) if settings.store else None
        engine = await EngineProcess.start(
            EngineSettings(
                socket=str(folder / "engine"),
                model=settings.model,
                config=asdict(settings.engine),
                threads=settings.threads,
            )
        )
        stack.push_async_callback(engine.stop, settings.drain_s)
        link = await EngineLink.connect(str(folder / "engine"))
        stack.push_async_callback(link.close)
        app = InstanceApp(link, store, settings.slot)
        lost = asyncio.create_task(engine.ended())
        async with listening(app, settings.host, settings.port) as (port, stop):
            ready(port)
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait((lost, stopped), return_when=asyncio.FIRST_COMPLETED)
            await drain(app, settings.drain_s if stop.is_set() else 0.0)
            stopped.cancel()
        if lost.done():
            raise Unavailable(f"the engine process ended with status {lost.result()}")
        lost.cancel()


@contextlib.asynccontextmanager
async def listening(app: Any, host: str, port: int) -> AsyncIterator[Listening]:
    """uvicorn around the app."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(
        app, host=host, port=port, lifespan="off", access_log=False, log_level="warning", timeout_keep_alive=75
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve())
    started = asyncio.create_task(server.listening.wait())
    await asyncio.wait((serving, started), return_when=asyncio.FIRST_COMPLETED)
    if not server.listening.is_set():
        started.cancel()
        await serving
        raise Unavailable(f"port: cannot listen on {host}:{port}")
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield Listening(server.servers[0].sockets[0].getsockname()[1], stop)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, and with an event for "listening"."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.listening.set()


@dataclass(frozen=True)
class GatewaySettings:
    """One gateway, and where its instances are."""

    store: str
    """The folder of the history store, shared with the instances."""
    catalogue: str
    """The items that can be recommended."""
    host: str = "127.0.0.1"
    """The address to listen on; loopback unless told otherwise."""
    port: int = 8000
    request_features: int = 0
    """As many as the model reads."""
    candidate_features: int = 0
    """As many as the model reads."""
    drain_s: float = 10.0
    """How long it finishes what it has taken when it is told to stop."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    trigger: TriggerConfig = field(default_factory=TriggerConfig)
    router: RouterConfig = field(default_factory=RouterConfig)


@contextlib.asynccontextmanager
async def running_gateway(settings: GatewaySettings, membership: Membership) -> AsyncIterator[Listening]:
    """Serve the cascade over the slots of `membership`, which may change meanwhile; drained at the end."""
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(LmdbStore(settings.store))
        clock = RealClock()
        router = Router(membership, settings.router)
        ranking = await stack.enter_async_context(RelayRanking(membership, router, Trigger(settings.trigger), clock))
        retrieval = FaissRetrieval(Catalogue.load(settings.catalogue))
        features = FeaturePreProcessing(
            request_features=settings.request_features, candidate_features=settings.candidate_features
        )
        pipeline = await stack.enter_async_context(
            Pipeline(store, retrieval, features, ranking, ranking, settings.pipeline, clock=clock)
        )
        app = GatewayApp(pipeline, store, ranking)
        async with listening(app, settings.host, settings.port) as server:
            yield server
            await drain(app, settings.drain_s)


async def drain(app: Draining, within_s: float) -> None:
    """Refuse new work and wait until what was taken is answered, `within_s` at most."""
    app.draining = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while app.busy:  # noqa: ASYNC110  (counted by the hot path, which sets no events)
                await asyncio.sleep(DRAIN_POLL_S)
