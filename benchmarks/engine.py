"""The engine on a CPU: a resident or extended rank against a full one, and what the engine itself costs per rank.

Ratios are taken in one run, the ways interleaved, medians over rounds.
"""

import argparse
import asyncio
import gc
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import RESULTS, history_of, percentile, write_result
from relaygr import Engine, EngineConfig, History, build_model
from relaygr.engine.simulated import SimulatedModel
from relaygr.engine.step import Capacity, Model, PageCopy, Served, Step, StepResult

ITEMS = 10_000
N, M, LAYERS, DIM, HEADS = 4096, 128, 4, 64, 2
ROUNDS = 15
EXTENSION = 16
CACHED_USERS = (1_000, 100_000)
OVERHEAD_RANKS = 1_500
TARGETS = {"resident": 15.0, "extended": 10.0, "overhead_us": 300.0}


class NoDevice:
    """An executor whose work takes no time: what is left is the engine."""

    depth = 1
    host_pages = 0

    def facts(self) -> dict[str, float]:
        return {}

    def open(self, model: Model, config: EngineConfig) -> Capacity:
        return Capacity(config.device_bytes() // 1024, 0, 1024)

    async def prepare(self, model: Model) -> Served:
        return Served(model, model.version(), model.epoch)

    def launch(self, step: Step) -> "asyncio.Future[StepResult]":
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        future.set_result(StepResult([np.zeros((len(row.candidates), 1), np.float32) for row in step.scores], 1e-6))
        return future

    def copy(self, copy: PageCopy) -> "asyncio.Future[float]":
        raise RuntimeError("there is no host tier")

    def close(self) -> None:
        pass


async def ratios() -> dict[str, Any]:
    """Milliseconds of ranks in full, resident and extended, and how often the latter two go into the first."""
    draw = np.random.default_rng(0)
    model = build_model("hstu", layers=LAYERS, dim=DIM, heads=HEADS, items=ITEMS, seed=0)
    times: dict[str, list[float]] = {"full": [], "resident": [], "extended": []}
    async with Engine(model, EngineConfig(device_cache="256MiB", host_cache="0", max_history=2 * N)) as engine:

        async def rank(kind: str, history: History) -> None:
            items = draw.integers(0, ITEMS, M)
            began = time.perf_counter()
            ranked = await engine.rank("user", history, items)
            times[kind].append((time.perf_counter() - began) * 1e3)
            assert ranked.path.lower() == kind, ranked.path

        for turn in track(range(ROUNDS + 2), "ranks"):
            if turn == 2:  # the first two warm up
                times = {kind: [] for kind in times}
            await engine.evict("user")
            history = history_of(draw, N, ITEMS)
            await rank("full", history)
            await rank("resident", history)
            last = int(history.timestamps[-1])
            longer = history.append(draw.integers(0, ITEMS, EXTENSION), [1] * EXTENSION, [last] * EXTENSION)
            await rank("extended", longer)
    medians = {kind: statistics.median(taken) for kind, taken in times.items()}
    return {
        "median_ms": medians,
        "resident_ratio": medians["full"] / medians["resident"],
        "extended_ratio": medians["full"] / medians["extended"],
    }


async def overhead(cached: int) -> dict[str, float]:
    """Microseconds of one rank that are not the device's, with this many users cached."""
    draw = np.random.default_rng(1)
    config = EngineConfig(device_cache=f"{(cached + 200) * 1024}B", host_cache="0", max_history=N)
    items = draw.integers(0, ITEMS, M)
    async with Engine(SimulatedModel(), config, executor=NoDevice()) as engine:
        short = history_of(draw, 100, ITEMS)
        for user in track(range(cached), f"{cached:,} users"):
            await engine.rank(f"user {user}", short, items)
        columns = [(h.items, h.actions, h.timestamps) for h in (history_of(draw, N, ITEMS) for _ in range(8))]
        for index, parts in enumerate(columns):
            await engine.rank(f"long {index}", History(*parts), items)
        gc.collect()
        taken = []
        for turn in range(OVERHEAD_RANKS):
            history = History(*columns[turn % len(columns)])  # fresh: its digests are part of the cost
            began = time.perf_counter()
            ranked = await engine.rank(f"long {turn % len(columns)}", history, items, deadline=engine.clock.now() + 1)
            taken.append((time.perf_counter() - began) * 1e6)
            assert ranked.path == "RESIDENT"
    return {"p50_us": statistics.median(taken), "p99_us": percentile(taken, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda writes results/engine-h200.json")
    parser.add_argument("--commit", default="unknown", help="cuda: what is being measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS / "engine-h200.json", help="cuda: where to write")
    parser.add_argument("--rounds", type=int, default=30, help="cuda: calls of each kind")
    parser.add_argument("--seconds", type=float, default=1.0, help="cuda: how long each load lasts")
    parser.add_argument("--only", default="checks,calls,loads", help="cuda: which parts to run; appends, too, is one")
    parser.add_argument("--shapes", default="d256,d512,d1024,dlrmv3", help="cuda: of calls and loads")
    options = parser.parse_args()
    if options.device == "cuda":
        import engine_gpu

        parts, shapes = options.only.split(","), options.shapes.split(",")
        engine_gpu.run(options.commit, options.out, options.rounds, options.seconds, parts, shapes)
    else:
        on_a_cpu()


def on_a_cpu() -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))  # one core is the loop's: with all of them both are slower
    found = asyncio.run(ratios())
    costs = {str(cached): asyncio.run(overhead(cached)) for cached in CACHED_USERS}
    console = Console()
    table = Table(
        title=f"n = {N}, m = {M}, {LAYERS} layers, d {DIM}, {HEADS} heads, float32, {torch.get_num_threads()} threads"
    )
    for heading in ("what", "measured", "target", "reached"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    rows = []
    for kind in ("resident", "extended"):
        ratio, target = found[f"{kind}_ratio"], TARGETS[kind]
        rows.append({"what": f"{kind} against full", "measured": ratio, "target": target, "reached": ratio >= target})
        shown = f"{ratio:.1f}× ({found['median_ms'][kind]:.2f} of {found['median_ms']['full']:.1f} ms)"
        table.add_row(f"rank {kind} against full", shown, f"≥ {target:.0f}×", "yes" if ratio >= target else "no")
    for users, cost in costs.items():
        target = TARGETS["overhead_us"]
        reached = cost["p50_us"] <= target
        rows.append(
            {
                "what": f"engine per rank, {users} users",
                "measured": cost["p50_us"],
                "target": target,
                "reached": reached,
            }
        )
        shown = f"{cost['p50_us']:.0f} µs (p99 {cost['p99_us']:.0f})"
        table.add_row(
            f"engine per rank, {int(users):,} cached users", shown, f"< {target:.0f} µs", "yes" if reached else "no"
        )
    console.print(table)
    inputs: dict[str, Any] = {
        "n": N,
        "m": M,
        "layers": LAYERS,
        "dim": DIM,
        "heads": HEADS,
        "extension": EXTENSION,
        "rounds": ROUNDS,
    }
    inputs |= {"threads": torch.get_num_threads(), "cached_users": list(CACHED_USERS), "overhead_ranks": OVERHEAD_RANKS}
    path = write_result("engine-cpu", inputs, {"targets": rows, **found, "overhead": costs})
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
