"""What a signal must save to be worth sending: simulated where ranks are many and short, with an H200's costs.

Writes results/trigger-simulated.json: by rate, for some `min_gain_ms`, for a signal to everybody and for none, how many
of a few runs held within the budgets, ranking's P99, and the share of requests that got a signal. A simulation: the
device and the network are not there.
"""

import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import write_result
from headline_plan import measured, probe_at
from relaygr.lab.outcome import Budgets
from relaygr.lab.tuning import Tuning
from relaygr.relay import TriggerConfig
from relaygr.serving.modes import Mode

ROW = "dlrmv3"
RATES = (430.0, 482.0, 540.0)
GAINS = (2.0, 1.0, 0.5, 0.2)
SEEDS = range(10, 14)
Way = tuple[str, Mode, float]
WAYS: tuple[Way, ...] = (
    *((f"saves {gain:g} ms", Mode.RELAY_HOST_EXTEND, gain) for gain in GAINS),
    ("always", Mode.ALWAYS_TRIGGER, 0.0),
    ("never", Mode.CACHE, 0.0),
)


@dataclass(frozen=True)
class Gaining(Tuning):
    """With another `min_gain_ms` than the default."""

    min_gain_ms: float = 0.0

    def trigger(self, budgets: Budgets) -> TriggerConfig:
        return replace(super().trigger(budgets), min_gain_ms=self.min_gain_ms)


def one(way: Way, rate: float, seed: int) -> dict[str, Any]:
    _, mode, gain = way
    group, row, plan = measured(ROW)
    probe = probe_at(row, group, plan.device, mode, rate, plan.n[row.name])
    tuning = Gaining(**asdict(probe.tuning), min_gain_ms=gain)
    probe = replace(probe, tuning=tuning).at(rate=rate, requests=500)
    return plan.device.simulate(replace(probe, workload=replace(probe.workload, seed=seed)))


def main() -> None:
    console = Console()
    jobs = [(way, rate, seed) for rate in RATES for way in WAYS for seed in SEEDS]
    with ProcessPoolExecutor() as pool:
        asked = [pool.submit(one, *job) for job in jobs]
        told = [each.result() for each in track(asked, "simulations", console=console)]
    rows = []
    for rate in RATES:
        for way in WAYS:
            of = [result for job, result in zip(jobs, told, strict=True) if job[:2] == (way, rate)]
            rows.append(
                {
                    "rate": rate,
                    "signal": way[0],
                    "held": sum(result["within budgets"] for result in of),
                    "runs": len(of),
                    "ranking_p99_ms": sorted(result["ranking P99"] for result in of),
                    "signalled": statistics.mean(result["decisions"].get("ADMIT", 0.0) for result in of),
                }
            )
    table = Table(title="A signal where it saves so much: DLRMv3's shape, budgets 50 / 200 ms, simulated")
    for heading in ("requests/s", "signal", "held", "ranking P99, ms", "signalled"):
        table.add_column(heading)
    for each in rows:
        p99 = each["ranking_p99_ms"]
        table.add_row(
            f"{each['rate']:g}", each["signal"], f"{each['held']} of {each['runs']}", f"{p99[0]:.0f} – {p99[-1]:.0f}",
            f"{each['signalled']:.0%}",
        )  # fmt: skip
    console.print(table)
    group, row, plan = measured(ROW)
    n, costs = plan.n[row.name], plan.device.costs
    saves_ms = 1e3 * (costs.token * n + costs.pair * n * (n + 1) / 2)
    inputs = {"n": n, "candidates": group.candidates, "prefix_saves_ms": saves_ms, "costs": asdict(costs)}
    write_result("trigger-simulated", inputs, {"rows": rows})


if __name__ == "__main__":
    main()
