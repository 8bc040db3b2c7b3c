"""Eight instances on Ray Serve through three kills, scale-out, scale-in and a rolling upgrade, under load.

Simulated devices; users who come back ask at a steady rate through Serve's proxy and a gateway, and do not retry. No
signals are sent ("never trigger"): a rank whose prefix is gone then is a FULL one, and counts as missed. An event is
over when its slots answer again and every user was asked once more.
"""

import argparse
import asyncio
import contextlib
import functools
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "disabled"

import msgspec
import numpy as np
import ray
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from rich.console import Console
from rich.table import Table

from common import percentile, write_result
from relaygr.cascade import Catalogue, PipelineConfig
from relaygr.cluster.ray.application import APP, INSTANCE
from relaygr.cluster.ray.directory import directory
from relaygr.cluster.ray.run import cluster, start_proxy
from relaygr.cluster.ray.slots import Held
from relaygr.history import LmdbStore
from relaygr.serving.client import HttpClient
from relaygr.serving.modes import Mode, RelaySettings
from relaygr.serving.ray_settings import RaySettings
from relaygr.serving.run import bind
from relaygr.serving.settings import DataSettings, InstanceSettings, Settings, render
from relaygr.serving.wire import RecommendBody, RecommendReply

INSTANCES, MORE, USERS, LENGTH, ITEMS = 8, 10, 64, 500, 5000
KILLED = ("slot-2", "slot-5", "slot-0")
TRIED = (10.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0)
"""Rates that are tried, and how long each; one is held when nothing fails and P99 is below HELD_MS."""
TRIED_S, HELD_MS = 6.0, 500.0
WITHIN_S = 300.0
"""How long an event may take."""


def settings(folder: Path, port: int) -> Settings:
    base = Settings(
        relay=RelaySettings(Mode.NEVER_TRIGGER),
        cascade=PipelineConfig(pipeline_ms=30_000, ranking_ms=29_000, candidates=64, retrieve=600),
        data=DataSettings(catalogue=str(folder / "items.safetensors"), store=str(folder / "store")),
        instance=InstanceSettings(drain_s=5.0),
        ray=RaySettings(instances=INSTANCES, instance_cpus=0.1, gateway_cpus=0.1, health_period_s=1.0),
    )
    router = replace(base.router, quiet_tokens=100_000)  # keys stay: what moves, moved because of the event
    engine = replace(base.engine, device="simulated", device_cache="256MiB", host_cache="0")
    return replace(base, router=router, engine=engine, gateway=replace(base.gateway, port=port))


def world(folder: Path) -> None:
    draw = np.random.default_rng(0)
    Catalogue(np.arange(ITEMS), draw.normal(size=(ITEMS, 16)).astype(np.float32)).save(folder / "items.safetensors")
    with LmdbStore(folder / "store") as store:
        for user in range(USERS):
            times = np.cumsum(draw.integers(1, 900, LENGTH))
            store.append(f"user-{user}", draw.integers(0, ITEMS, LENGTH), draw.integers(0, 16, LENGTH), times)


# ---- load


@dataclass(frozen=True)
class Answer:
    sent: float
    took_ms: float
    user: int
    status: int
    path: str | None = None
    slot: str | None = None


class Load:
    """Every user in turn, at a steady rate, whatever the answers do."""

    def __init__(self, address: str) -> None:
        self._client = HttpClient.to(address, keep=1024)
        self.answers: list[Answer] = []
        self._next = 0

    @contextlib.asynccontextmanager
    async def at(self, rate: float) -> AsyncIterator[None]:
        pending: set[asyncio.Task[None]] = set()

        async def send() -> None:
            due = time.monotonic()
            while True:
                pending.add(task := asyncio.create_task(self._ask(self._next % USERS)))
                task.add_done_callback(pending.discard)
                self._next += 1
                due += 1 / rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))

        sending = asyncio.create_task(send())
        try:
            yield
        finally:
            sending.cancel()
            await asyncio.gather(sending, *pending, return_exceptions=True)

    async def _ask(self, user: int) -> None:
        began = time.monotonic()
        body = msgspec.json.encode(RecommendBody(user=f"user-{user}", k=5))
        try:
            reply = await self._client.request("POST", "/v1/recommend", body, {"content-type": "application/json"})
            told = msgspec.json.decode(reply.body, type=RecommendReply) if reply.status == 200 else None
            status = reply.status
        except Exception:
            status, told = 0, None
        took = 1e3 * (time.monotonic() - began)
        path, slot = (told.path, told.instance) if told else (None, None)
        self.answers.append(Answer(began, took, user, status, path, slot))

    async def all_asked(self) -> None:
        """Until every user has been answered whose request was sent from now on."""
        since = time.monotonic()
        await until(lambda: {each.user for each in self.answers if each.sent >= since} == set(range(USERS)))


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until it holds: the state of others, who tell nobody."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            now = holds()
            if now is True or (not isinstance(now, bool) and await now):
                return
            await asyncio.sleep(0.05)


async def table() -> dict[str, Held]:
    return {held.slot: held for held in await directory(APP).table() or ()}


# ---- events


class Cluster:
    """What Serve is told: another file is an upgrade, another number of replicas no more than that."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, port
        self._version, self._instances = 0, INSTANCES

    def tell(self) -> None:
        """Returns at once; Serve goes there step by step."""
        file = self._folder / f"relay-{self._version}.toml"
        file.write_text(render(settings(self._folder, self._port)))
        app = {
            "name": APP,
            "route_prefix": "/",
            "import_path": "relaygr.cluster.ray:app",
            "args": {"config": str(file)},
            "deployments": [{"name": INSTANCE, "num_replicas": self._instances}],
        }
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [app]}))

    def scale(self, instances: int) -> None:
        self._instances = instances
        self.tell()

    def upgrade(self) -> None:
        self._version += 1
        self.tell()


async def killed(load: Load, slot: str) -> float:
    """Kill the slot's process; returns when the slot has answered again."""
    os.kill((await table())[slot].pid, signal.SIGKILL)
    return await answered(load, {slot})


