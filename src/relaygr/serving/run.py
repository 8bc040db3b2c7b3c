"""Servers as processes: ready, drained on SIGTERM, ended within a bound."""

import asyncio
import contextlib
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import uvicorn
import uvloop

from relaygr.cascade.catalogue import Catalogue
from relaygr.cascade.pipeline import Pipeline
from relaygr.cascade.pre_processing import FeaturePreProcessing
from relaygr.cascade.retrieval import DelayedRetrieval, FaissRetrieval, HttpRetrieval
from relaygr.cascade.stage import Retrieval
from relaygr.clock import RealClock
from relaygr.errors import InvalidInput, Unavailable
from relaygr.history import HistoryStore, LmdbStore, open_store
from relaygr.relay import Membership, Router, Trigger
from relaygr.serving.admin import AdminApp, Beside, evict_at_instance, evict_everywhere, swap_at_instance
from relaygr.serving.client import Client, HttpClient
from relaygr.serving.connection import Connection
from relaygr.serving.engine_process import SIMULATED, EngineProcess, EngineSettings
from relaygr.serving.garbage import settle
from relaygr.serving.gateway import GatewayApp
from relaygr.serving.instance import InstanceApp
from relaygr.serving.link import EngineLink
from relaygr.serving.ranking import PROBE_S, RelayRanking
from relaygr.serving.settings import Settings

__all__ = [
    "RunningEngine",
    "bind",
    "drain",
    "gateway_app",
    "instance_app",
    "listening",
    "run",
    "run_gateway",
    "run_instance",
    "running_engine",
    "running_gateway",
    "stopping",
    "unless",
    "url",
]

T = TypeVar("T")

DRAIN_POLL_S: Final = 0.02
ANSWER_S: Final = 1.0
"""How long what is given up at the end may take to be answered."""


class Draining(Protocol):
    """An app that can be told to refuse new work."""

    draining: bool
    busy: int


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a server to its end, on the event loop that servers run on."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def run_instance(settings: Settings, ready: Callable[[str], None] = lambda address: None) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `ready` is called with the address once requests are taken.

    Raises InvalidInput when no model is named, Unavailable when the engine process ends by itself: an instance without
    its engine is no instance.
    """
    own = settings.instance
    settings.admin.token()  # one that cannot be had is told before anything slow begins
    async with contextlib.AsyncExitStack() as stack:
        stop = stack.enter_context(stopping())
        bound = stack.enter_context(bind(own.host, own.port))
        begun = running_engine(settings)
        engine = await unless(stop, begun.__aenter__())
        if engine is None:
            return
        stack.push_async_exit(begun)
        app, whole = instance_app(settings, engine)
        lost = asyncio.create_task(engine.process.ended())
        async with listening(whole, bound) as port:
            settle()
            ready(url(own.host, port))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait((lost, stopped), return_when=asyncio.FIRST_COMPLETED)
            await drain(app, own.drain_s if stop.is_set() else 0.0)
            stopped.cancel()
        if lost.done():
            raise Unavailable(f"the engine process ended with status {lost.result()}")
        lost.cancel()


@dataclass(frozen=True)
class RunningEngine:
    """An engine process, the link to it, and the store that its instance reads."""

    process: EngineProcess
    link: EngineLink
    store: HistoryStore | None


@contextlib.asynccontextmanager
async def running_engine(settings: Settings) -> AsyncIterator[RunningEngine]:
    """The engine process that the settings call for, once it takes calls; stopped at the end.

    Raises InvalidInput when no model is named, Unavailable when it ends instead; it has said why.
    """
    settings = settings.in_mode
    store_path, own = settings.data.store, settings.instance
    model = None if settings.engine.device == SIMULATED else settings.data.need("model")
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relaygr-")))
        store = stack.enter_context(open_store(store_path, readonly=True)) if store_path else None
        engine_settings = EngineSettings(
            socket=str(folder / "engine"), model=model, config=asdict(settings.engine), threads=own.threads
        )
        process = await EngineProcess.start(engine_settings)
        stack.push_async_callback(process.stop, own.drain_s)
        link = await EngineLink.connect(str(folder / "engine"))
        stack.push_async_callback(link.close)
        yield RunningEngine(process, link, store)


def instance_app(settings: Settings, engine: RunningEngine) -> tuple[InstanceApp, Beside]:
    """The app of an instance in front of its engine; alone, and with the operator's calls beside it."""
    slot, token = settings.instance.slot, settings.admin.token()
    app = InstanceApp(engine.link, engine.store, slot)
    admin = AdminApp(app, token, evict_at_instance(engine.link, slot), swap_at_instance(engine.link))
    return app, Beside(app, admin)


@contextlib.contextmanager
def stopping() -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set, from here on and until the end."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work gives, or None where `stop` is set before: the work is cancelled then."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for one in (task, stopped):
            one.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, before anything slow is begun. Unavailable where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named TCP, its connections get TCP_NODELAY: without, a reply of two writes waits 40 ms for the client's ACK.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(2048)
        return bound
    except OSError as error:
        bound.close()
        raise Unavailable(f"cannot listen on {url(host, port)}: {error.strerror}; choose another --port") from error


