"""Gateway and instances on a CPU: ranking by relay against `full`, what HTTP adds, and what one frontend carries.

Real processes, open-loop arrivals, latencies from when a request was to be sent. The relay and `full` get the same
requests, in one run.
"""

import argparse
import asyncio
import contextlib
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from common import history_of, percentile, write_result
from relaygr import History
from relaygr.cascade import PipelineConfig
from relaygr.lab.servers import Servers, serving
from relaygr.lab.traffic import Answer, Traffic, Visit, ask, replay
from relaygr.serving.all import DEFAULTS
from relaygr.serving.client import HttpClient
from relaygr.serving.modes import Mode, RelaySettings
from relaygr.serving.provision import World, provision
from relaygr.serving.settings import Settings
from relaygr.serving.wire import Behaviours, Encoding, RankBody, encode

MODES = (Mode.FULL, Mode.RELAY_HOST_EXTEND)
LOADS = (0.9, 1.5)
USERS, LENGTH, CANDIDATES, NEWCOMERS, RETRIEVAL_MS = 48, 3500, 128, 0.02, 200.0
ROUNDS = 3
"""Of what is a matter of microseconds: the one in the middle is told, and all are kept."""
SECONDS = 30.0
"""Of each replay."""
IN_TIME = {"RESIDENT", "WAITED", "RELOADED", "EXTENDED"}
CONNECTIONS, FRONTEND_S, FRONTEND_CANDIDATES, FRONTEND_HISTORY = 48, 8.0, 512, 1000
TARGETS = {"p99_ratio": 1 / 3, "at_risk": 0.95, "added_ms": 3.0, "frontend": 4000.0}


# ---- the relay against full


def settings(mode: Mode) -> Settings:
    """Budgets that nothing misses: what is compared is how long things take."""
    budgets = PipelineConfig(pipeline_ms=60_000 + RETRIEVAL_MS, ranking_ms=60_000, candidates=CANDIDATES)
    return replace(
        DEFAULTS,
        relay=RelaySettings(mode),
        cascade=budgets,
        gateway=replace(DEFAULTS.gateway, retrieval_at_least_ms=RETRIEVAL_MS),
        engine=replace(DEFAULTS.engine, on_miss="full"),
    )


