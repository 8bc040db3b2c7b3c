"""What serving takes of the CPU beside the device: the engine's loop, and whoever calls it, for each request.

The DLRMv3 shape of the headline, on a device that takes as long as an H200 was measured to, in virtual time: every run
of a rate does exactly the same, so two versions of the code that are to do the same can be compared by their answers
(`same`), and by the time of the least disturbed run. A GPU's driver is not there, nor are clocks that tick.

    python benchmarks/loop.py                   all rates, a table, results/loop-simulated.json
    python benchmarks/loop.py --profile relay   where the time goes, at the relay's rate
"""

import argparse
import cProfile
import hashlib
import pstats
import time
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import write_result
from headline_plan import measured, probe_at
from relaygr.lab.outcome import Run
from relaygr.lab.probe import Probe
from relaygr.serving.modes import Mode

ROW = "dlrmv3"
RATES = {
    "full": (Mode.FULL, 300.0),
    "cache": (Mode.CACHE, 440.0),
    "relay": (Mode.RELAY_HOST_EXTEND, 480.0),
    "overload": (Mode.RELAY_HOST_EXTEND, 530.0),
}
SECONDS = 8.0


class Repeated:
    """One probe, served again and again."""

    def __init__(self, mode: Mode, rate: float) -> None:
        group, row, plan = measured(ROW)
        self.device = plan.measured(row, group.candidates, mode)
        probe = probe_at(row, group, self.device, mode, rate, plan.n[ROW])
        self.probe: Probe = replace(probe, workload=replace(probe.workload, seconds=SECONDS))
        at = self.probe.trace().at
        self.earlier, self.requests = int((at < 0).sum()), int((at >= 0).sum())

    def once(self, profile: cProfile.Profile | None = None) -> tuple[float, Run]:
        """Seconds of CPU from the first request that counts, and what became of them."""
        began = 0.0

        def progress(sent: int, of: int) -> None:
            nonlocal began
            if sent == self.earlier + 1:
                began = time.thread_time()
                if profile is not None:
                    profile.enable()

        try:
            run = self.device.run(self.probe, progress)
        finally:
            if profile is not None:
                profile.disable()
        return time.thread_time() - began, run


def told(run: Run) -> str:
    """All that became of the requests, in a few letters."""
    answers = "\n".join(map(repr, run.records))
    return hashlib.blake2b(answers.encode(), digest_size=4).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each rate, of which the fastest is told")
    parser.add_argument("--only", choices=RATES, help="this one alone; nothing is written")
    parser.add_argument("--profile", choices=RATES, help="tell where the time goes instead")
    args = parser.parse_args()
    if args.profile:
        profile = cProfile.Profile(time.thread_time)
        Repeated(*RATES[args.profile]).once(profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(60)
        return
    console = Console()
    names = [args.only] if args.only else list(RATES)
    repeated = {name: Repeated(*RATES[name]) for name in names}
    runs: dict[str, list[tuple[float, Run]]] = {name: [] for name in names}
    for _ in track(range(args.repeats), "rounds", console=console):
        for name in names:  # one after the other, so that noise hits all alike
            runs[name].append(repeated[name].once())
    rows: dict[str, dict[str, Any]] = {}
    for name, of in runs.items():
        seconds, run = min(of, key=lambda each: each[0])
        results = run.told(repeated[name].probe.budgets)
        rows[name] = {
            "mode": str(repeated[name].probe.mode),
            "rate": RATES[name][1],
            "requests": repeated[name].requests,
            "cpu_us_per_request": seconds / repeated[name].requests * 1e6,
            "within_budgets": results["within budgets"],
            "ranking_p99_ms": results["ranking P99"],
            "device_busy": run.device_busy,
            "same": sorted({told(run) for _, run in of}),
        }
    table = Table(title="CPU beside the device: DLRMv3's shape, in virtual time")
    for heading in ("", "requests/s", "CPU per request, µs", "ranking P99, ms", "device busy", "same"):
        table.add_column(heading)
    for name, row in rows.items():
        table.add_row(
            name, f"{row['rate']:g}", f"{row['cpu_us_per_request']:.0f}", f"{row['ranking_p99_ms']:.1f}",
            f"{row['device_busy']:.0%}", " ".join(row["same"]),
        )  # fmt: skip
    console.print(table)
    if not args.only:
        inputs = {"row": ROW, "seconds": SECONDS, "repeats": args.repeats}
        write_result("loop-simulated", inputs, {"rows": rows})


if __name__ == "__main__":
    main()
