"""A report is one page that needs nothing else, with every figure beside it, and says what was measured."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaygr.cli import app
from relaygr.config import EngineConfig
from relaygr.engine.simulated import SimulatedCosts
from relaygr.lab.device import Device
from relaygr.lab.outcome import Budgets
from relaygr.lab.probe import Probe
from relaygr.lab.probe_file import ProbeFile, Searched, Start
from relaygr.lab.recorded import Recorded
from relaygr.lab.report import load_results, write_report
from relaygr.lab.tuning import Tuning
from relaygr.lab.workload import Workload
from relaygr.serving.modes import Mode

pytest.importorskip("matplotlib")

BUDGETS = Budgets(12.0, 200.0)
DEVICE = Device(
    SimulatedCosts(step=3e-4, token=5e-6, pair=0.0, candidate=1e-6, candidate_pair=0.0),
    2**20,
    EngineConfig(device_cache="1GiB", host_cache="0", max_history=4096),
)


def probes(path: Path) -> None:
    """Simulated ones, with what a real one is kept with."""
    file = ProbeFile(path)
    for mode in (Mode.FULL, Mode.RELAY_HOST_EXTEND):
        for rate in (5.0, 20.0):
            load = Workload(rate, 3.0, "reuse", lengths="2000", candidates=64, past_s=1.0)
            probe = Probe(mode, load, BUDGETS, Tuning.of(BUDGETS, mode))
            moments = [[0.25 * step, 0.5, 0.1, 0.0, 0.6, 0.4] for step in range(8)]
            file.add(probe, DEVICE.simulate(probe), row="<half>", moments=moments)


def page_of(folder: Path, *names: str) -> str:
    """Of these files, and written beside them."""
    page, *_ = write_report(load_results([folder / name for name in names]), folder)
    return page.read_text(encoding="utf-8")


def headline(path: Path) -> None:
    row = {
        "budgets_ms": [12, 200], "n": 2000, "reuse": 0.0, "full_share": 0.86,
        "length_ratio": {"full": None, "cache": None},
        "throughput_ratio": {"full": 4.25, "cache": None}, "p99_ms": 9.5, "paths": {"FULL": 1.0},
    }  # fmt: skip
    detail = {
        "shape": "d64", "row": row, "kind": "rate", "traffic": "cold", "found": {"full": 4.0, "cache": None},
        "simulated": {"full": 5.0, "cache": 3.0}, "oracle": {"samples": 3, "difference": 1e-7, "allowed": 1e-5},
    }  # fmt: skip
    table = {
        "machine": {"cpu": "some <cpu>"},
        "commit": "abc123",
        "shapes": {"d64": [row]},
        "details": {"<half>": detail},
    }
    path.write_text(json.dumps(table))


def test_the_page_needs_nothing_else_and_says_what_was_measured(tmp_path: Path) -> None:
    probes(tmp_path / "probes.jsonl")
    headline(tmp_path / "headline.json")
    files = [str(tmp_path / name) for name in ("probes.jsonl", "headline.json")]
    done = CliRunner().invoke(app, ["lab", "report", str(tmp_path / "report"), *files])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("<svg") == 3
    assert {path.name for path in (tmp_path / "report").glob("*.png")} == {
        "-half--p99.png",
        "-half--paths.png",
        "-half--time.png",
    }
    for said in ("4.25×", "some &lt;cpu&gt;", "abc123", "full +25%", "1e-07 of 1e-05 allowed", "&lt;half&gt;"):
        assert said in page, said
    linked = re.findall(r'(?:src|href)="(?!#)([^"]+)"', page)
    assert not [link for link in linked if not link.startswith("data:")], linked


def test_a_browser_shows_it(tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed: make system")
    headline(tmp_path / "headline.json")
    page, *_ = write_report(load_results([tmp_path / "headline.json"]), tmp_path)
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "4.25×" in shown
    assert "What ran" in shown


def test_files_that_are_no_results_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    for name, said in (("other.json", "neither"), ("missing.json", "does not exist")):
        done = CliRunner().invoke(app, ["lab", "report", str(tmp_path / "out"), str(tmp_path / name)])
        assert done.exit_code == 1
        assert said in done.stderr


def test_rows_come_in_the_order_of_the_table_and_others_behind_them(tmp_path: Path) -> None:
    load = Workload(5.0, 3.0, "reuse", lengths="2000", candidates=64, past_s=1.0)
    probe = Probe(Mode.FULL, load, BUDGETS, Tuning.of(BUDGETS, Mode.FULL))
    file = ProbeFile(tmp_path / "probes.jsonl")
    for number, name in enumerate(("first", "<half>", "second")):
        file.add(probe.tried(number), DEVICE.simulate(probe), row=name, moments=[])
    headline(tmp_path / "headline.json")
    page = page_of(tmp_path, "headline.json", "probes.jsonl")
    assert re.findall(r"<h2>([^<]*)</h2>", page)[1:4] == ["&lt;half&gt;", "first", "second"]


@pytest.mark.parametrize(
    ("tried", "limit", "failed", "told_at", "held"),
    [
        ("5y 20y 20n 40n", "5*", "20", "5/s", "1 of 1"),  # held once and failed later
        ("5y 20n 20y 20n 20y 40n", "20", "40", "20/s", "2 of 4"),  # held again whenever it failed by luck
        ("5y 5y 20y 20n 20n 20y 20n", "5", "20", "5/s", "2 of 2"),
        ("5y 5y 20y", "5", "–", "5/s", "2 of 2"),  # 20 not confirmed
        ("5n 5y 20n", "5*", "20", "5/s", "1 of 2"),
        ("40n 20y 20n 10n", "none", "10", "held nowhere; at 10/s", "0 of 1"),
    ],
)
def test_of_a_search_that_did_not_end_it_is_told_where_a_mode_held_last(
    tmp_path: Path, tried: str, limit: str, failed: str, told_at: str, held: str
) -> None:
    file = ProbeFile(tmp_path / "probes.jsonl")
    for seed, one in enumerate(tried.split()):
        load = Workload(float(one[:-1]), 3.0, "reuse", lengths="2000", candidates=64, past_s=1.0, seed=seed)
        probe = Probe(Mode.FULL, load, BUDGETS, Tuning.of(BUDGETS, Mode.FULL))
        file.add(probe, DEVICE.simulate(probe) | {"within budgets": one.endswith("y")}, moments=[])
    page = page_of(tmp_path, "probes.jsonl")
    assert re.findall(r"<td>([^<]*/s) of 2,000 behaviours</td><td>([0-9]+ of [0-9]+)</td>", page) == [(told_at, held)]
    assert f"<td>full</td><td>{limit}</td><td>{failed}</td>" in page
    assert ("held once, not confirmed" in page) == limit.endswith("*")


def test_limits_are_those_that_the_search_told_with_what_ran_it(tmp_path: Path) -> None:
    """Whatever else is in the file, and whatever other modes did at the relay's rate."""
    file = ProbeFile(tmp_path / "probes.jsonl")
    file.begin("rate: a", Start(DEVICE, {"full": 9.0, "relay+host+extend": 18.0, "cache": 7.0}))
    for mode, rate, holds in (
        (Mode.FULL, 10.0, True), (Mode.FULL, 20.0, False), (Mode.RELAY_HOST_EXTEND, 20.0, True),
        (Mode.RELAY_HOST_EXTEND, 40.0, True), (Mode.CACHE, 5.0, False), (Mode.TRUNCATE, 20.0, True),
    ):  # fmt: skip
        load = Workload(rate, 3.0, "reuse", lengths="2000", candidates=64, past_s=1.0)
        probe = Probe(mode, load, BUDGETS, Tuning.of(BUDGETS, mode), "d64 on cpu in float32, 1GiB and 0")
        told = DEVICE.simulate(probe) | {"within budgets": holds, "cut short": not holds, "device busy": 0.5}
        file.add(probe, told, moments=[], searched=Searched.name("rate: a"))
    found = {"full": (10.0, True, 20.0), "relay+host+extend": (20.0, False, 40.0), "cache": (None, False, 5.0)}
    limits = {mode: dict(zip(("value", "confirmed", "failed"), limit, strict=True)) for mode, limit in found.items()}
    machine = {"cpu": "some cpu", "cores": 2, "gpu": None}
    file.end("rate: a", limits, version="1.2.3", date="2026-11-19T05:17:08+00:00", machine=machine)
    page = page_of(tmp_path, "probes.jsonl")
    for said in (
        "The whole relay held 20* requests a second: 2.00×* (1.00 – 4.00) what full did.",
        "<td>full</td><td>10</td><td>20</td><td>2.00×* (1.00 – 4.00)</td><td>9 (-10%)</td>",
        "<td>cache</td><td>none</td><td>5</td><td>–</td><td>7</td>",
        "<td>relay+host+extend</td><td>20*</td><td>40</td><td></td><td>18 (-10%)</td>",
        "<td>truncate</td><td>20/s of 2,000 behaviours</td><td>1 of 1</td>",
        "<td>cache</td><td>held nowhere; at 5/s of 2,000 behaviours</td><td>0 of 1</td>",
        "Served by d64 on cpu in float32, 1GiB and 0 of memory for prefixes",
        "Ran: relaygr 1.2.3, on some cpu, 2 cores, ended 2026-11-19.",
        "<td>50.00</td>",  # device-seconds: busy half the time, for 1,000 requests at 10 a second
    ):
        assert said in page, said
    assert "<td>truncate</td><td>20</td>" not in page


