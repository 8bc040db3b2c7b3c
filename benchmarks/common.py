"""What benchmarks share: random histories, timing calls, describing the machine, and writing what was measured."""

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relaygr.history import History
from relaygr.lab.estimates import percentile
from relaygr.lab.machine import machine

__all__ = ["RESULTS", "commit", "history_of", "machine", "percentile", "result_of", "time_calls", "write_result"]

RESULTS = Path(__file__).parent / "results"


def history_of(draw: np.random.Generator, length: int, items: int) -> History:
    """Of random items and actions, a minute apart."""
    return History(draw.integers(0, items, length), draw.integers(0, 16, length), np.arange(length) * 60)


def time_calls(call: Callable[[int], object], runs: int, *, warm: int = 20) -> list[float]:
    """Milliseconds of each of `runs` calls, in order; each gets its number. The first `warm` are not counted."""
    times = []
    for run in range(-warm, runs):
        begin = time.perf_counter_ns()
        call(run)
        times.append((time.perf_counter_ns() - begin) / 1e6)
    return times[warm:]


def result_of(name: str) -> Any:
    """What a benchmark wrote to results/<name>.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def write_result(name: str, inputs: Mapping[str, Any], figures: Mapping[str, Any]) -> Path:
    """Writes results/<name>.json: the machine, the commit, what went in and what came out."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    told = {
        "name": name,
        "machine": machine(),
        "commit": commit(),
        "inputs": dict(inputs),
        "figures": dict(figures),
    }
    path.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n")
    return path


def commit() -> str | None:
    """The commit measured, with "+" where the code differs from it; None outside a repository."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "../src", ".", ":!results")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
