"""Longer histories made of real ones."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.history.quantiles import Quantiles
from relaygr.train.dataset import UNKNOWN, Dataset
from relaygr.train.importing import Imported
from relaygr.train.lengthen import lengthen
from small_data import cyclic


def loaded(made: Imported) -> Dataset:
    return Dataset(made.facts, made.items, made.rows)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 300), st.integers(0, 3))
def test_histories_have_the_length_asked_for_and_the_real_one_at_the_end(length: int, seed: int) -> None:
    data = cyclic(6)
    made = loaded(lengthen(data, Quantiles(((0.0, length),), "here"), seed=seed))
    for user in range(data.users):
        real, long = data.history(user), made.history(user)
        assert len(long) == max(length, len(real))
        assert long[len(long) - len(real) :] == real
        before = len(long) - len(real)
        assert set(long.items[:before]) <= set(real.items)
        assert (np.diff(long.timestamps) >= 0).all()
        assert before == 0 or long.timestamps[before - 1] < real.timestamps[0]


def test_what_is_made_up_is_labelled_and_never_an_example() -> None:
    data = cyclic(6)
    made = lengthen(data, Quantiles(((0.0, 100),), "here"))
    assert made.facts.synthetic
    assert made.facts.name == "cyclic-lengthened"
    assert "Synthetic" in made.facts.notes[-1]
    long = loaded(made)
    for user in range(data.users):
        low, high = long.offsets[user], long.offsets[user + 1]
        real = int(data.lengths[user])
        assert (long.labels[low : high - real] == UNKNOWN).all()
        assert (long.labels[high - real : high] != UNKNOWN).all()


def test_the_same_seed_makes_the_same_histories() -> None:
    draw = Quantiles(
        (
            (0.0, 50),
            (1.0, 500),
        ),
        "here",
    )
    one, same, other = (loaded(lengthen(cyclic(6), draw, seed=seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.items, same.items)
    assert len(one) != len(other)
