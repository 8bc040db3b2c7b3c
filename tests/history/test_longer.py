"""A user's own behaviour, resampled before what is real."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.history import History
from relaygr.history.longer import lengthened

HOUR = 3600


def sessions(*sizes: int) -> History:
    """Sessions of these sizes a day apart, a minute between behaviours; no two items are the same."""
    times = np.concatenate([24 * HOUR * (100 + day) + 60 * np.arange(size) for day, size in enumerate(sizes)])
    return History(np.arange(len(times)), np.arange(len(times)) % 5, times)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 400), st.integers(0, 5))
def test_it_is_as_long_as_asked_for_and_ends_with_what_is_real(sizes: list[int], length: int, seed: int) -> None:
    real = sessions(*sizes)
    long = lengthened(real, length, np.random.default_rng(seed))
    made = len(long) - len(real)
    assert len(long) == max(length, len(real))
    assert long[made:] == real
    assert set(long.items[:made]) <= set(real.items)


def test_gaps_inside_and_between_sessions_are_the_user_s_own() -> None:
    real = sessions(4, 4, 4)
    long = lengthened(real, 300, np.random.default_rng(0))
    assert set(np.diff(long.timestamps)) == set(np.diff(real.timestamps))


def test_actions_stay_with_their_places_and_few_items_change() -> None:
    real = sessions(50, 50)
    long = lengthened(real, 1000, np.random.default_rng(0))
    changed = long.items[:900] % 5 != long.actions[:900]
    assert 0 < changed.mean() < 0.12


def test_nothing_is_made_of_nothing() -> None:
    empty = History([], [], [])
    assert lengthened(empty, 100, np.random.default_rng(0)) == empty


def test_nothing_is_before_1970() -> None:
    real = History([1, 2], [0, 0], [5, HOUR])
    assert lengthened(real, 500, np.random.default_rng(0)).timestamps.min() == 0