@contextlib.asynccontextmanager
async def listening(app: Any, bound: socket.socket) -> AsyncIterator[int]:
    """uvicorn around the app on this socket; gives the port."""
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http=Connection,
        lifespan="off",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,  # drained already: what is left is clients that never finish their request
        proxy_headers=False,
        server_header=False,
        date_header=False,
        ws="none",
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([bound]))
    started = asyncio.create_task(server.listening.wait())
    await asyncio.wait((serving, started), return_when=asyncio.FIRST_COMPLETED)
    try:
        yield bound.getsockname()[1]
    finally:
        started.cancel()
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


@contextlib.asynccontextmanager
async def running_gateway(settings: Settings, membership: Membership, bound: socket.socket) -> AsyncIterator[str]:
    """Serve the cascade over the slots of `membership`, which may change meanwhile; drained at the end.

    Gives the address once requests are taken.

    Raises InvalidInput when no store or no catalogue is named.
    """
    own = settings.gateway
    async with gateway_app(settings, membership) as (app, whole), listening(whole, bound) as port:
        yield url(own.host, port)
        await drain(app, own.drain_s)
        if app.busy:
            await app.give_up()
            await drain(app, ANSWER_S)


@contextlib.asynccontextmanager
async def gateway_app(
    settings: Settings,
    membership: Membership,
    connect: Callable[[str], Client] = HttpClient.to,
    probe_s: float = PROBE_S,
) -> AsyncIterator[tuple[GatewayApp, Beside]]:
    """The app of a gateway over the slots of `membership`; alone, and with the operator's calls beside it.

    `connect` makes what carries messages to an address, and `probe_s` is how often slots are asked how they are. Raises
    InvalidInput when no store or no catalogue is named.
    """
    settings = settings.in_mode
    own, store_path, token = settings.gateway, settings.data.need("store"), settings.admin.token()
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(open_store(store_path))
        clock = RealClock()
        router = Router(membership, settings.router)
        ranking = await stack.enter_async_context(
            RelayRanking(membership, router, Trigger(settings.trigger), clock, connect=connect, probe_s=probe_s)
        )
        catalogue = None if own.retrieval_url else Catalogue.load(settings.data.need("catalogue"))
        retrieval = await _retrieval(settings, catalogue, stack)
        features = FeaturePreProcessing(
            request_features=own.request_features, candidate_features=own.candidate_features
        )
        pipeline = await stack.enter_async_context(
            Pipeline(
                store,
                retrieval,
                features,
                ranking,
                ranking,
                settings.cascade,
                clock=clock,
                read_here=isinstance(store, LmdbStore),
            )
        )
        titles = None
        if catalogue is not None and catalogue.titles is not None:
            titles = dict(zip(catalogue.ids.tolist(), catalogue.titles, strict=True))
        app = GatewayApp(pipeline, store, ranking, titles)
        evict = evict_everywhere(store, pipeline.forget, membership, token, connect)
        yield app, Beside(app, AdminApp(app, token, evict))


async def _retrieval(settings: Settings, catalogue: Catalogue | None, stack: contextlib.AsyncExitStack) -> Retrieval:
    """From the catalogue, or by the service that the settings name; closed with the stack."""
    own = settings.gateway
    retrieval: Retrieval
    if catalogue is None:
        assert own.retrieval_url is not None
        retrieval = await stack.enter_async_context(
            HttpRetrieval(own.retrieval_url, settings.cascade.pipeline_ms / 1e3)
        )
    else:
        retrieval = FaissRetrieval(catalogue)
    if own.retrieval_at_least_ms:
        retrieval = DelayedRetrieval(retrieval, own.retrieval_at_least_ms / 1e3)
    return retrieval


async def run_gateway(settings: Settings, ready: Callable[[str], None] = lambda address: None) -> None:
    """Serve the cascade over the instances that the settings name, until SIGTERM or SIGINT, then drain.

    `ready` is called with the address once requests are taken. Instances may come up later, and are waited for by
    `/readyz`. Raises InvalidInput when none is named.
    """
    if not settings.gateway.instances:
        raise InvalidInput("gateway.instances", 'names none; write each as slot-0 = "http://127.0.0.1:8100"')
    membership = Membership(settings.membership)
    for slot, address in settings.gateway.instances.items():
        membership.add(slot, address)
    with stopping() as stop, bind(settings.gateway.host, settings.gateway.port) as bound:
        async with running_gateway(settings, membership, bound) as address:
            settle()
            ready(address)
            await stop.wait()


def url(host: str, port: int) -> str:
    """The address of a server, as clients write it."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def drain(app: Draining, within_s: float) -> None:
    """Refuse new work and wait until what was taken is answered, `within_s` at most."""
    app.draining = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while app.busy:  # noqa: ASYNC110  (counted by the hot path, which sets no events)
                await asyncio.sleep(DRAIN_POLL_S)
