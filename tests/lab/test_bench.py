"""Probes on a device that stays open: one mode after the other, real scores, nothing left from one to the next."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relaygr.config import EngineConfig
from relaygr.engine import Engine
from relaygr.engine.simulated import SimulatedCosts, SimulatedExecutor, SimulatedModel
from relaygr.errors import InvalidInput
from relaygr.history.quantiles import Quantiles
from relaygr.lab.bench import Bench
from relaygr.lab.device import Device
from relaygr.lab.outcome import Budgets, Run
from relaygr.lab.probe import Probe
from relaygr.lab.probe_file import ProbeFile, Start
from relaygr.lab.recorded import Recorded
from relaygr.lab.records import Record, load_records, save_records
from relaygr.lab.standing import StandingExecutor
from relaygr.lab.tuning import Tuning
from relaygr.lab.workload import Workload
from relaygr.model import build_model
from relaygr.serving.modes import Mode

BUDGETS = Budgets(20_000.0, 30_000.0)
"""Nothing is late on any machine."""
WORKLOAD = Workload(
    40.0,
    0.5,
    "reuse",
    reuse=0.5,
    gap_s=0.2,
    lengths="300",
    candidates=8,
    retrieval_ms=20,
    pre_processing_ms=5,
    past_s=1.5,
)
CONFIG = EngineConfig(device_cache="8MiB", host_cache="4MiB", max_history=1024)


def probe(mode: Mode, *, seed: int = 0) -> Probe:
    return Probe(mode, replace(WORKLOAD, seed=seed), BUDGETS, replace(Tuning.of(BUDGETS, mode), target_ms=1e-3))


def test_each_mode_serves_the_same_requests_with_the_scores_of_full_inference() -> None:
    model = build_model("hstu", layers=1, dim=16, heads=2, items=500, seed=0)

    async def main() -> None:
        async with Bench(model, CONFIG) as bench:
            runs: dict[Mode, Run] = {}
            for mode in (Mode.FULL, Mode.CACHE, Mode.RELAY_HOST_EXTEND, Mode.ALWAYS_TRIGGER, Mode.FULL):
                runs[mode] = await bench.run(probe(mode), sampled=4)
                told = bench.check()
                assert told["samples"] >= 3
                assert told["holds"], told
        assert len({run.requests for run in runs.values()}) == 1
        assert set(runs[Mode.FULL].paths) == {"FULL"}
        assert runs[Mode.FULL].reused == 0.0
        assert runs[Mode.CACHE].reused > 0.2
        assert runs[Mode.ALWAYS_TRIGGER].decisions["NOT_AT_RISK"] == 0
        assert all(run.holds(BUDGETS) for run in runs.values())

    asyncio.run(main())


def test_a_wrong_score_is_found() -> None:
    model = build_model("hstu", layers=1, dim=16, heads=2, items=500, seed=0)

    async def main() -> None:
        async with Bench(model, CONFIG) as bench:
            await bench.run(probe(Mode.FULL), sampled=4)
            sample = bench.samples[0]
            bench.samples[0] = replace(sample, scores=sample.scores + np.float32(1e-3))
            assert not bench.check()["holds"]

    asyncio.run(main())


def test_costs_are_measured_and_simulated_from() -> None:
    async def main() -> Device:
        costs = SimulatedCosts(step=1e-4, token=1e-7, pair=0.0, candidate=1e-7, candidate_pair=0.0)
        executor = SimulatedExecutor(costs, page_bytes=2**14, contents=False)
        async with Bench(SimulatedModel(), CONFIG, executor) as bench:
            device = await bench.measure()
            assert device.costs.step == pytest.approx(costs.step, rel=0.01)
            assert device.full_s(device.length_for(3e-4, 8), 8) == pytest.approx(3e-4, rel=0.01)
            assert device.slower(2.0).full_s(100, 8) == pytest.approx(2 * device.full_s(100, 8))
            with pytest.raises(InvalidInput, match="max_history"):
                await bench.run(probe(Mode.FULL).at(length=5000))
            return device

    assert asyncio.run(main()).simulate(probe(Mode.FULL))["within budgets"]


def test_one_engine_at_a_time_stands_on_a_device() -> None:
    model = SimulatedModel()

    async def main() -> None:
        async with StandingExecutor(SimulatedExecutor(page_bytes=2**14), model, CONFIG) as standing:
            async with Engine(model, CONFIG, executor=standing):
                with pytest.raises(RuntimeError, match="another engine"):
                    await Engine(model, CONFIG, executor=standing).__aenter__()
            async with Engine(model, replace(CONFIG, host_cache="0"), executor=standing) as engine:
                assert engine.status().host_pages == 0
            with pytest.raises(RuntimeError, match="another model"):
                await Engine(SimulatedModel("other"), CONFIG, executor=standing).__aenter__()

    asyncio.run(main())


def test_probes_are_kept_by_what_they_are(tmp_path: Path) -> None:
    file = ProbeFile(tmp_path / "probes.jsonl")
    one, other = probe(Mode.FULL), probe(Mode.FULL, seed=1)
    file.add(one, {"failed": 0.0}, row="x")
    assert file.find(other) is None
    again = ProbeFile(tmp_path / "probes.jsonl")
    assert again.find(one) == {"failed": 0.0}
    assert [row["row"] for row in again] == ["x"]
    (tmp_path / "probes.jsonl").write_text("{}\n")
    with pytest.raises(InvalidInput, match="line 1"):
        ProbeFile(tmp_path / "probes.jsonl")


def test_what_is_brought_along_is_part_of_a_probe_by_its_contents(tmp_path: Path) -> None:
    def key(gap_s: float, source: str) -> str:
        users = Recorded([0.0, gap_s, 9.0], ["a", "a", "b"], source, [300, 310, 400])
        own = replace(WORKLOAD, profile="refresh", reuse=0.0, gap_s=5.0, recorded=users)
        return replace(probe(Mode.FULL), workload=own).key

    assert key(3.0, "recorded: one.csv") == key(3.0, "recorded: the same.parquet")
    assert key(3.0, "recorded: one.csv") != key(4.0, "recorded: one.csv")
    assert key(3.0, "recorded: one.csv") != probe(Mode.FULL).key
    lengths = [replace(WORKLOAD, lengths="store", stored=Quantiles.of(seen, "s")) for seen in ([300], [300, 301])]
    assert len({replace(probe(Mode.FULL), workload=each).key for each in lengths}) == 2
    assert replace(probe(Mode.FULL), engine="another").key != probe(Mode.FULL).key


def test_a_file_of_probes_that_cannot_be_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path, said in (
        (tmp_path / "no" / "folder", "is no folder"),
        (tmp_path, "is a folder"),
        (tmp_path / "bytes", "read"),
    ):
        with pytest.raises(InvalidInput, match=f"probes: .*{said}"):
            ProbeFile(path)


def test_probes_of_earlier_versions_are_found() -> None:
    file = ProbeFile(Path(__file__).parents[2] / "benchmarks" / "results" / "headline-h200-probes.jsonl")
    row = next(iter(file))
    told = row["probe"]
    same = Probe(Mode(told["mode"]), Workload(**told["workload"]), Budgets(**told["budgets"]), Tuning(**told["tuning"]))
    assert file.find(same) == row["told"]


def test_a_search_begins_where_it_did_before(tmp_path: Path) -> None:
    costs = SimulatedCosts(step=1 / 3)
    start = Start(Device(costs, 2**14, CONFIG), {"full": 1 / 7})
    file = ProbeFile(tmp_path / "probes.jsonl")
    assert file.start("rate") is None
    file.begin("rate", start)
    file.add(probe(Mode.FULL), {"failed": 0.0})
    again = ProbeFile(tmp_path / "probes.jsonl")
    assert again.start("rate") == start
    assert len(list(again)) == 1


def test_tries_have_arrivals_of_their_own_for_each_seed() -> None:
    seeds = [probe(Mode.FULL, seed=seed).tried(number).workload.seed for seed in (0, 1) for number in (1, 2)]
    assert seeds == [1, 2, 1001, 1002]


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    records = [Record(0.5, 3, 1, 300, "ADMIT", "RESIDENT", "", 1.5, 20.25, True)]
    save_records(tmp_path / "run.parquet", records, {"mode": "full"})
    assert load_records(tmp_path / "run.parquet") == (records, {"mode": "full"})
    with pytest.raises(InvalidInput, match="records"):
        load_records(tmp_path / "missing.parquet")


def test_a_probe_that_is_ended_leaves_no_request_behind() -> None:
    async def main() -> None:
        executor = SimulatedExecutor(SimulatedCosts(0.01, 0.0, 0.0, 0.0, 0.0), page_bytes=2**12)
        async with Bench(SimulatedModel(), CONFIG, executor) as bench:
            before = asyncio.all_tasks()
            started = asyncio.Event()
            running = asyncio.create_task(bench.run(probe(Mode.FULL), lambda done, of: started.set()))
            await started.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert asyncio.all_tasks() == before

    asyncio.run(main())