async def compare(data: Path, say: Any) -> dict[str, Any]:
    """Both modes at both loads; the rate is what `full` completes when it always has work."""
    world = World(users=USERS + 800, typical=LENGTH, spread=0.05, longest=2 * LENGTH)
    await asyncio.to_thread(provision, data / "world", world=world)
    capacity, figures = 0.0, dict[str, Any]()
    for mode in MODES:
        shutil.copytree(data / "world", data / mode)
        async with serving(settings(mode), data / mode, 1) as servers:
            if mode is Mode.FULL:
                say("full: the highest rate it sustains")
                capacity = await sustained(servers)
            else:
                say(f"{mode}: every user once")
                await replay(servers.client, [Visit(0.3 * n, f"user-{n}", ()) for n in range(USERS)], CANDIDATES)
            sent = 0
            for load in LOADS:
                rate = load * capacity
                requests, seed = int(rate * SECONDS), int(100 * load)
                traffic = Traffic(USERS, requests, rate, newcomers=NEWCOMERS, seed=seed, after=sent)
                sent += requests
                say(f"{mode}: {rate:.1f} requests a second, {load:.0%} of what full sustains")
                before = await reused(servers)
                answers = await replay(servers.client, traffic.visits(), CANDIDATES)
                figures.setdefault(f"{load:.0%}", {})[mode.value] = summary(answers, before, await reused(servers))
            if mode is not Mode.FULL:
                say("what gateway and frontend add")
                rounds = [await added(servers) for _ in range(ROUNDS)]
                middle = sorted(rounds, key=lambda told: told["p50"])[ROUNDS // 2]
                figures["added"] = {**middle, "rounds_p50": [told["p50"] for told in rounds]}
    return {"capacity": capacity, **figures}


async def sustained(servers: Servers, seconds: float = 20.0, clients: int = 6) -> float:
    """Requests a second that are completed while `clients` always wait for one each."""
    done, until = 0, 0.0

    async def one(number: int) -> None:
        nonlocal done
        for turn in range(10_000):
            if time.monotonic() > until:
                return
            user = f"user-{(number + clients * turn) % USERS}"
            await ask(servers.client, user, CANDIDATES)
            done += time.monotonic() < until

    until = time.monotonic() + 3.0
    await asyncio.gather(*(one(number) for number in range(clients)))
    done, until = 0, time.monotonic() + seconds
    await asyncio.gather(*(one(number) for number in range(clients)))
    return done / seconds


async def reused(servers: Servers) -> Counter[str]:
    """Ranks so far, and prefixes that were computed from nothing."""
    told = (await servers.instances()).values()
    return Counter(
        ranks=sum(sum(status["engine"]["paths"].values()) for status in told),
        made=sum(status["counts"]["sources"].get("NOTHING", 0) for status in told),
    )


def summary(answers: Sequence[Answer], before: Counter[str], after: Counter[str]) -> dict[str, Any]:
    """Of requests that were all answered."""
    failed = Counter(answer.status for answer in answers if answer.reply is None)
    if failed:
        raise SystemExit(f"of {len(answers)} requests some were refused, by status: {dict(failed)}")
    replies = [answer.reply for answer in answers if answer.reply is not None]
    ranking = [reply.stages_ms["ranking"] for reply in replies]
    at_risk = [reply for reply in replies if reply.decision != "NOT_AT_RISK"]
    ranks, made = after["ranks"] - before["ranks"], after["made"] - before["made"]
    return {
        "requests": len(answers),
        "ranking_ms": {"p50": percentile(ranking, 50), "p99": percentile(ranking, 99)},
        "answered_ms": {
            "p50": percentile([answer.ms for answer in answers], 50),
            "p99": percentile([answer.ms for answer in answers], 99),
        },
        "paths": dict(Counter(reply.path for reply in replies)),
        "decisions": dict(Counter(reply.decision for reply in replies)),
        "reuse": 1 - made / ranks,
        "at_risk_in_time": sum(reply.path in IN_TIME for reply in at_risk) / len(at_risk) if at_risk else None,
    }


async def added(servers: Servers, requests: int = 200) -> dict[str, float]:
    """Milliseconds of a lone request that are neither the engine's, nor retrieval's, nor pre-processing's."""
    taken = []
    for number in range(requests):
        answer = await ask(servers.client, f"user-{number % USERS}", 10)
        assert answer.reply is not None
        assert answer.reply.engine_ms is not None
        stages = answer.reply.stages_ms
        taken.append(answer.ms - stages["retrieval"] - stages["pre_processing"] - answer.reply.engine_ms)
    return {"p50": statistics.median(taken), "p99": percentile(taken, 99)}


# ---- one frontend


class Hammer(asyncio.Protocol):
    """One connection that always has one request under way."""

    def __init__(self, messages: Sequence[bytes], answered: list[float]) -> None:
        self._messages, self._answered = messages, answered
        self._sent, self._began, self._received = 0, 0.0, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        self._began = time.perf_counter()
        self._transport.write(self._messages[self._sent % len(self._messages)])
        self._sent += 1

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        length = re.search(rb"content-length: (\d+)", self._received[:end])
        assert length is not None
        if len(self._received) < end + 4 + int(length[1]):
            return
        assert self._received.startswith(b"HTTP/1.1 200"), bytes(self._received[:500])
        self._received.clear()
        self._answered.append(time.perf_counter() - self._began)
        self._send()

    def end(self) -> None:
        self._transport.abort()


def rank_message(history: History, user: str, items: np.ndarray[Any, Any], *, whole: bool = False) -> bytes:
    newest = history if whole else history[len(history) - 64 :]
    body = RankBody(
        user=user,
        length=len(history),
        digest=history.digest(),
        behaviours=Behaviours(newest.items.tobytes(), newest.actions.tobytes(), newest.timestamps.tobytes()),
        candidates=items.tobytes(),
    )
    content = encode(Encoding.MSGPACK, body)
    head = "POST /v1/rank HTTP/1.1\r\nhost: instance\r\nx-relaygr-deadline-ms: 5000.000\r\n"
    head += f"content-type: {Encoding.MSGPACK.value}\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


@contextlib.asynccontextmanager
async def instance(folder: Path) -> AsyncIterator[tuple[str, int, int]]:
    """One on a simulated device: its address, and the processes of frontend and engine."""
    file = folder / "instance.toml"
    file.write_text('[engine]\ndevice = "simulated"\nhost_cache = "0"\ndevice_cache = "4GiB"\n[instance]\nport = 0\n')
    command = [sys.executable, "-m", "relaygr", "serve", "instance", "--config", str(file)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        address = (await process.stdout.readline()).decode().split()[-1]
        yield address, process.pid, child_of(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


def child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def frontend(folder: Path) -> dict[str, Any]:
    """Rank requests a second, and the processor time of each process for one."""
    draw = np.random.default_rng(0)
    n, users = FRONTEND_HISTORY, [f"user-{number}" for number in range(16)]
    history = history_of(draw, n, 1000)
    items = [draw.integers(0, 10_000, FRONTEND_CANDIDATES) for _ in users]
    async with instance(folder) as (address, *servers):
        client = HttpClient.to(address)
        for user, candidates in zip(users, items, strict=True):
            content = rank_message(history, user, candidates, whole=True).partition(b"\r\n\r\n")[2]
            reply = await client.request("POST", "/v1/rank", content, {"content-type": Encoding.MSGPACK.value})
            assert reply.status == 200, reply.body
        client.close()
        messages = [rank_message(history, user, candidates) for user, candidates in zip(users, items, strict=True)]
        answered: list[float] = []
        host, _, port = address.removeprefix("http://").rpartition(":")
        loop = asyncio.get_running_loop()
        hammers: list[Hammer] = []
        for number in range(CONNECTIONS):
            turned = messages[number % 16 :] + messages[: number % 16]
            hammers.append(Hammer(turned, answered))
            await loop.create_connection(lambda: hammers[-1], host, int(port))
        await asyncio.sleep(1.0)
        answered.clear()
        pids = (*servers, os.getpid())
        before, began = [cpu_s(pid) for pid in pids], time.perf_counter()
        await asyncio.sleep(FRONTEND_S)
        count, seconds = len(answered), time.perf_counter() - began
        used = [(cpu_s(pid) - first) / count * 1e6 for pid, first in zip(pids, before, strict=True)]
        times = [ms * 1e3 for ms in answered[:count]]
        for hammer in hammers:
            hammer.end()
    return {
        "rate": count / seconds,
        "answered_ms": {"p50": percentile(times, 50), "p99": percentile(times, 99)},
        "cpu_us": dict(zip(("frontend", "engine", "client"), used, strict=True)),
        "rate_of_a_core": 1e6 / used[0],
    }


# ---- all of it


async def measure(only: str | None, say: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {"load_average": os.getloadavg()}
    with tempfile.TemporaryDirectory(prefix="relaygr-bench-") as folder:
        rounds = []
        if only in (None, "frontend"):
            say("one frontend")
            rounds.append(await frontend(Path(folder)))
        if only in (None, "relay"):
            figures |= await compare(Path(folder), say)
        while 0 < len(rounds) < ROUNDS:
            say("one frontend, again")
            rounds.append(await frontend(Path(folder)))
    if rounds:
        middle = sorted(rounds, key=lambda told: told["rate"])[ROUNDS // 2]
        figures["frontend"] = {**middle, "rounds": [told["rate"] for told in rounds]}
    return figures


def rows(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """What was to be reached, and what was."""
    found = []

    def row(what: str, shown: str, target: str, reached: bool | None) -> None:
        found.append({"what": what, "measured": shown, "target": target, "reached": reached})

    for load in (f"{load:.0%}" for load in LOADS):
        if load not in figures:
            continue
        full, relay = (figures[load][mode.value] for mode in MODES)
        ratio = relay["ranking_ms"]["p99"] / full["ranking_ms"]["p99"]
        shown = f"{ratio:.2f} ({relay['ranking_ms']['p99']:.0f} of {full['ranking_ms']['p99']:.0f} ms)"
        target = TARGETS["p99_ratio"]
        goal, reached = ("≤ 1/3", ratio <= target) if load == "90%" else ("", None)
        row(f"ranking P99 against full's, {load} of full's rate, reuse {relay['reuse']:.0%}", shown, goal, reached)
        share = relay["at_risk_in_time"]
        goal, reached = "≥ 95%", share is not None and share >= TARGETS["at_risk"]
        shown = "none at risk" if share is None else f"{share:.1%}"
        row(f"at-risk ranks with their prefix, {load}", shown, goal, reached)
    if "added" in figures:
        ms = figures["added"]["p50"]
        rounds = ", ".join(f"{one:.2f}" for one in figures["added"]["rounds_p50"])
        shown = f"{ms:.2f} ms (rounds: {rounds})"
        row("added by gateway and frontend, P50", shown, "< 3 ms", ms < TARGETS["added_ms"])
    if "frontend" in figures:
        told = figures["frontend"]
        rounds = ", ".join(f"{one:,.0f}" for one in told["rounds"])
        cpu = f"{told['cpu_us']['frontend']:.0f} µs of processor time each"
        shown = f"{told['rate']:,.0f} a second, {cpu} (rounds: {rounds})"
        reached = told["rate"] >= TARGETS["frontend"]
        row(f"one frontend, {FRONTEND_CANDIDATES} candidates, client on the same cores", shown, "≥ 4,000", reached)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("frontend", "relay"), help="measure a part, and write nothing")
    only: str | None = parser.parse_args().only
    console = Console()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, console.status("") as status:
        figures = runner.run(measure(only, status.update))
    found = rows(figures)
    table = Table(title=f"{LENGTH} behaviours, {CANDIDATES} candidates, 2 layers, d 64, float32, one instance")
    for heading in ("what", "measured", "target", "reached"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for row in found:
        reached = {True: "yes", False: "no", None: ""}[row["reached"]]
        table.add_row(row["what"], row["measured"], row["target"], reached)
    console.print(table)
    if "frontend" in figures:
        console.print(f"Processor time of a rank request, µs: {figures['frontend']['cpu_us']}")
    console.print(f"Load average before: {figures['load_average'][0]:.2f}")
    if only is None:
        inputs = {
            "users": USERS,
            "length": LENGTH,
            "candidates": CANDIDATES,
            "newcomers": NEWCOMERS,
            "retrieval_at_least_ms": RETRIEVAL_MS,
            "loads": LOADS,
            "seconds": SECONDS,
            "model": "hstu, 2 layers, d 64, 2 heads",
            "instances": 1,
            "frontend": {
                "connections": CONNECTIONS,
                "seconds": FRONTEND_S,
                "candidates": FRONTEND_CANDIDATES,
                "history": FRONTEND_HISTORY,
            },
        }
        console.print(f"written to {write_result('serving-cpu', inputs, {'targets': found, **figures})}")


if __name__ == "__main__":
    main()
