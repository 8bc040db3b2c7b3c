"""Tables of figures in the documents are those that the results make."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
assert _spec is not None
assert _spec.loader is not None
tables = importlib.util.module_from_spec(_spec)
sys.path.insert(0, str(ROOT / "benchmarks"))  # it is run beside its helpers
try:
    _spec.loader.exec_module(tables)
finally:
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("document", list(tables.TABLES))
def test_no_table_was_edited_by_hand(document: str) -> None:
    assert tables.written(document) == (ROOT / document).read_text(), "run python benchmarks/tables.py"


@pytest.mark.parametrize("picture", list(tables.PICTURES))
def test_no_picture_was_edited_by_hand(picture: str) -> None:
    assert tables.PICTURES[picture]() == (ROOT / picture).read_text(), "run python benchmarks/tables.py"
