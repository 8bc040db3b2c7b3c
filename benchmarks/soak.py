"""A long run with seeded faults against real servers; writes results/soak.json, fails where anything is left behind."""

import argparse
import asyncio
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.progress import Progress

from common import write_result
from relaygr.lab.soak import HELD, Soak, cost_model_error, soak

OVERRUN_MS, MEMORY_MIB, DESCRIPTORS, COST_ERROR = 20.0, 64.0, 16, 0.15
CPU_REQUESTS = 1000
"""To an instance on the CPU, for what its cost model is worth: a simulated device takes what it is said to take."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=Soak.requests)
    parser.add_argument("--seed", type=int, default=Soak.seed)
    given = parser.parse_args()
    wanted = Soak(requests=given.requests, seed=given.seed)
    with tempfile.TemporaryDirectory() as folder, Progress() as bar:
        task = bar.add_task("soaking", total=wanted.requests)
        told = asyncio.run(soak(wanted, Path(folder), lambda done: bar.update(task, completed=done)))
        told["cost_model_error_cpu"] = round(asyncio.run(cost_model_error(Path(folder), CPU_REQUESTS)), 4)
    grown = told["grown"]
    told["holds"] = {
        "only documented answers": not told["unexpected"] and not told["unanswered"],
        "scores are right": not told["scores"]["wrong"] and told["scores"]["looked_at"] > 0,
        "nothing is left": all(grown[name] <= 0 for name in HELD),
        f"descriptors grew by {DESCRIPTORS} at most": grown["descriptors"] <= DESCRIPTORS,
        f"the cost model is off by {COST_ERROR:.0%} at most at the median": max(
            told["cost_model_error"], told["cost_model_error_cpu"]
        )
        <= COST_ERROR,
        f"memory grew by {MEMORY_MIB:g} MiB at most": grown["memory_mib"] <= MEMORY_MIB,
        f"deadlines are overrun by {OVERRUN_MS:g} ms at most at P99": told["deadline_overrun_p99_ms"] <= OVERRUN_MS,
    }
    path = write_result("soak", asdict(wanted), told)
    for what, holds in told["holds"].items():
        print(f"{'yes' if holds else 'NO ':3} {what}")
    print(f"{told['answers']}, {told['requests_per_second']} requests/s; {path}")
    sys.exit(0 if all(told["holds"].values()) else 1)


if __name__ == "__main__":
    main()
