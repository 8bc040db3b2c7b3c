"""Commands of the lab take the same traffic, and refuse by name what makes none."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from relaygr.cli.lab import lab
from relaygr.cli.lab_options import Served
from relaygr.cli.lab_search import Search, tell
from relaygr.cli.output import interrupted
from relaygr.config import EngineConfig
from relaygr.engine.simulated import SimulatedCosts
from relaygr.history import LmdbStore
from relaygr.lab.device import Device
from relaygr.lab.found import Found, Limit
from relaygr.lab.outcome import Budgets
from relaygr.lab.probe_file import ProbeFile, Start
from relaygr.lab.trace import Trace
from relaygr.lab.workload import Workload
from relaygr.serving.modes import Mode

RECORDED = "user,at,length\na,0,1500\na,3,1504\nb,1,900\n"


def options(command: str) -> dict[str, str | None]:
    """What `--help` says of each."""
    group = typer.main.get_command(lab)
    assert isinstance(group, typer.core.TyperGroup)
    found = group.commands[command].params
    return {each.name or "": each.help for each in found if isinstance(each, typer.core.TyperOption)}


def refused(arguments: Sequence[str]) -> str:
    done = CliRunner().invoke(lab, arguments)
    assert done.exit_code == 1, done.output
    return " ".join(done.stderr.split())


def test_a_search_takes_all_traffic_that_a_trace_does() -> None:
    workload, slo, length = options("workload"), options("slo"), options("length")
    own = {"rate", "seconds"}
    assert workload.keys() - slo.keys() <= own
    assert all(slo[name] == said for name, said in workload.items() if name not in own)
    assert {"retrieval_ms", "pre_processing_ms", "stage_spread", "new", "seed"} <= length.keys()
    assert "recorded" not in length


@pytest.mark.parametrize("command", ["slo", "length"])
def test_help_says_what_stages_take_and_what_to_pass_on_a_gpu(command: str) -> None:
    shown = " ".join(CliRunner().invoke(lab, [command, "--help"]).output.split())
    for said in ("60%", "20%", "--device cuda", "--dtype bfloat16"):
        assert said in shown, said


def test_a_trace_is_written_of_recorded_users_and_their_lengths(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(RECORDED)
    arguments = [
        "workload",
        str(tmp_path / "trace"),
        "--recorded",
        str(tmp_path / "mine.csv"),
        "--rate",
        "50",
        "--json",
    ]
    told = json.loads(CliRunner().invoke(lab, arguments).stdout)
    assert told["rate"] == pytest.approx(50, rel=0.15)
    assert told["sources"] == {"users": "recorded: mine.csv", "lengths": "recorded: mine.csv"}
    assert not told["hybrid"]
    assert set(Trace.load(tmp_path / "trace").length.tolist()) > {900, 1500}


def test_a_trace_of_recorded_users_with_lengths_of_others_says_that_it_is_a_hybrid(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(RECORDED)
    arguments = ["workload", str(tmp_path / "trace"), "--recorded", str(tmp_path / "mine.csv"), "--seconds", "5"]
    told = json.loads(CliRunner().invoke(lab, [*arguments, "--lengths", "kuairand-1k", "--json"]).stdout)
    assert told["hybrid"]
    assert told["sources"]["users"] == "recorded: mine.csv"
    assert "KuaiRand-1K" in told["sources"]["lengths"]
    assert Trace.load(tmp_path / "trace").made["hybrid"]


def test_what_commands_have_in_common_they_say_alike() -> None:
    commands = [options(name) for name in ("workload", "simulate", "slo", "length")]
    for name in ("mode", "ranking_ms", "pipeline_ms", "as_json"):
        assert len({each[name] for each in commands if name in each}) == 1, name


def test_a_trace_is_written_of_the_lengths_of_a_store(tmp_path: Path) -> None:
    with LmdbStore(tmp_path / "store") as store:
        store.append("a", [1] * 70, [0] * 70, list(range(70)))
    arguments = [
        "workload",
        str(tmp_path / "trace"),
        "--lengths",
        f"store:{tmp_path / 'store'}",
        "--new",
        "0",
        "--json",
    ]
    told = json.loads(CliRunner().invoke(lab, arguments).stdout)
    assert "1 users in the store" in told["sources"]["lengths"]
    assert set(Trace.load(tmp_path / "trace").length.tolist()) == {70}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--recorded", "missing.csv"], "recorded: missing.csv does not exist"),
        (["--lengths", "abc"], "ml-1m, recorded, store:FOLDER, store:redis://host:6379/0"),
        (["--lengths", "store:missing"], "lengths: missing is no folder with a store"),
        (["--lengths", "recorded"], "lengths: "),
        (["--gap-s", "3"], "gap_s: "),
        (
            ["--retrieval-ms", "150", "--pre-processing-ms", "60"],
            "retrieval_ms: leaves nothing to rank in",
        ),
        (["--pre-processing-ms", "150"], "pre_processing_ms: leaves nothing to rank in"),
        (["--pre-processing-ms", "-1"], "pre_processing_ms: "),
        (["--stage-spread", "0.5"], "stage_spread: "),
        (["--mode", "fast"], "mode: "),
    ],
)
def test_a_search_refuses_by_name_and_writes_nothing(tmp_path: Path, more: list[str], said: str) -> None:
    probes = tmp_path / "probes.jsonl"
    assert said in refused(["slo", str(probes), *more])
    assert not probes.exists()


@pytest.mark.parametrize("command", ["slo", "length"])
def test_a_search_tries_what_was_not_tried_and_keeps_it(tmp_path: Path, command: str) -> None:
    """One try, which need not hold. Lengths are tried one request at a time: the shorter the budget, the sooner.

    Called again, it begins where it did, measures nothing anew, and finds what it did.
    """
    probes = tmp_path / "probes.jsonl"
    arguments = [command, str(probes), "--tries", "1", "--mode", "full", "--json", "--candidates", "8"]
    arguments += ["--device-cache", "32MiB", "--host-cache", "0"]
    if command == "slo":
        recorded = tmp_path / "mine.csv"
        recorded.write_text("user,at,length\na,0,1500\na,3,1504\nb,1,900\n")
        arguments += ["--ranking-ms", "1000", "--pipeline-ms", "1200", "--recorded", str(recorded)]
        arguments += ["--pre-processing-ms", "30", "--past-s", "2"]
    else:
        arguments += ["--ranking-ms", "40", "--pipeline-ms", "60", "--longest", "512", "--pre-processing-ms", "3"]
    written = []
    for _ in range(2):
        done = CliRunner().invoke(lab, arguments)
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout)
        assert set(told["found"]) == set(told["simulated"]) == set(told["failed_above"]) == {"full"}
        assert told["confirmed"] == {"full": False}
        written.append((probes.read_bytes(), told))
    assert written[0] == written[1]
    kept = ProbeFile(probes)
    (searched,) = kept.searches.values()
    assert searched.found["full"]["value"] == told["found"]["full"]
    assert {"version", "date", "machine"} <= searched.ran.keys()
    row, *more = kept
    assert len(more) <= 1  # one that fails by what may be luck, on a busy machine, is tried once more
    assert row["told"]["requests"] > 0
    assert len(row["searched"]) == 16
    load = row["probe"]["workload"]
    if command == "slo":
        assert told["traffic"]["sources"] == {"users": "recorded: mine.csv", "lengths": "recorded: mine.csv"}
        assert (load["lengths"], load["retrieval_ms"], load["pre_processing_ms"]) == ("recorded", 120.0, 30.0)
    else:
        assert (load["retrieval_ms"], load["pre_processing_ms"]) == (12.0, 3.0)


@pytest.mark.parametrize(("there", "said"), [(True, "the same command goes on"), (False, "nothing was measured yet")])
def test_a_search_that_is_interrupted_says_in_a_line_that_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], there: bool, said: str
) -> None:
    if there:
        (tmp_path / "probes.jsonl").write_text("")
    with pytest.raises(typer.Exit) as ended, interrupted("lab slo", tmp_path / "probes.jsonl"):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    told = capsys.readouterr().err
    assert told.startswith(f"relaygr lab slo: stopped; {said}")
    assert told.count("\n") == 1


RELAY = Mode.RELAY_HOST_EXTEND


@pytest.mark.parametrize(
    ("found", "said", "unsaid"),
    [
        ({Mode.FULL: Limit(10.0, True, 11.0), RELAY: Limit(20.0, True, 22.0)}, ["2.00× (1.82 – 2.20)"], ["--tries"]),
        ({Mode.FULL: Limit(10.0, False, 11.0)}, ["10*", "held once", "--tries than 3"], ["none"]),
        ({Mode.FULL: Limit(10.0, True, 19.6)}, ["10", "19.6", "--tries than 3"], ["none", "held once"]),
        ({Mode.FULL: Limit(None, False, 5.2)}, ["none", "5.2", "held again", "--tries than 3"], ["held once"]),
        ({Mode.FULL: Limit(1e9, True)}, ["1,000,000,000"], ["--tries"]),  # the highest that is tried
    ],
)
def test_limits_are_shown_with_what_failed_and_how_sure_they_are(
    capsys: pytest.CaptureFixture[str], found: dict[Mode, Limit], said: list[str], unsaid: list[str]
) -> None:
    served = Served("d64", None, "cpu", "float32", "1MiB", "0")
    device = Device(SimulatedCosts(0.0, 0.0, 0.0, 0.0, 0.0), 1, EngineConfig())
    unused: Any = None
    search = Search("rate", served, Workload(1.0, 1.0), Budgets(), unused, unused, tries=3)
    tell(search, Found(found), Start(device, dict.fromkeys(found, 30.0)), as_json=False)
    shown = capsys.readouterr().out
    assert all(each in shown for each in said), shown
    assert not [each for each in unsaid if each in shown], shown


def written(tmp_path: Path) -> str:
    trace = str(tmp_path / "trace")
    assert (
        CliRunner().invoke(lab, ["workload", trace, "--rate", "2", "--seconds", "2", "--lengths", "64"]).exit_code == 0
    )
    return trace


def test_what_cannot_be_written_is_said_before_anything_is_done(tmp_path: Path) -> None:
    nowhere, trace = str(tmp_path / "no" / "where"), written(tmp_path)
    (tmp_path / "file").write_text("")
    assert "trace: cannot be written" in refused(["workload", nowhere])
    assert "trace: cannot be written" in refused(["workload", str(tmp_path)])
    assert "records: cannot be written" in refused(["run", trace, nowhere])
    headline = str(Path(__file__).parents[2] / "benchmarks" / "results" / "headline-cpu.json")
    assert "out: cannot be written" in refused(["report", str(tmp_path / "file" / "report"), headline])


@pytest.mark.parametrize("url", ["foo", "http://host", "http://host:99999", "https://host:8000", "http://:8000"])
def test_an_address_that_is_none_is_refused_by_name(tmp_path: Path, url: str) -> None:
    said = refused(["run", written(tmp_path), str(tmp_path / "records"), "--url", url])
    assert f'url: is "{url}"; write it as' in said


def test_what_is_not_there_or_is_something_else_is_said(tmp_path: Path) -> None:
    trace, records = written(tmp_path), tmp_path / "records.parquet"
    assert "trace: " in (said := refused(["run", str(tmp_path / "none"), str(records)]))
    assert "does not exist" in said
    assert "does not exist" in refused(["simulate", trace, str(tmp_path / "none.json")])
    (tmp_path / "other.json").write_text("{}")
    assert "GET /v1/status" in refused(["simulate", trace, str(tmp_path / "other.json")])
    records.write_bytes(b"PAR1\xff\xfe")
    assert "lab slo or length" in (said := refused(["report", str(tmp_path / "report"), str(records)]))
    assert "PAR1" not in said
    (tmp_path / "empty.jsonl").write_text("")
    assert "has no probes" in refused(["report", str(tmp_path / "report"), str(tmp_path / "empty.jsonl")])
