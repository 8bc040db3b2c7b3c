"""What is learnt from, what chooses, what judges: never the same behaviour."""

import numpy as np
import pytest

from relaygr.errors import InvalidInput
from relaygr.train.dataset import UNKNOWN, Dataset, Facts
from relaygr.train.split import split
from small_data import cyclic, rows_of


def test_leave_one_out_tests_the_last_and_learns_from_all_but_two() -> None:
    data = cyclic(6)
    parts = split(data, "leave-one-out")
    np.testing.assert_array_equal(parts.test.places, data.lengths - 1)
    np.testing.assert_array_equal(parts.valid.places, data.lengths - 2)
    np.testing.assert_array_equal(parts.train_stop, data.lengths - 2)


def test_by_time_nothing_learnt_from_is_later_than_what_judges() -> None:
    data = cyclic(20)
    parts = split(data, "time")
    place = np.arange(len(data)) - data.offsets[data.user_of_rows()]
    learnt = data.timestamps[place < parts.train_stop[data.user_of_rows()]]
    valid, test = (data.timestamps[data.offsets[part.users] + part.places] for part in (parts.valid, parts.test))
    assert learnt.max() < valid.min()
    assert valid.max() < test.min()
    assert len(learnt) + len(valid) + len(test) == len(data)


def test_by_time_behaviours_without_labels_are_no_targets() -> None:
    rows, data = rows_of(20), cyclic(20)
    rows.labels[::2] = UNKNOWN
    parts = split(Dataset(data.facts, data.catalogue, rows), "time")
    whole = Dataset(data.facts, data.catalogue, rows)
    for part in (parts.valid, parts.test):
        assert (whole.labels[whole.offsets[part.users] + part.places] != UNKNOWN).all()


def test_data_that_cannot_be_split_by_time_are_refused() -> None:
    rows, data = rows_of(5), cyclic(5)
    rows.timestamps[:] = 7
    with pytest.raises(InvalidInput, match="timestamp"):
        split(Dataset(data.facts, data.catalogue, rows), "time")
    rows.labels[:] = UNKNOWN
    with pytest.raises(InvalidInput, match="labels"):
        split(Dataset(data.facts, data.catalogue, rows), "time")


def test_data_without_labels_are_split_by_the_time_of_all_behaviours() -> None:
    rows, data = rows_of(5), cyclic(5)
    bare = type(rows)(rows.users, rows.names, rows.items, rows.actions, rows.timestamps, rows.labels[:, :0])
    parts = split(Dataset(Facts("bare", (), 2), data.catalogue, bare), "time")
    assert len(parts.test)
