"""The columnar form: what is saved comes back, and what is damaged is refused."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relaygr.errors import InvalidInput
from relaygr.train import dataset as datasets
from small_data import cyclic, rows_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = cyclic(5)
    datasets.save(tmp_path, data.facts, data.catalogue, rows_of(5), "Terms.")
    return tmp_path


def test_what_is_saved_comes_back(folder: Path) -> None:
    data, back = cyclic(5), datasets.load(folder)
    assert (back.facts, back.catalogue, back.names, back.licence_text) == (
        data.facts,
        data.catalogue,
        data.names,
        "Terms.",
    )
    for column in ("items", "actions", "timestamps", "labels", "offsets"):
        np.testing.assert_array_equal(getattr(back, column), getattr(data, column))


def test_histories_are_cut_from_their_old_end(folder: Path) -> None:
    data = datasets.load(folder)
    whole = data.history(2)
    assert data.history(2, 10, last=4) == whole[6:10]
    assert data.history(2, 3, last=4) == whole[:3]


def test_rows_in_any_order_give_the_same_histories() -> None:
    rows, data = rows_of(5), cyclic(5)
    order = np.random.default_rng(1).permutation(len(rows))
    mixed = datasets.Behaviours(
        rows.users[order],
        rows.names,
        rows.items[order],
        rows.actions[order],
        rows.timestamps[order],
        rows.labels[order],
    )
    again = datasets.Dataset(data.facts, data.catalogue, mixed)
    assert all(again.history(user) == data.history(user) for user in range(5))


def test_a_missing_column_is_named(folder: Path) -> None:
    table = pq.read_table(folder / "behaviours.parquet")
    pq.write_table(table.drop_columns(["timestamp"]), folder / "behaviours.parquet")
    with pytest.raises(InvalidInput, match="timestamp"):
        datasets.load(folder)


@pytest.mark.parametrize(("column", "value"), [("item", 999), ("item", -1), ("action", 7)])
def test_items_and_actions_that_are_not_there_are_refused(column: str, value: int, folder: Path) -> None:
    table = pq.read_table(folder / "behaviours.parquet")
    at = table.column_names.index(column)
    values = table[column].to_numpy().copy()
    values[3] = value
    pq.write_table(table.set_column(at, column, pa.array(values)), folder / "behaviours.parquet")
    with pytest.raises(InvalidInput, match=column):
        datasets.load(folder)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="relaygr data import"):
        datasets.load(tmp_path)


def test_facts_that_are_not_known_are_refused(folder: Path) -> None:
    values = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps({**values, "colour": "red"}))
    with pytest.raises(InvalidInput, match="colour"):
        datasets.load(folder)


def test_a_rule_for_ties_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="ties"):
        datasets.load(folder, ties="sideways")  # type: ignore[arg-type]
