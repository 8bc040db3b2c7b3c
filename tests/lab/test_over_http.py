"""A trace over HTTP: real servers, every request accounted for, scores those of full inference."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaygr.cascade import PipelineConfig
from relaygr.cli import app
from relaygr.lab.probe import ProbeFile
from relaygr.lab.records import load_records
from relaygr.lab.servers import serving
from relaygr.lab.workload import Workload
from relaygr.serving.all import DEFAULTS
from relaygr.serving.provision import World, provision

UNHURRIED = replace(
    DEFAULTS,
    cascade=PipelineConfig(pipeline_ms=60_000.0, ranking_ms=50_000.0),
    engine=replace(DEFAULTS.engine, on_miss="full"),
)
"""Nothing is late on any machine."""


def test_a_trace_is_sent_to_a_gateway_and_recorded(tmp_path: Path) -> None:
    trace, out, data = tmp_path / "trace.parquet", tmp_path / "out.parquet", tmp_path / "data"
    requests = Workload(
        20, 1.5, "reuse", reuse=0.6, gap_s=0.5, lengths="200", candidates=16, past_s=1.0, new=2.0
    ).trace()
    requests.save(trace)

    async def main() -> dict[str, object]:
        provision(data, world=World(users=2, typical=100, longest=200))
        async with serving(UNHURRIED, data, 1) as servers:
            command = ["lab", "run", str(trace), str(out), "--url", servers.address, "--json", "--check", "5"]
            command += ["--ranking-ms", "50000", "--pipeline-ms", "60000", "--model", str(data / "model.safetensors")]
            done = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert done.exit_code == 0, done.output
        told: dict[str, object] = json.loads(done.stdout)
        return told

    told = asyncio.run(main())
    records, _ = load_records(out)
    assert len(records) == int((requests.at >= 0).sum()) == told["requests"]
    assert told["failed"] == 0
    assert told["reuse"] == pytest.approx(requests.returning, abs=0.25)
    oracle = told["oracle"]
    assert isinstance(oracle, dict)
    assert oracle["samples"] >= 3
    assert oracle["holds"]


@pytest.mark.parametrize("command", ["slo", "length"])
def test_a_search_tries_what_was_not_tried_and_keeps_it(tmp_path: Path, command: str) -> None:
    """One try, which need not hold. Lengths are tried one request at a time: the shorter the budget, the sooner.

    Called again, it begins where it did, measures nothing anew, and finds what it did.
    """
    probes = tmp_path / "probes.jsonl"
    arguments = ["lab", command, str(probes), "--tries", "1", "--mode", "full", "--json", "--candidates", "8"]
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
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout)
        assert set(told["found"]) == set(told["simulated"]) == {"full"}
        written.append((probes.read_bytes(), told))
    assert written[0] == written[1]
    (row,) = ProbeFile(probes)
    assert row["told"]["requests"] > 0
    load = row["probe"]["workload"]
    if command == "slo":
        assert told["traffic"]["sources"] == {"arrivals": "recorded: mine.csv", "lengths": "recorded: mine.csv"}
        assert (load["lengths"], load["retrieval_ms"], load["pre_processing_ms"]) == ("recorded", 120.0, 30.0)
    else:
        assert (load["retrieval_ms"], load["pre_processing_ms"]) == (12.0, 3.0)


def test_a_search_in_a_mode_that_is_none_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["lab", "slo", str(tmp_path / "probes.jsonl"), "--mode", "fast"])
    assert done.exit_code == 1
    assert "choose from full" in done.stderr
