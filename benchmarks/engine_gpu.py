"""The engine on a GPU through its public calls. Run it as `engine.py --device cuda`.

checks   scores by every path against scores in full, in bf16, and what bf16 itself costs against fp32
calls    one at a time: pre-infer, and ranks resident, reloaded, extended and in full
loads    closed loops of so many callers: requests a second, latencies, and the loop's own time for each step
appends  steps of so many new tokens behind so many cached ones, on the device; only when asked for
"""

import asyncio
import contextlib
import json
import os
import random
import statistics
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from uvloop import run as run_on_uvloop

from common import history_of, machine, percentile
from relaygr import Engine, EngineConfig, History, Ranked
from relaygr.engine.cuda_runner import CudaRunner
from relaygr.engine.step import Step
from relaygr.history import PAGE
from relaygr.lab.shapes import ITEMS, SHAPES, shaped
from relaygr.model.batch import AppendRow
from relaygr.model.inputs import NO_CONTEXT
from relaygr.serving.garbage import settled

CALLS = (("d256", 8192, 512), ("d512", 8192, 512), ("d512", 32768, 512), ("d1024", 8192, 512), ("dlrmv3", 14335, 2048))
LOADS = (("d256", 8192, 512), ("d512", 8192, 512), ("d1024", 8192, 512), ("dlrmv3", 14335, 2048))
CALLERS = (1, 4, 16, 48)
MIXES = {
    "resident": {"resident": 1.0},
    "mixed": {"resident": 0.8, "extended": 0.15, "relay": 0.05},
    "full": {"full": 1.0},
}
"""What callers ask for: prefixes left earlier; a few new behaviours; nothing cached, pre-inferred first or not."""
APPENDS = {
    "d512": [
        (low, new) for low in (0, 8192, 24576, 36864) for new in (512, 1024, 2048, *range(3072, 8193, 512))
    ] + [(0, 16384), (16384, 16384), (0, 32768), (0, 42752)],
    "dlrmv3": [(0, 8192), (0, 12288), (0, 14207), (0, 14335), (8192, 4096), (8192, 6015), (8192, 8192), (14207, 16)],
}  # fmt: skip
"""By shape: tokens that are there, and new ones."""
EXTENSION = 16
LINK_GB_S = 55.0
TARGETS = {  # milliseconds on the device
    ("d512", 8192, "rank resident"): 0.30,
    ("d512", 32768, "rank resident"): 0.75,
    ("d512", 8192, "pre-infer"): 1.6,
    ("d512", 32768, "pre-infer"): 16.0,
}


def grown(draw: np.random.Generator, history: History) -> History:
    last = int(history.timestamps[-1])
    return history.append(draw.integers(0, ITEMS, EXTENSION), [1] * EXTENSION, [last] * EXTENSION)


def engine_of(
    shape: str, length: int, *, dtype: str = "bfloat16", device: str = "24GiB", host: str = "12GiB"
) -> Engine:
    config = EngineConfig(
        device="cuda", dtype=dtype, device_cache=device, host_cache=host, max_history=length + 4096, pre_infer_share=1.0
    )
    return Engine(shaped(shape, scale_length=float(length)), config)


@contextlib.asynccontextmanager
async def settled_engine(shape: str, length: int, **sizes: str) -> AsyncIterator[Engine]:
    """With the collector of garbage as servers have it."""
    async with engine_of(shape, length, **sizes) as engine:
        with settled():
            yield engine


async def written_back(engine: Engine, count: int) -> None:
    """Wait until so many prefixes are in host memory."""
    while engine.status().written_back < count:  # noqa: ASYNC110
        await asyncio.sleep(1e-3)


async def pinned(engine: Engine) -> None:
    """Wait until the host pool is: while the driver pins memory it takes no launches."""
    total = engine.config.host_bytes // engine.status().page_bytes
    while engine._executor.host_pages < total:  # noqa: ASYNC110
        await asyncio.sleep(1e-2)


