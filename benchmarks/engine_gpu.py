"""The engine on a GPU through its public calls. Run it as `engine.py --device cuda`.

checks   scores by every path against scores in full, in bf16, and what bf16 itself costs against fp32
calls    one at a time: pre-infer, and ranks resident, reloaded, extended and in full
loads    closed loops of so many callers: requests a second, latencies, and the loop's own time for each step
appends  steps of so many new tokens behind so many cached ones, on the device; only when asked for
"""

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from uvloop import run as run_on_uvloop

from closed_loop import EXTENSION, closed_loop, grown
from common import history_of, machine, percentile
from phases import Phases
from quiet_core import quiet_core
from relaygr import Engine, EngineConfig, Ranked
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
LINK_GB_S = 55.0
TARGETS = {  # milliseconds on the device
    ("d512", 8192, "rank resident"): 0.30,
    ("d512", 32768, "rank resident"): 0.75,
    ("d512", 8192, "pre-infer"): 1.6,
    ("d512", 32768, "pre-infer"): 16.0,
}


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


DISTURBED = 1.3
"""How many times slower the core may be when a load ends; else it is run again."""
TRIES = 3


async def loads(shape: str, length: int, candidates: int, seconds: float, users: int = 96) -> list[dict[str, Any]]:
    """Callers that ask again as soon as they are answered, for users of their own."""
    rows = []
    async with settled_engine(shape, length, device="40GiB", host="0") as engine:
        phases = Phases(engine)
        draw = np.random.default_rng(0)
        histories = [history_of(draw, length, ITEMS) for _ in range(users)]
        for mix, shares in MIXES.items():
            for callers in CALLERS:
                for tries in range(1, TRIES + 1):
                    for user, history in enumerate(histories):
                        await engine.pre_infer(f"u{user}", history)
                    with quiet_core() as host:
                        load = await closed_loop(
                            engine, phases, list(histories), mix, shares, callers, candidates, seconds
                        )
                    row = {"shape": shape, "n": length, "m": candidates, **load, **host, "tries": tries}
                    if host["pace_after_us"] < DISTURBED * host["pace_us"]:
                        break
                rows.append(row)
        phases.close()
    return rows


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
