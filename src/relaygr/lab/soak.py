"""A long run of returning users with seeded faults against real servers: what is answered, and what is left behind.

    warm, faults and kills   ──▶ look ──▶   as many requests again, freezes and clients that go   ──▶ rest ──▶ look

The first look comes after the last kill, so that both looks are at the same processes.
"""

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from relaygr.cascade import PipelineConfig
from relaygr.errors import Unavailable
from relaygr.lab.estimates import percentile
from relaygr.lab.right_scores import RightScores
from relaygr.lab.servers import Servers, serving
from relaygr.lab.traffic import ask
from relaygr.serving.all import DEFAULTS
from relaygr.serving.client import IDLE_S, HttpClient

__all__ = ["HELD", "Soak", "cost_model_error", "soak"]

ALLOWED: Final = {200, 429, 503, 504}
"""What may be answered while servers are killed and frozen: right answers, or a clear refusal."""
HELD: Final = ("leases", "pinned_pages", "ranks", "load_tokens", "tasks")
"""What must not have grown from one look to the next."""
_REST_S: Final = 60.0
_LOOKS: Final = 5
"""At the tasks of one event loop."""


@dataclass(frozen=True)
class Soak:
    """One run."""

    requests: int = 100_000
    senders: int = 16
    """Each sends its next request when the last is answered."""
    users: int = 200
    deadline_ms: float = 500.0
    kills: int = 5
    """Instances killed with SIGKILL in the first half; `serve all` starts them again."""
    freezes: int = 10
    """Instances stopped for `frozen_s`, over the whole run."""
    frozen_s: float = 0.3
    aborts: float = 0.02
    """The share of requests whose client goes before its answer."""
    appends: float = 0.2
    """The share of requests before which their user does something."""
    seed: int = 0


