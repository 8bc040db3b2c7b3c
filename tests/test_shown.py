"""Values in sentences for people."""

import datetime

import pytest

from relaygr.shown import LONGEST, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [("abc", '"abc"'), (True, "true"), (None, "null"), ([1, "é"], '[1, "é"]'), (0.5, "0.5")],
)
def test_values_are_written_as_whoever_gave_them_does(value: object, text: str) -> None:
    assert shown(value) == text


def test_what_no_format_has_is_said_in_words() -> None:
    assert shown(datetime.date(2026, 1, 2)) == "2026-01-02"


def test_long_ones_are_cut() -> None:
    assert len(shown("x" * 10_000)) == LONGEST + 1