async def answered(load: Load, slots: set[str]) -> float:
    """When all of these have answered requests sent after the directory had processes for them that are new."""
    began = time.monotonic()
    old = {slot: held.pid for slot, held in (await table()).items()}

    async def new() -> bool:
        now = await table()
        return all(slot in now and now[slot].pid != old.get(slot) for slot in slots)

    await until(new)
    since = time.monotonic()
    await until(lambda: slots <= {each.slot for each in load.answers if each.sent >= since})
    return time.monotonic() - began


async def fewer(number: int) -> float:
    """When only so many hold slots."""
    began = time.monotonic()

    async def few() -> bool:
        return len(await table()) == number

    await until(few)
    return time.monotonic() - began


async def event(load: Load, what: Callable[[], Any]) -> dict[str, Any]:
    """What it cost: from when it began until its slots answer again and every user was asked once more."""
    first = len(load.answers)
    began = time.monotonic()
    took = await what()
    await load.all_asked()
    answers = load.answers[first:]
    missed = [each for each in answers if each.path == "FULL"]
    return {
        "ranks": len(answers),
        "failed": sum(each.status != 200 for each in answers),
        "missed": len(missed),
        "share_missed": len(missed) / len(answers),
        "users_missed": len({each.user for each in missed}),
        "keys_back_s": took,
        "last_miss_s": max((each.sent - began for each in missed), default=0.0),
        "answered_ms": {
            "p50": percentile([each.took_ms for each in answers], 50),
            "p99": percentile([each.took_ms for each in answers], 99),
        },
    }


async def highest(load: Load, say: Callable[[str], None]) -> tuple[float, dict[str, Any]]:
    """The highest of the rates that is held, and what was seen at each."""
    held, seen = 0.0, dict[str, Any]()
    for rate in TRIED:
        say(f"trying {rate:g} a second")
        first = len(load.answers)
        async with load.at(rate):
            await asyncio.sleep(TRIED_S)
        answers = load.answers[first:]
        p99 = percentile([each.took_ms for each in answers], 99)
        failed = sum(each.status != 200 for each in answers)
        seen[f"{rate:g}"] = {"p99_ms": p99, "failed": failed}
        if failed or p99 > HELD_MS:
            break
        held = rate
    return held, seen


async def run(folder: Path, port: int, share: float, say: Callable[[str], None]) -> dict[str, Any]:
    told, load = Cluster(folder, port), Load(f"http://127.0.0.1:{port}")
    say(f"starting {INSTANCES} instances")
    await asyncio.to_thread(told.tell)
    await asyncio.to_thread(_get_global_client()._wait_for_application_running, APP, WITHIN_S)
    for user in range(USERS):
        await load._ask(user)
    held, seen = await highest(load, say)
    assert held, f"no rate is held: {seen}"
    rate = share * held
    figures: dict[str, Any] = {"highest_rate": held, "rates": seen, "rate": rate, "events": {}}
    events: dict[str, Callable[[], Any]] = {"calm": load.all_asked}
    events |= {f"kill of {slot}": functools.partial(killed, load, slot) for slot in KILLED}

    async def scaled_out() -> float:
        told.scale(MORE)
        return await answered(load, {f"slot-{number}" for number in range(INSTANCES, MORE)})

    async def scaled_in() -> float:
        told.scale(INSTANCES)
        return await fewer(INSTANCES)

    async def upgraded() -> float:
        slots = set(await table())
        told.upgrade()
        return await answered(load, slots)

    events |= {"scale-out": scaled_out, "scale-in": scaled_in, "rolling upgrade": upgraded}
    async with load.at(rate):
        await load.all_asked()
        for name, what in events.items():
            say(f"{name}, at {rate:g} a second")
            figures["events"][name] = await event(load, what)
    figures["failed"] = sum(each.status != 200 for each in load.answers)
    figures["requests"] = len(load.answers)
    figures["slots"] = sorted(await table())
    return figures


def shown(figures: dict[str, Any]) -> Table:
    table = Table("event", "ranks", "failed", "missed", "share", "users", "back after, s", "P99, ms")
    for name, told in figures["events"].items():
        back = told["keys_back_s"]
        table.add_row(
            name,
            *(str(told[part]) for part in ("ranks", "failed", "missed")),
            f"{told['share_missed']:.1%}",
            str(told["users_missed"]),
            "" if back is None else f"{back:.1f}",
            f"{told['answered_ms']['p99']:.0f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the highest rate that is held")
    share = parser.parse_args().share
    console = Console()
    with bind("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
    with tempfile.TemporaryDirectory() as name, console.status("starting") as status:
        folder = Path(name)
        world(folder)
        roomy = settings(folder, port)
        with cluster(replace(roomy, ray=replace(roomy.ray, max_instances=MORE + 2, instance_cpus=1.0))):
            start_proxy(roomy)
            figures = asyncio.run(run(folder, port, share, status.update))
            load = os.getloadavg()[0]
    console.print(shown(figures))
    console.print(f"{figures['rate']:g} a second, of {figures['highest_rate']:g} held; {figures['failed']} failed")
    inputs = {
        "instances": INSTANCES,
        "users": USERS,
        "behaviours": LENGTH,
        "share_of_highest_rate": share,
        "held_p99_ms": HELD_MS,
        "ray": ray.__version__,
        "load_average": load,
    }
    console.print(f"written to {write_result('ray-cluster', inputs, figures)}")


if __name__ == "__main__":
    main()
