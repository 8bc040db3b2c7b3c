"""What a run tells is shown in percent and milliseconds, and nothing is shown that is not there."""

from relaygr.cli.lab_told import rows
from relaygr.engine import Decision
from relaygr.lab.outcome import Budgets, Run
from relaygr.lab.records import Record
from relaygr.serving.modes import Mode


def answered(ranking_ms: float, failure: str = "") -> Record:
    return Record(0.0, 1, 0, 64, str(Decision.NOT_AT_RISK), "FULL", failure, ranking_ms, ranking_ms, late_in_full=False)


def test_shares_are_percentages_and_what_no_run_has_is_left_out() -> None:
    runs = [Run(Mode.FULL, [answered(27.4)] * 4), Run(Mode.CACHE, [answered(27.4), answered(9.0, "TRUNCATED")])]
    whole = dict(rows([run.told(Budgets()) for run in runs]))
    assert whole["paths"] == ["FULL 100%", "FULL 100%"]
    assert whole["failed"] == ["0%", "50%"]
    assert whole["failures"] == ["", "TRUNCATED 1"]
    assert whole["within budgets"] == ["yes", "no"]
    assert whole["ranking P99, ms"] == ["27.4", "27.4"]
    assert whole["ranking P99, ms, 95%"] == ["27.4 or more", "27.4 or more"]
    first = dict(rows([runs[0].told(Budgets()) | {"budgets_ms": [50.0, 200.0], "oracle": None}]))
    assert first["budgets, ms"] == ["50 / 200"]
    assert not {"mode", "failures", "trigger precision", "trigger recall", "oracle"} & first.keys()
