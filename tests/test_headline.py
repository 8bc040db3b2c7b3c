"""The headline's file has the rows that others read, and nothing is searched where nothing is left to search."""

import argparse
import asyncio
import json
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest

import headline
from headline_plan import Plan, on_gpu, probe_at
from relaygr.config import EngineConfig
from relaygr.engine.simulated import SimulatedCosts, SimulatedExecutor, SimulatedModel
from relaygr.lab.bench import Bench
from relaygr.lab.device import Device
from relaygr.lab.found import Found, Limit
from relaygr.serving.modes import COMPARED, Mode


def arguments(out: Path, device: str = "cuda") -> argparse.Namespace:
    return argparse.Namespace(out=out, device=device, minutes=1.0, commit="abc", only=None, part=None)


def told(reuse: float) -> dict[str, Any]:
    return {"reuse": reuse, "ranking P99": 9.5, "paths": {"FULL": 1.0}, "within budgets": True}


def test_a_row_has_the_keys_that_others_read_and_null_where_nothing_was_found(tmp_path: Path) -> None:
    group = on_gpu("cuda")[0]
    rows = {row.name: row for row in group.rows}
    device = Device(SimulatedCosts(), 2**21, EngineConfig())
    plan = Plan(
        tmp_path / "plan.json",
        device,
        {"half-10": 17_000},
        {name: dict.fromkeys(Mode, 10.0) for name in rows},
        dict.fromkeys(rows, (17_000, 5.0, 5.5)),
    )
    bench = Bench(SimulatedModel(), group.config, SimulatedExecutor())
    relay, full = Mode.RELAY_HOST_EXTEND, Mode.FULL
    searched = headline.Headline(arguments(tmp_path))
    found = Found({full: Limit(20_480.0), Mode.CACHE: Limit(20_480.0), relay: Limit(81_920.0)}, {relay: told(0.0)})
    searched.write(group, rows["length-10"], plan, found, bench)
    rates = Found({full: Limit(20.0), Mode.CACHE: Limit(None), relay: Limit(90.0)}, {relay: told(0.0)})
    searched.write(group, rows["half-10"], plan, rates, bench)

    table = json.loads((tmp_path / "headline-h200.json").read_text())
    rate, length = table["shapes"]["d512"]
    keys = ["budgets_ms", "n", "reuse", "full_share", "length_ratio", "throughput_ratio", "p99_ms", "paths"]
    assert list(rate) == list(length) == keys
    assert rate["throughput_ratio"] == {"full": 4.5, "cache": None}
    assert rate["length_ratio"] == {"full": None, "cache": None}
    assert rate["budgets_ms"] == [10.0, 200.0]
    assert rate["full_share"] == pytest.approx(0.5)
    assert length["length_ratio"] == {"full": 4.0, "cache": 4.0}
    assert length["n"] == 81_920
    assert table["commit"] == "abc"

    later = headline.Headline(argparse.Namespace(**vars(arguments(tmp_path)) | {"commit": "def"}))
    later.write(group, rows["half-10"], plan, rates, bench)
    for number, (name, commit, other) in enumerate([("length-10", "def", False), ("length-10", "ghi", True)]):
        probe = probe_at(rows[name], group, device, relay, 1024.0, 1024).tried(number)
        later.probes.add(probe, told(0.0), row=name, commit=commit, other=other)
    later.write(group, rows["length-10"], plan, found, bench)
    details = json.loads((tmp_path / "headline-h200.json").read_text())["details"]
    assert {name: detail["commit"] for name, detail in details.items()} == {"half-10": "abc", "length-10": "def"}


@pytest.mark.parametrize(
    ("before", "now", "kept"),
    [
        (None, None, None),
        (None, (2, True), (2, True)),
        ((12, True), None, (12, True)),
        ((12, True), (1, True), (12, True)),
        ((1, True), (12, True), (12, True)),
        ((12, True), (1, False), (1, False)),
        ((1, False), (12, True), (1, False)),
    ],
)
def test_a_comparison_is_not_lost_to_a_smaller_one_nor_a_failure_to_any(before: Any, now: Any, kept: Any) -> None:
    told = [
        None if each is None else dict(zip(("samples", "holds"), each, strict=True)) for each in (before, now, kept)
    ]
    assert headline._checked({"commit": "a", "oracle": told[0]}, told[1], "a") == told[2]
    assert headline._checked({"commit": "b", "oracle": told[0]}, told[1], "a") == told[1]
    assert headline._checked({}, told[1], "a") == told[1]


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    device = Device(SimulatedCosts(), 2**21, EngineConfig())
    plan = Plan(tmp_path / "plan.json", device, {"a": 1}, {"a": {"full": 2.0}}, {"a": (1, 2.0, 3.0)})
    plan.save()
    assert Plan.load(tmp_path / "plan.json") == plan


def test_without_time_nothing_is_opened(tmp_path: Path) -> None:
    searched = headline.Headline(argparse.Namespace(**vars(arguments(tmp_path)) | {"minutes": 0.0}))
    asyncio.run(searched.run())
    assert not list(tmp_path.iterdir())


def test_nobody_simulates_on_while_probes_run(tmp_path: Path) -> None:
    with headline.Headline(arguments(tmp_path)).workers() as pool:
        pool.submit(time.sleep, 600)
        workers = list(pool._processes.values())
    assert workers
    assert len(connection.wait([worker.sentinel for worker in workers], timeout=0)) == len(workers)


def test_what_was_measured_on_a_gpu_is_simulated_elsewhere(tmp_path: Path) -> None:
    chosen = {"part": "guess", "only": ["half-10"], "minutes": 60.0}
    searched = headline.Headline(argparse.Namespace(**vars(arguments(tmp_path)) | chosen))
    with pytest.raises(SystemExit, match="measure first"):
        asyncio.run(searched.run())
    path = tmp_path / "headline-plan-d512.json"
    device = Device(SimulatedCosts(), 2**21, EngineConfig())
    Plan(path, device, {"half-10": 256}, {}, {"half-10": (256, 5.0, 5.5)}).save()
    asyncio.run(searched.run())
    guesses = Plan.load(path).guesses["half-10"]
    assert set(guesses) == {mode.value for mode in COMPARED}
    assert all(rate > 0 for rate in guesses.values())
