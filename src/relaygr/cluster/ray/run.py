"""`serve ray`: the application on a cluster that is there, or on one that is started here and ends with it."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from relaygr.cluster.ray.application import APP, GATEWAY, INSTANCE, QUIET, absolute, application
from relaygr.cluster.ray.directory import directory
from relaygr.errors import InvalidInput, Unavailable
from relaygr.serving.all import shared
from relaygr.serving.provision import provision
from relaygr.serving.ray_settings import DataPath
from relaygr.serving.run import bind, url
from relaygr.serving.settings import Settings

__all__ = ["check_reach", "cluster", "deploy", "run_ray", "start_proxy"]

OBJECT_STORE: Final = 128 * 2**20
"""Bytes of Ray's own memory for objects, on a cluster that is started here: messages are small and not kept."""
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


def run_ray(
    settings: Settings,
    *,
    address: str | None = None,
    data: Path | None = None,
    ready: Callable[[str], None] = lambda address: None,
    progress: Callable[[str], None] = lambda what: None,
) -> None:
    """Serve with Ray. `ready` gets the address of Serve's proxy.

    Without an address Ray is started here, and everything ends at SIGTERM or SIGINT. With one the application is put on
    that cluster, or what runs there is upgraded to it, and this returns once it is healthy.

    `data`: a folder for what the settings name no path for, filled on first use.
    """
    own = settings.gateway
    if data is not None:
        provision(data, progress, named=settings.data)
        settings = shared(settings, data, settings.ray.instances)
    if settings.engine.device != "simulated":
        settings.data.need("model")
    if settings.ray.gateways:
        settings.data.need("store")
    where = url(own.host, own.port)
    if address is not None:
        progress(f"joining {address}")
        with _connected(address):
            check_reach(settings, sum(node["Alive"] for node in ray.nodes()))
            start_proxy(settings)
            deploy(settings, progress)
            ready(where)
        return
    bind(own.host, own.port).close()  # taken already? told before anything slow begins
    progress("starting Ray")
    with cluster(settings), _stopping() as stop:
        start_proxy(settings)
        deploy(settings, progress)
        ready(where)
        stop.wait()


def start_proxy(settings: Settings) -> None:
    """Serve with its proxy on every machine, at the gateway's address; where it runs already it stays as it is."""
    own = settings.gateway
    http = {"host": own.host, "port": own.port}
    serve.start(proxy_location="EveryNode", http_options=http, logging_config=QUIET)


def deploy(
    settings: Settings, progress: Callable[[str], None] = lambda what: None, name: str = APP, **options: Any
) -> None:
    """Put the application on the cluster that this process has joined and where Serve runs, or upgrade it.

    Returns once it is healthy. Instances are replaced one after the other, each under its own slot, and drained first.
    `options`: of `application`.

    Raises Unavailable, with what Serve said, where it does not become healthy.
    """
    progress(f"starting {settings.ray.instances} instances")
    try:
        serve.run(application(absolute(settings), **options), name=name, route_prefix="/")
    except (RuntimeError, RayServeException) as error:
        raise Unavailable(f"Serve could not run it: {error}; {said(name)}") from error


def said(name: str = APP) -> str:
    """What Serve tells about the application's deployments."""
    found = serve.status().applications.get(name)
    if found is None:
        return "there is no application"
    told = {part: found.deployments[part].message for part in (GATEWAY, INSTANCE) if part in found.deployments}
    return "; ".join(f"{part}: {message}" for part, message in told.items() if message) or found.message


@contextlib.contextmanager
def cluster(settings: Settings) -> Iterator[None]:
    """A Ray cluster on this machine, with room for what the settings ask for; it ends with this."""
    own = settings.ray
    most = own.max_instances or own.instances
    wanted = most * own.instance_cpus + (own.gateways + 1) * own.gateway_cpus  # one more while gateways are upgraded
    with _connected(
        None,
        num_cpus=max(len(os.sched_getaffinity(0)), round(wanted + 0.5)),
        object_store_memory=OBJECT_STORE,
        include_dashboard=False,
    ):
        gpus = own.gpus(settings.engine.device) * own.instances
        there = ray.cluster_resources().get("GPU", 0.0)
        if gpus > there:
            raise InvalidInput("ray.instances", f"need {gpus:g} GPUs, and Ray finds {there:g}")
        try:
            yield
        finally:
            serve.shutdown()
            directory(APP).end()


@contextlib.contextmanager
def _connected(address: str | None, **options: Any) -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody unless that is wanted
    try:
        ray.init(address or "local", logging_level="warning", **options)
    except (ConnectionError, RuntimeError) as error:
        raise Unavailable(f"Ray cannot be {'joined' if address else 'started'}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def check_reach(settings: Settings, machines: int) -> None:
    """InvalidInput where what is on one of several machines could not be reached from another."""
    if machines < 2:
        return
    if settings.ray.data_path is DataPath.DIRECT and settings.instance.host in LOOPBACK:
        raise InvalidInput(
            "instance.host",
            f"is {settings.instance.host}, and the cluster has {machines} machines: 0.0.0.0 listens on all addresses",
        )
    if settings.data.store is not None and "://" not in settings.data.store:
        raise InvalidInput("data.store", f"is a folder, and the cluster has {machines} machines: name a Redis server")


@contextlib.contextmanager
def _stopping() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, until the end."""
    stop = threading.Event()
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(kind, lambda *_: stop.set()) for kind in kinds]
    try:
        yield stop
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
