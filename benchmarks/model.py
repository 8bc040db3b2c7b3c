"""How fast models run on a CPU, and what a resident prefix saves: `python benchmarks/model.py`."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import percentile, time_calls, write_result
from relaygr.history import History
from relaygr.model import AppendBatch, AppendRow, Candidates, RankingModel, ScoreBatch, ScoreRow, build_model
from relaygr.model.config import Family

BEHAVIOURS, CANDIDATES, LAYERS, DIM = 4096, 128, 4, 64
CHUNKS = (512, 1024, 2048)
THREADS = (1, 2)
SHAPES: tuple[tuple[Family, int], ...] = (("hstu", 2), ("hstu", 4), ("softmax", 2), ("softmax", 4))
ROUNDS = 3
"""Rounds over all measurements: a machine that others use is slow for a while, not for one measurement."""


def calls(model: RankingModel) -> dict[str, Callable[[int], object]]:
    """What is measured: the whole history in chunks, and the candidates against it. Pages lie anywhere."""
    rng = np.random.default_rng(0)
    count = model.layout.count(BEHAVIOURS)
    pages = model.layout.allocate(count + 8).zero_()
    owned = rng.permutation(count + 8)[:count].tolist()
    none = np.empty(0, np.int64)
    history = History(
        rng.integers(0, 10**9, BEHAVIOURS),
        rng.integers(0, 16, BEHAVIOURS),
        np.cumsum(rng.integers(0, 3600, BEHAVIOURS)),
    )
    candidates = Candidates(rng.integers(0, 10**9, CANDIDATES))

    def append(chunk: int) -> None:
        for low in range(0, BEHAVIOURS, chunk):
            row = AppendRow(history, none, low, low + chunk, owned)
            model.append(AppendBatch.pack(model.config, [row]), pages)

    def score() -> None:
        row = ScoreRow(candidates, None, BEHAVIOURS, BEHAVIOURS, owned)
        model.score(ScoreBatch.pack(model.config, [row]), pages)

    measured: dict[str, Callable[[int], object]] = {
        f"append by {chunk}": lambda _, chunk=chunk: append(chunk)  # type: ignore[misc]
        for chunk in CHUNKS
    }
    return {**measured, "score": lambda _: score()}


def measure() -> list[dict[str, Any]]:
    cases = [
        (threads, family, heads, calls(build_model(family, layers=LAYERS, dim=DIM, heads=heads, items=10_000, seed=0)))
        for threads in THREADS
        for family, heads in SHAPES
    ]
    times: dict[tuple[int, str], list[float]] = {}
    for _ in track(range(ROUNDS), "measuring", console=Console(stderr=True)):
        for case, (threads, _, _, measured) in enumerate(cases):
            torch.set_num_threads(threads)
            for name, call in measured.items():
                times.setdefault((case, name), []).extend(time_calls(call, 5 if name == "score" else 1, warm=1))
    return [
        {"family": family, "heads": heads, "threads": threads}
        | {f"{name} ms": round(percentile(times[case, name], 50), 2) for name in measured}
        | {f"{name} best ms": round(min(times[case, name]), 2) for name in measured}
        for case, (threads, family, heads, measured) in enumerate(cases)
    ]


def ratio(row: dict[str, Any]) -> float:
    """How many times faster a rank is when its prefix is resident, against the fastest way to append all of it."""
    append = min(row[f"append by {chunk} best ms"] for chunk in CHUNKS)
    return float(append / row["score best ms"] + 1)


def main() -> None:
    rows = measure()
    for row in rows:
        row["resident is faster by"] = round(ratio(row), 1)
    names = ["append by 512", "append by 1024", "append by 2048", "score"]
    table = Table(
        "family", "heads", "threads", *(f"{name}, ms" for name in names), "resident is faster by",
        title=f"{BEHAVIOURS} behaviours, {CANDIDATES} candidates, {LAYERS} layers, dim {DIM}; best of {ROUNDS} rounds",
    )  # fmt: skip
    for row in rows:
        figures = [f"{row[f'{name} best ms']:.1f}" for name in names]
        ends = row["family"], str(row["heads"]), str(row["threads"])
        table.add_row(*ends, *figures, f"{row['resident is faster by']:.1f}×")
    Console().print(table)
    inputs = {
        "behaviours": BEHAVIOURS,
        "candidates": CANDIDATES,
        "layers": LAYERS,
        "dim": DIM,
        "dtype": "float32",
        "rounds": ROUNDS,
    }
    path = write_result("model-cpu", inputs, {"rows": rows})
    print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