def test_figures_of_the_page_that_was_there_are_removed_and_nothing_else(tmp_path: Path) -> None:
    probes(tmp_path / "probes.jsonl")
    headline(tmp_path / "headline.json")
    own = tmp_path / "my-time.png"
    own.write_bytes(b"")
    pages = [
        write_report(load_results([tmp_path / name]), tmp_path)
        for name in ("probes.jsonl", "probes.jsonl", "headline.json")
    ]
    assert [len(written) for written in pages] == [4, 4, 1]
    assert list(tmp_path.glob("*.png")) == [own]


def test_probes_of_recorded_users_are_apart_and_say_where_facts_are_from(tmp_path: Path) -> None:
    file = ProbeFile(tmp_path / "probes.jsonl")
    users = Recorded([0.0, 3.0, 1.0], ["a", "a", "b"], "recorded: mine.csv", [1500, 1504, 900])
    for lengths in ("recorded", "kuairand-1k", "2000"):
        load = Workload(5.0, 3.0, lengths=lengths, longest=4000, candidates=64, past_s=1.0, recorded=users)
        probe = Probe(Mode.FULL, load, BUDGETS, Tuning.of(BUDGETS, Mode.FULL))
        traffic = {"sources": load.sources, "hybrid": load.hybrid}
        file.add(probe, DEVICE.simulate(probe), moments=[], traffic=traffic)
    file.begin("rate", Start(DEVICE, {"full": 5.0}))
    page = page_of(tmp_path, "probes.jsonl")
    assert page.count("<h2>recorded ") == 3
    assert page.count("as they were recorded (recorded: mine.csv)") == 3
    assert page.count("a hybrid of both") == 1


