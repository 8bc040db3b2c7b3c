"""The demonstration: users who come back with new behaviours, ranked by relay and in full."""

import asyncio
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from relaygr.config import EngineConfig
from relaygr.engine import Engine, Ranked
from relaygr.history import History
from relaygr.model import build_model

__all__ = ["Demo", "DemoResult", "Visit", "run_demo"]

RETRIEVAL_S = 0.15
"""How long the earlier stages of the cascade take here: what pre-inference may hide behind."""


@dataclass(frozen=True)
class Demo:
    """What is run: a small model on the CPU, users with long histories, a few visits each."""

    users: int = 4
    visits: int = 4
    length: int = 2048
    """Behaviours of the first user's history; the others' are a little longer each."""
    new_behaviours: int = 12
    """Behaviours that arrive between two visits."""
    candidates: int = 128
    layers: int = 4
    dim: int = 64
    heads: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Visit:
    """One request, ranked both ways."""

    user: str
    visit: int
    length: int
    signal: str
    """What became of the pre-infer signal, or "–" where none was sent."""
    path: str
    relay_ms: float
    full_ms: float
    difference: float
    """Largest difference between the two ways' scores."""
    allowed: float
    """What rounding allows."""


@dataclass(frozen=True)
class DemoResult:
    demo: Demo
    visits: list[Visit]

    @property
    def speedup(self) -> float:
        """Median time of ranking in full over that by relay."""
        return statistics.median(v.full_ms for v in self.visits) / statistics.median(v.relay_ms for v in self.visits)

    @property
    def paths(self) -> Counter[str]:
        return Counter(visit.path for visit in self.visits)

    @property
    def largest_difference(self) -> float:
        """Over all visits, as a share of what rounding allows."""
        return max(visit.difference / visit.allowed for visit in self.visits)


async def run_demo(demo: Demo, progress: Callable[[int, int], None] = lambda done, total: None) -> DemoResult:
    """Run it. `progress` is called with visits done and visits in all.

    One engine keeps prefixes on the device for about half of the users and for all of them on the host; the other
    starts every rank from nothing. The same model, the same code.
    """
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))  # one core is for the engines' loops
    model = build_model(
        "hstu",
        layers=demo.layers,
        dim=demo.dim,
        heads=demo.heads,
        items=20_000,
        seed=demo.seed,
        scale_length=demo.length,
    )
    draw = np.random.default_rng(demo.seed)
    longest = demo.length + 64 * demo.users + demo.visits * demo.new_behaviours
    page = model.layout.bytes
    room = model.layout.count(longest) + 2
    config = EngineConfig(
        device_cache=str(room * (1 + (demo.users + 1) // 2) * page),
        host_cache=str(room * demo.users * page),
        max_history=longest,
        lease_share=1.0,
        pre_infer_share=1.0,
        lease_s=30.0,
    )
    alone = EngineConfig(device_cache=str(2 * room * page), host_cache="0", max_history=longest)
    histories = {f"user-{i + 1}": _history(draw, demo.length + 64 * i) for i in range(demo.users)}
    visits: list[Visit] = []
    async with Engine(model, config) as relay, Engine(model, alone) as full:
        for visit in range(demo.visits):
            for user in histories:
                if visit:
                    histories[user] = _grown(draw, histories[user], demo.new_behaviours)
                history = histories[user]
                items = draw.integers(0, 20_000, demo.candidates)
                signal, ranked, relay_ms = await _by_relay(relay, visit, user, history, items)
                await full.evict(user)
                began = time.perf_counter()
                whole = await full.rank(user, history, items)
                full_ms = (time.perf_counter() - began) * 1e3
                difference = float(np.abs(ranked.scores - whole.scores).max())
                allowed = 1e-5 * max(1.0, float(np.abs(whole.scores).max()))
                visits.append(
                    Visit(user, visit + 1, len(history), signal, ranked.path, relay_ms, full_ms, difference, allowed)
                )
                progress(len(visits), demo.visits * demo.users)
    return DemoResult(demo, visits)


async def _by_relay(
    engine: Engine, visit: int, user: str, history: History, items: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> tuple[str, Ranked, float]:
    """One request through the cascade: the signal at arrival, the rank when the earlier stages are done.

    On the third visit no signal is sent, as when a request did not look at risk; on the fourth the earlier stages are
    so quick that the rank comes while the prefix is being made.
    """
    signal = "–"
    if visit == 2:
        ranked, ms = await _timed_rank(engine, user, history, items)
        return signal, ranked, ms
    pre_infer = asyncio.create_task(engine.pre_infer(user, history))
    await asyncio.sleep(0.0 if visit == 3 else RETRIEVAL_S)
    ranked, ms = await _timed_rank(engine, user, history, items)
    return await pre_infer, ranked, ms


async def _timed_rank(
    engine: Engine, user: str, history: History, items: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> tuple[Ranked, float]:
    began = time.perf_counter()
    ranked = await engine.rank(user, history, items)
    return ranked, (time.perf_counter() - began) * 1e3


def _history(draw: np.random.Generator, length: int) -> History:
    times = np.cumsum(draw.integers(1, 7200, length)) + 1_700_000_000
    return History(draw.zipf(1.3, length) % 20_000, draw.integers(0, 16, length), times)


def _grown(draw: np.random.Generator, history: History, count: int) -> History:
    times = int(history.timestamps[-1]) + np.cumsum(draw.integers(1, 120, count))
    return history.append(draw.zipf(1.3, count) % 20_000, draw.integers(0, 16, count), times)
