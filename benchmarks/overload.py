"""What becomes of more requests than the device can serve: simulated with an H200's costs of DLRMv3's shape.

Writes results/overload-simulated.json: by rate and mode, requests a second that were answered in time, the share that
was refused at once and the share that was late. A simulation: the device and the network are not there.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import write_result
from headline_plan import measured, probe_at
from relaygr.serving.modes import COMPARED, Mode

ROW = "dlrmv3"
TIMES = (0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
SEEDS = (1, 2)


def limit(mode: Mode) -> float:
    """Where the simulator has seen the mode's limit."""
    _, row, plan = measured(ROW)
    return plan.guesses[row.name][mode]


def one(mode: Mode, times: float, seed: int) -> dict[str, Any]:
    group, row, plan = measured(ROW)
    device = plan.measured(row, group.candidates, mode)
    probe = probe_at(row, group, device, mode, times * limit(mode), plan.n[row.name])
    run = device.run(replace(probe, workload=replace(probe.workload, seed=seed)))
    return {"requests": run.requests, "refused": run.failed["Overloaded"], "late": run.failed["DeadlineExceeded"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a result of another commit: kept beside, for comparison")
    args = parser.parse_args()
    before = None
    if args.before is not None:
        told_before = json.loads(args.before.read_text())
        before = {"commit": told_before["commit"], "rows": told_before["figures"]["rows"]}
    console = Console()
    jobs = [(mode, times, seed) for mode in COMPARED for times in TIMES for seed in SEEDS]
    with ProcessPoolExecutor() as pool:
        asked = [pool.submit(one, *job) for job in jobs]
        told = [each.result() for each in track(asked, "simulations", console=console)]
    table = Table(title="Requests answered in time: DLRMv3's shape, budgets 50 / 200 ms, simulated")
    for heading in ("mode", "of its limit", "requests/s", "answered/s", "refused", "late"):
        table.add_column(heading)
    rows = []
    for mode in COMPARED:
        for times in TIMES:
            of = [result for job, result in zip(jobs, told, strict=True) if job[:2] == (mode, times)]
            whole, refused, late = (sum(each[key] for each in of) for key in ("requests", "refused", "late"))
            rate = times * limit(mode)
            answered = rate * (1 - (refused + late) / whole)
            rows.append(
                {"mode": mode.value, "times": times, "rate": rate, "answered": answered}
                | {"refused": refused / whole, "late": late / whole}
            )
            table.add_row(
                mode.value, f"{times:g}", f"{rate:.0f}", f"{answered:.0f}", f"{refused / whole:.1%}",
                f"{late / whole:.1%}",
            )  # fmt: skip
    console.print(table)
    path = write_result("overload-simulated", {"seeds": list(SEEDS)}, {"rows": rows, "before": before})
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
