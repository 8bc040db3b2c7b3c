"""The engine on a GPU through its public calls: pre-infer, and ranks resident, extended, reloaded and in full.

Checks first: scores by relay against scores in full, in bf16, within what bf16 itself costs against fp32.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import machine
from relaygr import Engine, EngineConfig, History, build_model

SHAPES: dict[str, dict[str, Any]] = {
    "d256": {"layers": 8, "dim": 256, "heads": 4},
    "d512": {"layers": 8, "dim": 512, "heads": 4},
    "d1024": {"layers": 8, "dim": 1024, "heads": 8},
    "dlrmv3": {"layers": 5, "dim": 512, "heads": 4},
}
EXTENSION = 16


def history_of(draw: np.random.Generator, length: int) -> History:
    return History(draw.integers(0, 100_000, length), draw.integers(0, 16, length), np.arange(length) * 60)


async def check(shape: str, length: int) -> dict[str, Any]:
    """Largest differences of scores: relay against full in bf16, and full in bf16 against full in fp32."""
    draw = np.random.default_rng(1)
    model = build_model("hstu", **SHAPES[shape], items=100_000, seed=1, scale_length=float(length))
    history, items = history_of(draw, length), draw.integers(0, 100_000, 512)
    found = {}
    for dtype in ("float32", "bfloat16"):
        config = EngineConfig(
            device="cuda", dtype=dtype, device_cache="8GiB", host_cache="4GiB", max_history=length + 64
        )
        async with Engine(model, config) as engine:
            found[dtype] = (await engine.rank("full", history, items)).scores
            if dtype == "bfloat16":
                await engine.pre_infer("relay", history[: length - EXTENSION])
                relay = await engine.rank("relay", history, items)
                found["relay"], path = relay.scores, relay.path
    return {
        "shape": shape,
        "n": length,
        "path": path,
        "relay_against_full": float(np.abs(found["relay"] - found["bfloat16"]).max()),
        "bf16_against_fp32": float(np.abs(found["bfloat16"] - found["float32"]).max()),
    }


async def measure(shape: str, length: int, candidates: int, rounds: int) -> list[dict[str, Any]]:
    """Median milliseconds of each call, one at a time, from the caller's side and on the device."""
    draw = np.random.default_rng(0)
    model = build_model("hstu", **SHAPES[shape], items=100_000, seed=0, scale_length=float(length))
    config = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        device_cache="16GiB",
        host_cache="8GiB",
        max_history=length + 4096,
        step_ms=1000.0,
        pre_infer_share=1.0,
    )
    times: dict[str, list[float]] = {}
    device: dict[str, list[float]] = {}
    async with Engine(model, config) as engine:

        async def timed(kind: str, call: Any) -> Any:
            before = engine.status().device_busy_s
            began = time.perf_counter()
            result = await call
            times.setdefault(kind, []).append((time.perf_counter() - began) * 1e3)
            device.setdefault(kind, []).append((engine.status().device_busy_s - before) * 1e3)
            return result

        for turn in track(range(rounds + 2), f"{shape} n={length}"):
            if turn == 2:
                times.clear()
                device.clear()
            history, items = history_of(draw, length), draw.integers(0, 100_000, candidates)
            await engine.evict("a")
            await engine.evict("b")
            await timed("pre-infer", engine.pre_infer("a", history))
            resident = await timed("rank resident", engine.rank("a", history, items))
            last = int(history.timestamps[-1])
            longer = history.append(draw.integers(0, 100_000, EXTENSION), [1] * EXTENSION, [last] * EXTENSION)
            extended = await timed("rank extended", engine.rank("a", longer, items))
            full = await timed("rank full", engine.rank("b", history, items))
            paths = [str(ranked.path) for ranked in (resident, extended, full)]
            if turn >= 2:  # the first two compile and warm up
                assert paths == ["RESIDENT", "EXTENDED", "FULL"], paths
    rows = []
    for kind, taken in times.items():
        busy = statistics.median(device[kind])
        rows.append(
            {
                "shape": shape,
                "n": length,
                "m": candidates,
                "call": kind,
                "ms": statistics.median(taken),
                "device_ms": busy,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True, help="what is being measured")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "engine-h200.json")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    checks = [asyncio.run(check(shape, length)) for shape, length in (("d256", 3000), ("d512", 8192))]
    rows = []
    for shape, length, candidates in (
        ("d256", 8192, 512),
        ("d512", 8192, 512),
        ("d512", 32768, 512),
        ("d1024", 8192, 512),
        ("dlrmv3", 14335, 2048),
    ):
        rows += asyncio.run(measure(shape, length, candidates, options.rounds))
    console = Console(width=110)
    table = Table(title=f"{torch.cuda.get_device_name()}, bf16, medians of {options.rounds}")
    for heading in ("shape", "n", "m", "call", "ms", "on the device"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            row["shape"], str(row["n"]), str(row["m"]), row["call"], f"{row['ms']:.2f}", f"{row['device_ms']:.2f}"
        )
    console.print(table)
    for row in checks:
        console.print(row)
    result = {
        "machine": machine(),
        "commit": options.commit,
        "inputs": {"rounds": options.rounds},
        "checks": checks,
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