def push_out(engine: Engine, user: str) -> None:
    """Evict the user from device memory alone, as a full device cache would."""
    assert engine._loop is not None
    engine._loop.tier.drop(user)


async def check(shape: str, length: int, users: int = 4) -> dict[str, Any]:
    """Largest differences of scores, by path against in full in bf16; and of full in bf16 against full in fp32."""
    draw = np.random.default_rng(1)
    cases = [(history_of(draw, length - 37 * k, ITEMS), draw.integers(0, ITEMS, 512 - 100 * k)) for k in range(users)]
    full: dict[str, list[np.ndarray[Any, Any]]] = {}
    for dtype in ("float32", "bfloat16"):
        async with engine_of(shape, length, dtype=dtype, host="0") as engine:
            full[dtype] = [(await engine.rank(f"full {k}", *case)).scores for k, case in enumerate(cases)]
    differences: dict[str, float] = {}

    def compare(results: list[Ranked]) -> None:
        for ranked, right in zip(results, full["bfloat16"], strict=True):
            worst = float(np.abs(ranked.scores - right).max())
            differences[ranked.path] = max(differences.get(ranked.path, 0.0), worst)

    async with engine_of(shape, length) as engine:
        for k, (history, _) in enumerate(cases):
            await engine.pre_infer(f"u{k}", history[: len(history) - EXTENSION])
        compare(await asyncio.gather(*(engine.rank(f"u{k}", *case) for k, case in enumerate(cases))))
        compare(await asyncio.gather(*(engine.rank(f"u{k}", *case) for k, case in enumerate(cases))))
        await written_back(engine, users)
        while engine.status().write_back_waiting or engine.status().copies_in_flight:  # noqa: ASYNC110
            await asyncio.sleep(1e-3)
        for k in range(users):
            push_out(engine, f"u{k}")
        compare(await asyncio.gather(*(engine.rank(f"u{k}", *case) for k, case in enumerate(cases))))
        faults = engine.status().faults
    noise = max(
        float(np.abs(half - single).max()) for half, single in zip(full["bfloat16"], full["float32"], strict=True)
    )
    return {
        "shape": shape,
        "n": length,
        "users": users,
        "against_full": differences,
        "bf16_against_fp32": noise,
        "holds": max(differences.values()) <= noise,
        "faults": faults,
    }


async def calls(shape: str, length: int, candidates: int, rounds: int) -> list[dict[str, Any]]:
    """Each call by itself: from the caller's side, and the device's share of it."""
    draw = np.random.default_rng(0)
    times: dict[str, list[float]] = {}
    device: dict[str, list[float]] = {}
    copied: list[float] = []
    async with settled_engine(shape, length) as engine:
        await pinned(engine)
        prepared = engine.status().prepared

        async def timed(kind: str, call: Any) -> Any:
            before = engine.status().device_busy_s
            began = time.perf_counter()
            result = await call
            times.setdefault(kind, []).append((time.perf_counter() - began) * 1e3)
            device.setdefault(kind, []).append((engine.status().device_busy_s - before) * 1e3)
            return result

        with quiet_core() as host:
            for turn in track(range(rounds + 3), f"{shape} n={length}"):
                if turn == 3:  # the first ones warm up
                    times.clear()
                    device.clear()
                history, items = history_of(draw, length, ITEMS), draw.integers(0, ITEMS, candidates)
                for user in ("a", "b"):
                    await engine.evict(user)
                written = engine.status().written_back
                await timed("pre-infer", engine.pre_infer("a", history))
                paths = [(await timed("rank resident", engine.rank("a", history, items))).path]
                await written_back(engine, written + 1)
                push_out(engine, "a")
                paths.append((await timed("rank reloaded", engine.rank("a", history, items))).path)
                paths.append((await timed("rank extended", engine.rank("a", grown(draw, history), items))).path)
                paths.append((await timed("rank full", engine.rank("b", history, items))).path)
                assert paths == ["RESIDENT", "RELOADED", "EXTENDED", "FULL"], paths
        status = engine.status()
        copy_s = status.cost_model["copies"]
        copied.append(status.page_bytes / copy_s[1] / 1e9 if copy_s[1] else 0.0)
    rows = []
    for kind, taken in times.items():
        row: dict[str, Any] = {"shape": shape, "n": length, "m": candidates, "call": kind}
        row["ms"] = statistics.median(taken)
        row |= {"p99_ms": percentile(taken, 99), "device_ms": statistics.median(device[kind])}
        target = TARGETS.get((shape, length, kind))
        if target is not None:
            row |= {
                "target_ms": target,
                "reached_on_device": row["device_ms"] <= target,
                "reached": row["ms"] <= target,
            }
        if kind == "rank reloaded":
            row |= {"copy_gb_s": copied[0], "share_of_link": copied[0] / LINK_GB_S}
        rows.append(row)
    rows[0] |= {"prepared": prepared, "host": host}
    return rows


