"""Where the relay pays and where it does not: simulated with costs measured on an H200, one condition at a time.

Writes results/sensitivity-simulated.json: by condition and value, the highest rate of full, cache and the relay within
the budgets, and their ratios. A simulation: the device and the network are not there.
"""

import multiprocessing
import os
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from common import result_of, write_result
from headline_plan import measured
from relaygr.config import EngineConfig
from relaygr.lab.device import Device
from relaygr.lab.limits import guess_rate
from relaygr.lab.outcome import Budgets
from relaygr.lab.probe import Probe
from relaygr.lab.workload import STAGE_SPREAD, Workload
from relaygr.serving.modes import COMPARED, Mode

WORKERS = len(os.sched_getaffinity(0))
BUDGETS = Budgets(50.0, 200.0)
BASE = Workload(
    1.0, 1.0, "reuse", reuse=0.875, gap_s=5.0, lengths="32768", longest=1 << 24, candidates=512, past_s=16.0,
    retrieval_ms=90.0, pre_processing_ms=30.0, stage_spread=STAGE_SPREAD,
)  # fmt: skip
CONFIG = EngineConfig(device_cache="116GiB", host_cache="84GiB", max_history=140_000)
MEASURED = "d512"
ROW = "refresh-32k"
console = Console(stderr=True)


@dataclass(frozen=True)
class Point:
    """One condition changed, the others as they are in the base."""

    condition: str
    value: str
    workload: Workload
    shape: str = MEASURED


def points() -> list[Point]:
    def varied(condition: str, field: str, values: tuple[Any, ...]) -> list[Point]:
        return [Point(condition, str(value), replace(BASE, **{field: value})) for value in values]

    found = [Point("base", "", BASE)]
    found += varied("reuse", "reuse", (0.0, 0.5, 0.75, 0.95))
    device = device_of(MEASURED)
    for share in (0.25, 0.4, 0.48, 0.52, 0.6):
        length = device.length_for(share * BUDGETS.ranking_ms / 1e3, BASE.candidates)
        found.append(Point("`full` alone, reuse 0", f"{share:.0%}", replace(BASE, reuse=0.0, lengths=str(length))))
    for left in (15.0, 60.0):
        load = replace(BASE, retrieval_ms=0.75 * left, pre_processing_ms=0.25 * left)
        found.append(Point("stages, ms", f"{left:g}", load))
        found.append(Point("stages, ms, reuse 0", f"{left:g}", replace(load, reuse=0.0)))
    for gap_s in (2.0, 20.0, 60.0):  # a past that knows of the visit before
        load = replace(BASE, gap_s=gap_s, past_s=max(BASE.past_s, 3 * gap_s))
        found.append(Point("gap, s", f"{gap_s:g}", load))
    found += varied("lengths", "lengths", ("1024+32768@0.02", "1024+32768@0.1", "1024+32768@0.5"))
    found += varied("skew", "skew", (0.75, 1.5))
    found += varied("candidates", "candidates", (128, 2048))
    return found + [Point("model", shape, BASE, shape) for shape in ("d256", "d1024")]


def device_of(shape: str) -> Device:
    """As it was measured for `d512`, put right by what a rank took there; other shapes in proportion, by what
    pre-inference and ranks of 8,192 behaviours took of each."""
    group, row, plan = measured(ROW)
    device = replace(plan.measured(row, group.candidates), config=CONFIG)
    if shape == MEASURED:
        return device
    costs = device.costs
    append, rank = (times(shape, call) / times(MEASURED, call) for call in ("pre-infer", "rank resident"))
    size = dims()[shape] / dims()[MEASURED]
    scaled = replace(
        costs,
        step=costs.step * rank,
        token=costs.token * append,
        pair=costs.pair * append,
        candidate_pair=costs.candidate_pair * rank,
        page=costs.page * size,
    )
    return Device(scaled, round(device.page_bytes * size), CONFIG)


def times(shape: str, call: str) -> float:
    """Milliseconds on the device, measured."""
    calls = result_of("engine-h200")["calls"]
    (found,) = (one for one in calls if (one["shape"], one["n"], one["call"]) == (shape, 8192, call))
    return float(found["device_ms"])


def dims() -> dict[str, int]:
    shapes = result_of("engine-h200")["inputs"]["shapes"]
    return {name: given["layers"] * given["dim"] for name, given in shapes.items()}


@dataclass(frozen=True)
class Limit:
    """The highest rate of a mode, and the share of long histories that it fails there."""

    rate: float
    long_failed: float | None
    """None where all histories are of one length."""


def highest(point: Point, mode: Mode) -> Limit | None:
    """None where no rate holds."""
    device = device_of(point.shape)

    def at(mode: Mode, rate: float) -> Probe:
        requests = 2000 if mode is Mode.FULL else 500
        load = replace(point.workload, rate=float(f"{rate:.3g}"), seconds=max(requests / rate, 2.0))
        return device.probe(mode, load, BUDGETS, longest)

    quantiles = point.workload.length_quantiles
    shortest, longest = (int(quantiles.points[end][1]) for end in (0, -1))
    returning = point.workload.reuse > 0
    found = guess_rate(device, at, mode, quantiles.mean, point.workload.candidates, returning=returning)
    run = device.run(at(mode, found))
    if not run.holds(BUDGETS):
        return None
    failed = [bool(record.failure) for record in run.records if record.length > longest // 2]
    return Limit(found, sum(failed) / len(failed) if shortest < longest and failed else None)


def main() -> None:
    _, _, plan = measured(ROW)
    inputs = {
        "simulated": True,
        "costs": plan.path.name,
        "budgets_ms": [BUDGETS.ranking_ms, BUDGETS.pipeline_ms],
        "memory": [CONFIG.device_cache, CONFIG.host_cache],
        "base": {
            "reuse": BASE.reuse,
            "gap_s": BASE.gap_s,
            "lengths": int(BASE.lengths),
            "candidates": BASE.candidates,
            "stages_ms": [BASE.retrieval_ms, BASE.pre_processing_ms],
        },
    }
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(max_workers=WORKERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        begun: dict[tuple[Point, Mode], Future[Limit | None]] = {}

        def asked(point: Point, mode: Mode) -> "Future[Limit | None]":
            """Who comes back is nothing to `full`: it is simulated once for all of that."""
            if mode is Mode.FULL:
                load = replace(point.workload, reuse=0.0, gap_s=5.0, skew=0.0)
                point = Point("", "", load, point.shape)
            if (point, mode) not in begun:
                begun[point, mode] = pool.submit(highest, point, mode)
            return begun[point, mode]

        for point, answers in [(point, [asked(point, mode) for mode in COMPARED]) for point in points()]:
            limits = dict(zip(("full", "cache", "relay"), (answer.result() for answer in answers), strict=True))
            rates = {name: None if limit is None else limit.rate for name, limit in limits.items()}
            full, cache, relay = rates.values()
            rows.append(
                {
                    "condition": point.condition,
                    "value": point.value,
                    "rates": rates,
                    "against_full": relay / full if relay and full else None,
                    "against_cache": relay / cache if relay and cache else None,
                    "long_failed": {name: limit.long_failed for name, limit in limits.items() if limit is not None},
                }
            )
            console.print(f"{point.condition} {point.value}: {full} {cache} {relay}/s {time.ctime()}")
            write_result("sensitivity-simulated", inputs, {"rows": rows})


if __name__ == "__main__":
    main()
