"""Callers that ask an engine again as soon as they are answered."""

import asyncio
import random
import time
from collections import Counter
from typing import Any

import numpy as np

from common import percentile
from phases import Phases
from relaygr import Engine, History
from relaygr.lab.shapes import ITEMS

__all__ = ["EXTENSION", "closed_loop", "grown"]

EXTENSION = 16
"""New behaviours of a user who comes back."""
PARTS = 5
"""Of the time of a load, told apart: hosts that are shared have slow seconds."""
WARM_S = 0.3
APART = 0.5
"""As many times as long the load goes on, for phases that are timed apart."""


def grown(draw: np.random.Generator, history: History) -> History:
    last = int(history.timestamps[-1])
    return history.append(draw.integers(0, ITEMS, EXTENSION), [1] * EXTENSION, [last] * EXTENSION)


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

    async def load(lasts_s: float) -> tuple[list[float], float]:
        """What the loop took over time, and how long all lasted."""
        nonlocal end
        end = (began := time.perf_counter()) + lasts_s
        taken.clear()
        paths.clear()
        phases.clear()
        parts = asyncio.create_task(over_time(lasts_s))
        await asyncio.gather(*(caller(number) for number in range(callers)))
        return await parts, time.perf_counter() - began

    phases.apart = False
    await load(WARM_S)
    busy = engine.status().device_busy_s
    parts, wall = await load(seconds)
    figures = {
        "mix": mix,
        "callers": callers,
        "requests_per_s": len(taken) / wall,
        "p50_ms": percentile(taken, 50),
        "p99_ms": percentile(taken, 99),
        "ranks_per_step": len(taken) / phases.steps,
        "device_busy": (engine.status().device_busy_s - busy) / wall,
        "loop_cpu_us_per_step_over_time": parts,
        "loop_cpu_us_per_rank": phases.per_rank(phases.cpu_s),
        "paths": {path: count / len(taken) for path, count in paths.items()},
    }
    whole = {name: sum(phases.per_step(of).values()) for name, of in (("wall", phases.wall_s), ("cpu", phases.cpu_s))}
    phases.apart = True
    await load(APART * seconds)
    return figures | {
        "loop_us_per_step": phases.per_step(phases.wall_s) | {"all": whole["wall"]},
        "loop_cpu_us_per_step": phases.per_step(phases.cpu_s) | {"all": whole["cpu"]},
    }
