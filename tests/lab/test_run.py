"""A trace replayed on a simulated engine: open loop, the same each time, and each mode does what its name says."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaygr.cli import app
from relaygr.config import EngineConfig
from relaygr.engine.simulated import SimulatedCosts
from relaygr.lab.device import Device
from relaygr.lab.estimates import share_interval
from relaygr.lab.histories import Histories
from relaygr.lab.outcome import Budgets, Run
from relaygr.lab.probe import Probe
from relaygr.lab.trace import Trace
from relaygr.lab.tuning import Tuning
from relaygr.lab.workload import Workload
from relaygr.serving.modes import Mode

COSTS = SimulatedCosts(step=0.3e-3, token=5e-6, pair=0.0, candidate=1e-6, candidate_pair=0.0, copy=1e-4, page=4e-5)
"""2,000 behaviours take 10 ms."""
PAGE_BYTES = 2**20
CONFIG = EngineConfig(device_cache="2GiB", host_cache="2GiB", max_history=4096)
BUDGETS = Budgets(ranking_ms=12.0, pipeline_ms=200.0)


def load(rate: float = 30.0, *, reuse: float = 0.0, seconds: float = 4.0) -> Workload:
    return Workload(rate, seconds, "reuse", reuse=reuse, gap_s=1.0, lengths="2000", candidates=64, past_s=4.0)


def run(mode: Mode, sent: Workload, budgets: Budgets = BUDGETS, *, config: EngineConfig = CONFIG) -> Run:
    """All of the past is lived through."""
    probe = Probe(mode, sent, budgets, Tuning.of(budgets, mode))
    return Device(COSTS, PAGE_BYTES, config).run(probe, trace=probe.trace())


def test_the_same_trace_gives_the_same_run() -> None:
    sent = load(reuse=0.5)
    one, other = (run(Mode.RELAY_HOST_EXTEND, sent) for _ in range(2))
    assert one == other
    assert one.requests == int((sent.trace().at >= 0).sum())


def test_progress_is_told_of_every_request_of_the_past_too() -> None:
    probe, told = Probe(Mode.FULL, load(), BUDGETS, Tuning.of(BUDGETS, Mode.FULL)), list[tuple[int, int]]()
    Device(COSTS, PAGE_BYTES, CONFIG).run(probe, lambda done, of: told.append((done, of)), trace=probe.trace())
    every = len(probe.trace())
    assert told == [(done, every) for done in range(1, every + 1)]


def test_in_full_nothing_is_kept_and_nothing_signalled() -> None:
    found = run(Mode.FULL, load(reuse=0.8), Budgets(100.0))
    assert set(found.paths) == {"FULL"}
    assert found.reused == 0.0
    assert found.pre_infer_share == 0.0


def test_a_cache_serves_those_who_return() -> None:
    found = run(Mode.CACHE, load(reuse=0.8), Budgets(100.0))
    assert found.reused == pytest.approx(0.8, abs=0.1)
    assert found.pre_infer_share == 0.0


def test_what_comes_back_from_host_memory_is_told() -> None:
    small = replace(CONFIG, device_cache="256MiB")
    found = [
        run(Mode.CACHE, load(reuse=0.8), Budgets(100.0), config=config)
        for config in (CONFIG, small, replace(small, host_cache="0"))
    ]
    some, more, none = (each.told(Budgets(100.0))["reloaded"] for each in found)
    assert some < 0.1 < more < 0.8
    assert none == 0.0


@dataclass(frozen=True)
class Lived(Probe):
    """Of whose past so much is lived through."""

    seconds: float = 0.0

    @property
    def lived_s(self) -> float:
        return self.seconds


def refreshed(*, lived_s: float | None) -> Run:
    """A feed that some 200 users refresh every 2 to 6 s, where 128 of them fit."""
    sent = Workload(50, 4, "reuse", reuse=0.95, gap_s=4.0, lengths="2000", candidates=64, past_s=30, new=0)
    config = replace(CONFIG, host_cache="0")
    if lived_s is None:
        return run(Mode.RELAY, sent, config=config)
    probe = Lived(Mode.RELAY, sent, BUDGETS, Tuning.of(BUDGETS, Mode.RELAY), seconds=lived_s)
    return Device(COSTS, PAGE_BYTES, config).run(probe)


def test_where_more_users_refresh_than_memory_holds_many_are_still_found() -> None:
    """Keeping the latest would keep those who have just been here: next to nobody would be found."""
    assert refreshed(lived_s=None).reused > 0.45


def test_a_past_made_quickly_leaves_about_what_one_lived_through_does() -> None:
    lived = refreshed(lived_s=None).reused
    for lived_s in (1.0, 6.0):
        assert refreshed(lived_s=lived_s).reused == pytest.approx(lived, abs=0.1)


@pytest.mark.parametrize("mode", [Mode.CACHE, Mode.RELAY, Mode.RELAY_HOST_EXTEND])
def test_who_was_here_is_served_though_nobody_new_could_be(mode: Mode) -> None:
    """What takes longer than the pipeline, and than a lease, was left in the past; lived through, it would not be."""
    device, budgets = Device(COSTS, PAGE_BYTES, CONFIG), Budgets(1.0, 2.0)
    workload = Workload(
        4.0, 5.0, "reuse", reuse=0.999, gap_s=2.0, lengths="2000", candidates=64, past_s=12.0, new=0,
        retrieval_ms=0.5, pre_processing_ms=0.2,
    )  # fmt: skip
    probe = device.probe(mode, workload, budgets, 2000)
    assert device.full_s(2000, 64) > probe.tuning.lease_s > budgets.pipeline_ms / 1e3
    told = device.simulate(probe)
    assert told["within budgets"], told
    assert told["reuse"] == 1.0


def test_how_much_of_a_past_is_lived_through() -> None:
    def of(mode: Mode, past_s: float) -> Probe:
        return Probe(mode, Workload(1.0, 1.0, past_s=past_s), BUDGETS, Tuning.of(BUDGETS, mode))

    assert [of(Mode.CACHE, past_s).lived_s for past_s in (1.0, 4.0, 12.0, 60.0)] == [1.0, 2.0, 6.0, 6.0]
    assert of(Mode.FULL, 60.0).lived_s == 1.0
    assert "lived_s" in of(Mode.CACHE, 60.0).key, "what was measured in another way is measured again"


def test_the_relay_ranks_newcomers_within_a_budget_that_full_inference_misses() -> None:
    sent = load(rate=15.0)
    full, relay = run(Mode.FULL, sent), run(Mode.RELAY_HOST_EXTEND, sent)
    assert relay.reused == 0.0
    assert relay.holds(BUDGETS)
    assert not full.holds(BUDGETS)
    assert relay.paths["RESIDENT"] >= 0.95 * relay.requests


def test_what_fails_is_counted_and_not_timed() -> None:
    budgets = Budgets(30.0)
    found = run(Mode.FULL, load(rate=120.0, seconds=2.0), budgets)
    assert set(found.failed) == {"DeadlineExceeded", "Overloaded"}
    assert sum(found.failed.values()) > 0.1 * found.requests
    assert len(found.ranking_ms) + sum(found.failed.values()) == found.requests
    assert max(found.ranking_ms) <= budgets.ranking_ms + 1e-6
    assert not found.holds(budgets)


def test_a_run_that_cannot_hold_any_more_is_ended_and_does_not_hold() -> None:
    probe = Probe(Mode.FULL, load(rate=120.0), BUDGETS, Tuning.of(BUDGETS, Mode.FULL))
    device = Device(COSTS, PAGE_BYTES, CONFIG)
    whole, short = (device.run(probe, hopeless=hopeless) for hopeless in (False, True))
    assert short.cut_short
    assert not whole.cut_short
    assert short.requests < whole.requests / 2
    assert not short.holds(BUDGETS)
    assert not whole.holds(BUDGETS)
    assert short.planned == whole.requests
    failed = sum(short.failed.values())
    low, high = short.told(BUDGETS)["failed, 95%"]
    assert low == share_interval(failed, whole.requests)[0], "the others might all have been answered"
    assert high == share_interval(failed, short.requests)[1]


def test_a_run_without_requests_holds_nothing() -> None:
    found = Run(Mode.FULL)
    assert not found.holds(BUDGETS)
    assert found.told(BUDGETS)["failed"] == 0.0


def test_a_users_longer_history_begins_with_the_shorter_one() -> None:
    histories, fresh = Histories(100, 4), Histories(100, 4)
    short, long = histories.of(3, 200), histories.of(3, 260)
    assert long[:200] == short
    assert fresh.of(3, 260) == long
    assert histories.of(3, 100) == short[:100]
    assert histories.of(4, 200) != short


def _files(folder: Path) -> tuple[str, str]:
    sizes = {"page_bytes": PAGE_BYTES, "device_pages": 400, "host_pages": 0}
    status = {**sizes, "cost_model": {"steps": [3e-4, 5e-6, 0, 1e-6, 0], "copies": [1e-4, 4e-5]}}
    (folder / "status.json").write_text(json.dumps(status))
    load(rate=10).trace().save(folder / "trace.parquet")
    return str(folder / "trace.parquet"), str(folder / "status.json")


def test_the_command_tells_what_each_mode_would_do(tmp_path: Path) -> None:
    arguments = ["lab", "simulate", *_files(tmp_path), "--json"]
    done = CliRunner().invoke(app, [*arguments, "--mode", "full", "--mode", "relay", "--ranking-ms", "12"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["simulated"] is True
    assert [row["mode"] for row in told["runs"]] == ["full", "relay"]


@pytest.mark.parametrize(("file", "said"), [("trace.parquet", "costs"), ("missing.json", "costs")])
def test_costs_that_are_none_are_refused(tmp_path: Path, file: str, said: str) -> None:
    requests, _ = _files(tmp_path)
    done = CliRunner().invoke(app, ["lab", "simulate", requests, str(tmp_path / file)])
    assert done.exit_code == 1
    assert said in done.stderr


def test_a_mode_that_is_none_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["lab", "simulate", *_files(tmp_path), "--mode", "fast"])
    assert done.exit_code == 1
    assert "choose from full" in done.stderr


def test_the_workload_command_writes_what_it_says(tmp_path: Path) -> None:
    out = tmp_path / "trace.parquet"
    done = CliRunner().invoke(app, ["lab", "workload", str(out), "--rate", "20", "--seconds", "5", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["requests"] == int((Trace.load(out).at >= 0).sum())
