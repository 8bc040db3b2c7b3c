"""The command, as a user calls it."""

import json
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
from typer.testing import CliRunner

from relaygr.cli import app
from relaygr.cli.demo import _show
from relaygr.lab.demo import Demo, DemoResult, Replay
from relaygr.serving.modes import Mode

SMALL = ["--requests", "12", "--users", "3", "--length", "600", "--candidates", "8", "--instances", "1"]


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    result = CliRunner().invoke(app, ["demo", "--json", *SMALL])
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def test_the_demo_serves_the_same_requests_without_the_relay_and_with_it(printed: dict[str, Any]) -> None:
    full, relay = printed["replays"]
    assert (full["mode"], relay["mode"]) == ("full", "relay+host+extend")
    assert full["paths"] == {"FULL": 12}
    assert sum(relay["paths"].values()) == 12
    assert relay["paths"].get("FULL", 0) <= 3
    assert (full["failed"], relay["failed"]) == (0, 0)
    assert full["reuse"] == 0.0
    assert relay["reuse"] >= printed["returning"] == 0.75


def test_the_demo_compares_scores(printed: dict[str, Any]) -> None:
    assert 0 <= printed["difference"] <= printed["allowed"]


def test_the_demo_s_table_has_the_modes_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    stages = {stage: {"p50": 1.0, "p99": 40.0} for stage in ("retrieval", "pre_processing", "ranking", "total")}
    full = Replay(Mode.FULL, stages, stages["total"], {"FULL": 4}, {"NOT_AT_RISK": 4}, 0.0, 0)
    quick = {**stages, "ranking": {"p50": 2.0, "p99": 10.0}}
    relay = Replay(Mode.RELAY_HOST_EXTEND, quick, stages["total"], {"RESIDENT": 4}, {"ADMIT": 4}, 0.5, 0)
    _show(DemoResult(Demo(), 4, 2.0, 0.5, [full, relay], 1e-6, 1e-5))
    shown = capsys.readouterr().out
    assert "2.0× longer in the middle, 4.0× shorter at P99" in shown
    assert "10.0% of what rounding allows" in shown
    assert [line.split()[-2:] for line in shown.splitlines() if "RESIDENT" in line] == [["0", "4"]]


@pytest.mark.parametrize("option", ["--users", "--requests", "--length", "--candidates"])
def test_a_number_that_makes_no_sense_is_refused_by_name(option: str) -> None:
    result = CliRunner().invoke(app, ["demo", option, "0"])
    assert result.exit_code == 2
    assert option in result.output


def test_help_teaches() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"])
    assert result.exit_code == 0
    assert "come back" in result.output


def test_the_command_is_there_before_torch_is() -> None:
    code = "import sys, relaygr.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_version_is_said() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"relaygr {metadata.version('relaygr')}\n")