async def appends(shape: str, cases: list[tuple[int, int]], rounds: int = 4) -> list[dict[str, Any]]:
    """The least of some rounds: how much longer an append takes that is a little longer."""
    draw = np.random.default_rng(0)
    longest = max(low + new for low, new in cases)
    history = history_of(draw, longest, ITEMS)
    best: dict[tuple[int, int], float] = {}
    async with engine_of(shape, longest, host="0") as engine:
        loop = engine._loop
        assert loop is not None
        pages = loop.tier.pool.take(-(-longest // PAGE))
        for turn in range(rounds + 1):
            for low, new in cases:
                step = Step(loop.served, [AppendRow(history, NO_CONTEXT, low, low + new, pages)], [])
                taken = (await engine._executor.launch(step)).seconds * 1e3
                if turn:  # the first warms up
                    best[low, new] = min(taken, best.get((low, new), taken))
        loop.tier.pool.unpin(pages)
    return [{"shape": shape, "cached": low, "new": new, "device_ms": taken} for (low, new), taken in best.items()]


STEP_PHASES = ("plan", "launch", "deliver", "learn", "complete")
RANK_PHASES = ("arrive", "leave")
PARTS = 5
"""Of the time of a load, told apart: hosts that are shared have slow seconds."""
DISTURBED = 1.3
"""How many times slower the core may be when a load ends; else it is run again."""
TRIES = 3


class Phases:
    """Seconds of the loop's thread in each of its phases, on the CPU and by the clock, and how many steps there were;
    and in what it does for each rank that comes and leaves.

    The clock also counts when the thread was not running: on a virtual machine that others share, some of it is.
    """

    def __init__(self, engine: Engine) -> None:
        loop = engine._loop
        assert loop is not None
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self.wall_s: defaultdict[str, float] = defaultdict(float)
        self.steps = 0
        self.ranks = 0
        self._runner: weakref.ref[CudaRunner] | None = None
        plan, launch, ended = loop._scheduler.plan, loop._launch, loop._step_ended
        learn, arrive, leave = loop.cost.observe_step, engine.begin_rank, loop.leave

        def timed(name: str, call: Any) -> Any:
            def wrapped(*args: Any, **more: Any) -> Any:
                began, cpu = time.perf_counter(), time.thread_time()
                try:
                    return call(*args, **more)
                finally:
                    self.cpu_s[name] += time.thread_time() - cpu
                    self.wall_s[name] += time.perf_counter() - began
                    self.steps += name == "launch"
                    self.ranks += name == "arrive"

            return wrapped

        loop._scheduler.plan = timed("plan", plan)  # type: ignore[method-assign]
        loop._launch = timed("launch", launch)  # type: ignore[method-assign]
        loop._step_ended = timed("complete", ended)  # type: ignore[method-assign]
        loop.cost.observe_step = timed("learn", learn)  # type: ignore[method-assign]
        engine.begin_rank = timed("arrive", arrive)  # type: ignore[method-assign]
        loop.leave = timed("leave", leave)
        runner = getattr(engine._executor, "_runner", None)
        if isinstance(runner, CudaRunner):
            fly = runner._fly

            def flown(flights: Any, ended: Any, result: Any, over: Any) -> Any:
                return fly(flights, ended, timed("deliver", result), timed("deliver", over))

            runner._fly = flown  # type: ignore[method-assign, assignment]
            self._runner = weakref.ref(runner)

    def close(self) -> None:
        """Leave the runner as it was: it would hold itself, and with it the device's memory."""
        if self._runner is not None and (runner := self._runner()) is not None:
            del runner._fly

    def clear(self) -> None:
        self.cpu_s.clear()
        self.wall_s.clear()
        self.steps = self.ranks = 0

    def step_s(self) -> float:
        """Of the CPU, in all steps so far."""
        return sum(self.cpu_s[name] for name in STEP_PHASES)

    def per_step(self, seconds: dict[str, float]) -> dict[str, float]:
        """Microseconds."""
        each = {name: seconds[name] / self.steps * 1e6 for name in STEP_PHASES}
        return each | {"all": sum(each.values())}

    def per_rank(self, seconds: dict[str, float]) -> dict[str, float]:
        """Microseconds."""
        return {name: seconds[name] / self.ranks * 1e6 for name in RANK_PHASES}


def pace() -> float:
    """Microseconds of the CPU that a piece of Python takes, the least of some tries: how fast the core is just now."""
    least = float("inf")
    for _ in range(3):
        kept: dict[int, Any] = {}
        began = time.thread_time()
        for number in range(20_000):
            kept[number & 255] = (number, kept)
        least = min(least, time.thread_time() - began)
    return least * 1e6


@contextlib.contextmanager
def quiet_core() -> Iterator[dict[str, Any]]:
    """Stay on the core that is the fastest just now. Where others share the host, half of its cores may be twice as
    slow as the rest, other ones every few seconds: somebody else runs on their other thread."""
    cores = os.sched_getaffinity(0)
    paces: dict[int, float] = {}
    for core in sorted(cores):
        os.sched_setaffinity(0, {core})
        paces[core] = pace()
    os.sched_setaffinity(0, {min(paces, key=paces.__getitem__)})
    told: dict[str, Any] = {"pace_us": min(paces.values()), "paces_us": sorted(paces.values())}
    try:
        yield told
        told["pace_after_us"] = pace()
    finally:
        os.sched_setaffinity(0, cores)


async def loads(shape: str, length: int, candidates: int, seconds: float, users: int = 96) -> list[dict[str, Any]]:
    """Callers that ask again as soon as they are answered, for users of their own."""
    rows = []
    async with settled_engine(shape, length, device="40GiB", host="0") as engine:
        phases = Phases(engine)
        draw = np.random.default_rng(0)
        histories = [history_of(draw, length, ITEMS) for _ in range(users)]
        for mix, shares in MIXES.items():
            for callers in CALLERS:
                for _ in range(TRIES):
                    for user, history in enumerate(histories):
                        await engine.pre_infer(f"u{user}", history)
                    with quiet_core() as host:
                        load = await closed_loop(
                            engine, phases, list(histories), mix, shares, callers, candidates, seconds
                        )
                    if host["pace_after_us"] < DISTURBED * host["pace_us"]:
                        break
                rows.append({"shape": shape, "n": length, "m": candidates, **load, **host})
        phases.close()
    return rows


async def closed_loop(
    engine: Engine,
    phases: Phases,
    histories: list[History],
    mix: str,
    shares: dict[str, float],
    callers: int,
    candidates: int,
    seconds: float,
) -> dict[str, Any]:
    """So many callers, each with users of its own: what they saw, and what the loop took."""
    taken: list[float] = []
    paths: Counter[str] = Counter()
    end = 0.0

    async def caller(number: int) -> None:
        draw = np.random.default_rng(number)
        turn = random.Random(number)  # drawn cheaply: callers share the interpreter with the engine
        mine = range(number, len(histories), callers)
        pool = [draw.integers(0, ITEMS, candidates) for _ in range(16)]
        while time.perf_counter() < end:
            index = turn.choice(mine)
            user, items = f"u{index}", turn.choice(pool)
            (kind,) = turn.choices(list(shares), list(shares.values()))
            if kind == "extended":
                histories[index] = grown(draw, histories[index])
                if len(histories[index]) > len(histories[mine[0]]) + 2048:
                    histories[index] = histories[index][: len(histories[index]) - 2048]
            elif kind in ("full", "relay"):
                await engine.evict(user)
            if kind == "relay":
                await engine.pre_infer(user, histories[index])
            began = time.perf_counter()
            ranked = await engine.rank(user, histories[index], items)
            taken.append((time.perf_counter() - began) * 1e3)
            paths[ranked.path] += 1

    async def over_time(seconds: float) -> list[float]:
        """Microseconds of the loop's CPU for a step, in one part of the time after the other."""
        parts = []
        for _ in range(PARTS):
            steps, spent_s = phases.steps, phases.step_s()
            await asyncio.sleep(seconds / PARTS)
            if phases.steps > steps:
                parts.append((phases.step_s() - spent_s) / (phases.steps - steps) * 1e6)
        return parts

    for warm in (True, False):
        lasts_s = 0.3 if warm else seconds
        end = time.perf_counter() + lasts_s
        taken.clear()
        paths.clear()
        phases.clear()
        busy, began = engine.status().device_busy_s, time.perf_counter()
        parts, *_ = await asyncio.gather(over_time(lasts_s), *(caller(number) for number in range(callers)))
    wall = time.perf_counter() - began

    return {
        "mix": mix,
        "callers": callers,
        "requests_per_s": len(taken) / wall,
        "p50_ms": percentile(taken, 50),
        "p99_ms": percentile(taken, 99),
        "ranks_per_step": len(taken) / phases.steps,
        "device_busy": (engine.status().device_busy_s - busy) / wall,
        "loop_us_per_step": phases.per_step(phases.wall_s),
        "loop_cpu_us_per_step": phases.per_step(phases.cpu_s),
        "loop_cpu_us_per_step_over_time": parts,
        "loop_cpu_us_per_rank": phases.per_rank(phases.cpu_s),
        "paths": {path: count / len(taken) for path, count in paths.items()},
    }


def run(commit: str, out: Path, rounds: int, seconds: float, parts: list[str], shapes: list[str]) -> None:
    known = dict.fromkeys(shape for shape, _, _ in CALLS)
    if unknown := set(shapes) - set(known):
        raise SystemExit(f"no shape is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    console = Console(width=150)
    result: dict[str, Any] = {"machine": machine(), "commit": commit}
    sizes = {shape: SHAPES[shape] for shape in shapes}
    result["inputs"] = {"rounds": rounds, "seconds": seconds, "shapes": sizes, "extension": EXTENSION, "mixes": MIXES}

    def save() -> None:
        out.write_text(json.dumps(result, indent=2) + "\n")

    if "checks" in parts:
        result["checks"] = [run_on_uvloop(check(shape, length)) for shape, length in (("d256", 3000), ("d512", 8192))]
        for row in result["checks"]:
            console.print(row)
        save()
    if "calls" in parts:
        result["calls"] = []
        for case in CALLS:
            if case[0] in shapes:
                result["calls"] += run_on_uvloop(calls(*case, rounds))
                save()
        _print(console, f"{torch.cuda.get_device_name()}, bf16, medians of {rounds}", result["calls"])
    if "loads" in parts:
        result["loads"] = []
        for case in LOADS:
            if case[0] in shapes:
                result["loads"] += run_on_uvloop(loads(*case, seconds))
                save()
        _print(console, "closed loops", result["loads"])
    if "appends" in parts:
        chosen = [(shape, cases) for shape, cases in APPENDS.items() if shape in shapes]
        result["appends"] = [row for shape, cases in chosen for row in run_on_uvloop(appends(shape, cases))]
        _print(console, "appends, the least of 4", result["appends"])
        save()
    console.print(f"written to {out}")


def _print(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    headings = dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, dict | list))
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        cells = [row.get(heading, "") for heading in headings]
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells))
    console.print(table)
