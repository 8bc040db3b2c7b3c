"""What is measured is measured with the collector as servers have it, and left as it was."""

import gc

import pytest

from relaygr.serving.garbage import EVERY, settled


def test_the_collector_is_as_servers_have_it_and_then_as_it_was() -> None:
    before = gc.get_threshold()
    with settled():
        assert gc.get_threshold() == EVERY
        assert gc.get_freeze_count() > 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_it_is_left_as_it_was_by_what_fails_too() -> None:
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), settled():
        _ = 1 / 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
