"""Tables of figures in the documents are those that the results make."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
assert _spec is not None
assert _spec.loader is not None
tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tables)


@pytest.mark.parametrize("document", list(tables.TABLES))
def test_no_table_was_edited_by_hand(document: str) -> None:
    assert tables.written(document) == (ROOT / document).read_text(), "run python benchmarks/tables.py"