async def soak(wanted: Soak, data: Path, progress: Callable[[int], None] = lambda done: None) -> dict[str, Any]:
    """Run it on servers of a simulated device in the folder; returns what was counted and what was left."""
    (data / "soak").mkdir()
    settings = replace(
        DEFAULTS,
        cascade=PipelineConfig(pipeline_ms=wanted.deadline_ms, ranking_ms=wanted.deadline_ms * 0.8),
        engine=replace(DEFAULTS.engine, device="simulated"),
    )
    async with serving(settings, data / "soak", 2) as servers:
        run = _Run(wanted, servers, progress)
        half = wanted.requests // 2
        await run.phase(half, kills=wanted.kills, freezes=wanted.freezes // 2)
        before = await run.look()
        await run.phase(wanted.requests - half, kills=0, freezes=wanted.freezes - wanted.freezes // 2)
        after = await run.look()
        instances = (await servers.instances()).values()
        error = max(told["engine"]["cost_model_error"] for told in instances)
    over = run.overruns or [0.0]
    return {
        "answers": {str(status): count for status, count in sorted(run.answers.items())},
        "unexpected": sum(count for status, count in run.answers.items() if status not in ALLOWED),
        "unanswered": run.unanswered,
        "aborted": run.aborted,
        "paths": dict(run.paths),
        "stale": run.stale,
        "scores": await asyncio.to_thread(run.scores.look, data / "soak" / "store"),
        "cost_model_error": round(error, 4),
        "deadline_overrun_p99_ms": round(percentile(over, 99), 1),
        "requests_per_second": round(wanted.requests / run.seconds, 1),
        "before": before,
        "after": after,
        "grown": {
            "descriptors": after["descriptors"] - before["descriptors"],
            "memory_mib": round(after["memory_mib"] - before["memory_mib"], 1),
            **{name: after[name] - before[name] for name in HELD},
        },
    }


async def cost_model_error(data: Path, requests: int, seed: int = 0) -> float:
    """Of one instance on this machine's CPU, serving the default model to users who come back, one after the other."""
    (data / "cpu").mkdir()
    draw = random.Random(seed)
    async with serving(DEFAULTS, data / "cpu", 1) as servers:
        for _ in range(requests):
            await ask(servers.client, f"user-{int(draw.paretovariate(0.8)) % 200}", 10)
        (told,) = (await servers.instances()).values()
    error: float = told["engine"]["cost_model_error"]
    return error


class _Run:
    def __init__(self, wanted: Soak, servers: Servers, progress: Callable[[int], None]) -> None:
        self._wanted, self._servers, self._progress = wanted, servers, progress
        self._draw = random.Random(wanted.seed)
        self._done = 0
        self._time = int(time.time())
        self.answers: Counter[int] = Counter()
        self.paths: Counter[str] = Counter()
        self.overruns: list[float] = []
        self.unanswered = self.aborted = self.stale = 0
        self.seconds = 0.0
        self.scores = RightScores(max(1, wanted.requests // 5000))

    async def phase(self, requests: int, *, kills: int, freezes: int) -> None:
        """Send so many; faults come at seeded requests."""
        began, first = time.monotonic(), self._done
        faults = [(self._draw.randrange(requests // 10, requests), self._kill) for _ in range(kills)]
        faults += [(self._draw.randrange(requests // 10, requests), self._freeze) for _ in range(freezes)]
        seeds = [self._draw.randrange(2**32) for _ in range(self._wanted.senders)]
        left = iter(range(requests))
        senders = [asyncio.create_task(self._send(left, random.Random(seed))) for seed in seeds]
        for at, fault in sorted(faults, key=lambda one: one[0]):
            while self._done - first < at and not all(sender.done() for sender in senders):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await fault()
        await asyncio.gather(*senders)
        self.seconds += time.monotonic() - began

    async def _send(self, left: Any, draw: random.Random) -> None:
        client = HttpClient.to(self._servers.address, keep=1)
        headers = {"content-type": "application/json", "x-relaygr-deadline-ms": f"{self._wanted.deadline_ms:g}"}
        for _ in left:
            user = f"user-{int(draw.paretovariate(0.8)) % self._wanted.users}"
            if draw.random() < self._wanted.appends:
                self._time += 1
                did = {"item": draw.randrange(1000), "action": 1, "timestamp": self._time}
                await self._ask(client, "/v1/behaviours", {"user": user, "behaviours": [did]}, headers, draw)
            await self._ask(client, "/v1/recommend", {"user": user, "k": 10}, headers, draw)
            self._done += 1
            self._progress(self._done)
        client.close()

    async def _ask(
        self, client: HttpClient, path: str, body: dict[str, Any], headers: dict[str, str], draw: random.Random
    ) -> None:
        recommends, began = path == "/v1/recommend", time.monotonic()
        asked = client.request("POST", path, msgspec.json.encode(body), headers)
        if recommends and draw.random() < self._wanted.aborts:
            self.aborted += 1
            with contextlib.suppress(TimeoutError, Unavailable):
                await asyncio.wait_for(asked, draw.random() * 0.02)
            return
        try:
            reply = await asked
        except Unavailable:
            self.unanswered += 1
            return
        if path == "/v1/behaviours" and reply.status == 400:
            return  # two senders did something for one user: the later time was stored first
        self.answers[reply.status] += 1
        if recommends:
            self.overruns.append(max(0.0, (time.monotonic() - began) * 1e3 - self._wanted.deadline_ms))
            if reply.status == 200:
                told: Any = msgspec.json.decode(reply.body)
                self.paths[str(told["path"])] += 1
                self.stale += told["stale"]
                self.scores.hear(body["user"], told)

    # ---- faults

    async def _kill(self) -> None:
        os.kill(self._draw.choice(self._instances()), signal.SIGKILL)
        await self._all_up()

    async def _freeze(self) -> None:
        victim = self._draw.choice(self._instances())
        os.kill(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._wanted.frozen_s)
        finally:
            os.kill(victim, signal.SIGCONT)

    def _instances(self) -> list[int]:
        (gateway,) = (pid for pid in _children(os.getpid()) if b"serve\0all" in _command(pid))
        return [pid for pid in _children(gateway) if b"serve\0instance" in _command(pid)]

    async def _all_up(self) -> None:
        async with asyncio.timeout(_REST_S):
            while (await self._servers.status())["ready_slots"] < 2 or len(self._instances()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    # ---- what is left

    async def look(self) -> dict[str, Any]:
        """What the servers hold when nobody asks: after all leases have ended."""
        await self._all_up()
        async with asyncio.timeout(_REST_S):
            while any((held := await self._held()).values()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await asyncio.sleep(IDLE_S + 1.0)  # connections that the rush needed are closed then
        family = [pid for own in _children(os.getpid()) if b"serve\0all" in _command(own) for pid in _family(own)]
        return {
            **held,
            "tasks": await self._tasks(),
            "processes": len(family),
            "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in family),  # noqa: PTH208
            "memory_mib": round(sum(_resident_mib(pid) for pid in family), 1),
        }

    async def _held(self) -> dict[str, int]:
        instances = [told["engine"] for told in (await self._servers.instances()).values()]
        slots = (await self._servers.status())["slots"].values()
        return {
            "leases": sum(engine["leases"] for engine in instances),
            "pinned_pages": sum(engine["device_pages_pinned"] + engine["host_pages_pinned"] for engine in instances),
            "ranks": sum(engine["ranks_under_way"] + engine["builds_under_way"] for engine in instances),
            "load_tokens": sum(slot["load_tokens"] for slot in slots),
        }

    async def _tasks(self) -> int:
        """Of all event loops that tell."""
        slots = (await self._servers.status())["slots"].values()
        return sum([await _tasks(address) for address in (self._servers.address, *(slot["address"] for slot in slots))])


async def _tasks(address: str) -> int:
    """Those of one event loop that stay: now and then a look finds a probe, which ends by itself."""
    client = HttpClient.to(address)
    told = []
    try:
        for _ in range(_LOOKS):
            found = re.search(rb"^relaygr_tasks (\S+)$", (await client.request("GET", "/metrics")).body, re.M)
            assert found is not None
            told.append(int(float(found[1])))
            await asyncio.sleep(0.05)
    finally:
        client.close()
    return min(told)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return []


def _family(pid: int) -> list[int]:
    return [pid, *(one for child in _children(pid) for one in _family(child))]


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _resident_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0
