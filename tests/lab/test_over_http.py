"""A trace over HTTP: real servers, every request accounted for, scores those of full inference."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaygr.cascade import PipelineConfig
from relaygr.cli import app
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
            again = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert done.exit_code == 0, done.output
        assert "name: users lab-" in again.stderr
        told: dict[str, object] = json.loads(done.stdout)
        return told

    told = asyncio.run(main())
    records, _ = load_records(out)
    assert len(records) == int((requests.at >= 0).sum()) == told["requests"]
    assert told["failed"] == 0
    assert told["reuse"] == pytest.approx(requests.returning, abs=0.25)
    busy, ahead = told["device busy"], told["pre-inference"]
    assert isinstance(busy, float)
    assert isinstance(ahead, float)
    assert 0.0 <= ahead <= busy
    assert 0.0 < busy <= 1.0
    assert told["sender late P99"] is None, "nobody has looked"
    oracle = told["oracle"]
    assert isinstance(oracle, dict)
    assert oracle["samples"] >= 3
    assert oracle["holds"]
