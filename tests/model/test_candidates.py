"""Candidates keep what they were given, as it was when it was looked at."""

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr import Candidates
from relaygr.errors import InvalidInput

IDS = st.integers(0, 2**63 - 1) | st.integers(0, 99) | st.sampled_from((2**31 - 1, 2**31, 2**32 + 5))


@given(st.lists(IDS, min_size=1, max_size=20))
def test_items_are_those_that_were_given(ids: list[int]) -> None:
    candidates = Candidates(ids)
    assert candidates.items.tolist() == ids
    assert candidates.items.dtype == np.int64
    assert candidates.highest == max(ids)
    assert candidates.kept.dtype == (np.int32 if max(ids) < 2**31 else np.int64)
    with pytest.raises(ValueError, match="read-only"):
        candidates.items[0] = 1


@pytest.mark.parametrize("other", [-1, 90, 2**31 - 1, 2**32 + 7, 2**63 - 1])
def test_what_was_checked_is_what_is_kept_whenever_the_caller_writes_to_theirs(other: int) -> None:
    """As another thread may, between any two calls."""
    for after in range(60):
        theirs, calls = np.arange(8), [after]

        def write(frame: FrameType, event: str, arg: Any, theirs: Any = theirs, calls: list[int] = calls) -> None:
            calls[0] -= 1
            if calls[0] == 0:
                theirs[3] = other

        sys.setprofile(write)
        try:
            kept = Candidates(theirs)
        except InvalidInput:
            continue
        finally:
            sys.setprofile(None)
        assert kept.items.max() == kept.highest
        assert kept.items.min() >= 0
