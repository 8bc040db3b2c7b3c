"""Tables of figures in the documents are those that the results make."""

from pathlib import Path

import pytest

import tables

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("document", list(tables.TABLES))
def test_no_table_was_edited_by_hand(document: str) -> None:
    assert tables.written(document) == (ROOT / document).read_text(), "run python benchmarks/tables.py"


@pytest.mark.parametrize("picture", list(tables.PICTURES))
def test_no_picture_was_edited_by_hand(picture: str) -> None:
    assert tables.PICTURES[picture]() == (ROOT / picture).read_text(), "run python benchmarks/tables.py"
