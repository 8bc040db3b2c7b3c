"""The command, as a user calls it."""

import json

import pytest
from typer.testing import CliRunner

from relaygr.cli import app

SMALL = ["--users", "2", "--visits", "4", "--length", "200", "--candidates", "8"]


def test_the_demo_prints_a_row_for_every_visit_and_the_largest_difference() -> None:
    result = CliRunner().invoke(app, ["demo", *SMALL])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("user-1") == 4
    assert "Largest difference of scores" in result.stdout


def test_the_demo_prints_json_for_machines_and_nothing_else() -> None:
    result = CliRunner().invoke(app, ["demo", "--json", *SMALL])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert len(printed["visits"]) == 8
    assert all(visit["difference"] <= visit["allowed"] for visit in printed["visits"])
    assert sum(printed["paths"].values()) == 8


@pytest.mark.parametrize("option", ["--users", "--visits", "--length", "--candidates"])
def test_a_number_that_makes_no_sense_is_refused_by_name(option: str) -> None:
    result = CliRunner().invoke(app, ["demo", option, "0"])
    assert result.exit_code == 2
    assert option in result.output


def test_help_teaches() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"])
    assert result.exit_code == 0
    assert "come back" in result.output