def test_searches_that_differ_are_drawn_apart(tmp_path: Path) -> None:
    """In the engine, in candidates, in stages, in anything else, or, by what is kept with them, in their length."""
    file = ProbeFile(tmp_path / "probes.jsonl")
    base = Workload(5.0, 3.0, lengths="2000", longest=4000, candidates=64, past_s=1.0)
    for load, engine, searched in (
        (base, "d64 on cpu", "a"),
        (replace(base, rate=6.0, seconds=2.0, seed=1), "d64 on cpu", "a"),
        (base, "d64 on cuda", "b"),
        (replace(base, candidates=32), "d64 on cpu", "c"),
        (replace(base, retrieval_ms=10.0), "d64 on cpu", "d"),
        (replace(base, new=2.0), "d64 on cpu", "e"),
        (replace(base, lengths="3000"), "d64 on cpu", "f"),
    ):
        probe = Probe(Mode.FULL, load, BUDGETS, Tuning.of(BUDGETS, Mode.FULL), engine)
        file.add(probe, DEVICE.simulate(probe), moments=[], searched=searched)
    page = page_of(tmp_path, "probes.jsonl")
    named = re.findall(r"<h2>(.*?)</h2>", page)
    stages = "stages of 60 and 20 ms"
    assert named == [
        f"refresh, 12 / 200 ms, 2,000 behaviours, 64 candidates, {stages}, d64 on cpu",
        f"refresh, 12 / 200 ms, 2,000 behaviours, 64 candidates, {stages}, d64 on cuda",
        f"refresh, 12 / 200 ms, 2,000 behaviours, 32 candidates, {stages}, d64 on cpu",
        "refresh, 12 / 200 ms, 2,000 behaviours, 64 candidates, stages of 10 and 20 ms, d64 on cpu",
        f"refresh, 12 / 200 ms, 2,000 behaviours, 64 candidates, {stages}, d64 on cpu (2)",
        f"refresh, 12 / 200 ms, 3,000 behaviours, 64 candidates, {stages}, d64 on cpu",
    ]
    assert len(list(tmp_path.glob("*-p99.png"))) == 6
    assert "Served by d64 on cuda" in page


def test_files_of_earlier_versions_are_drawn(tmp_path: Path) -> None:
    """They say neither which search it was, nor what served it, and have another name for where users are from."""
    file = ProbeFile(tmp_path / "probes.jsonl")
    for lengths in ("1000", "2000"):
        load = Workload(5.0, 3.0, lengths=lengths, longest=4000, candidates=64, past_s=1.0)
        probe = Probe(Mode.FULL, load, BUDGETS, Tuning.of(BUDGETS, Mode.FULL))
        file.add(probe, DEVICE.simulate(probe), moments=[], traffic={"sources": {"arrivals": "a", "lengths": "b"}})
    page = page_of(tmp_path, "probes.jsonl")
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["refresh, 12 / 200 ms"]
    assert "as refresh says (a); lengths: b" in page
