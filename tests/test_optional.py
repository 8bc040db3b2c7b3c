import sys
from pathlib import Path

import pytest

from optional import missing, require


def test_what_is_there_is_imported() -> None:
    assert require("json", "it comes with Python") is sys.modules["json"]


def test_what_is_missing_is_skipped_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no_such_module is missing: make system"):
        require("no_such_module", "make system")
    with pytest.raises(pytest.skip.Exception, match="haproxy is missing: make system"):
        missing("haproxy", "make system")


def test_what_is_missing_fails_where_ci_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no_such_module is missing: make system"):
        require("no_such_module", "make system")


def test_a_module_that_is_there_and_broken_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CI", raising=False)
    (tmp_path / "broken_module.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        require("broken_module", "make system")
