"""Any CSV or Parquet file, by a map of its columns; and what every import checks."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relaygr.errors import InvalidInput
from relaygr.train.dataset import UNKNOWN
from relaygr.train.importing import Imported, number
from relaygr.train.table import read_columns, read_mapped

COLUMNS = "user=uid,item=iid,timestamp=ts,action=kind,label:click=clicked"


def imported(tmp_path: Path, text: str, columns: str = COLUMNS, *, milliseconds: bool = False) -> Imported:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    return number(read_mapped(path, read_columns(columns), milliseconds=milliseconds))


def test_columns_are_found_by_the_map(tmp_path: Path) -> None:
    found = imported(tmp_path, "ts,uid,iid,kind,clicked,more\n20,b,x,2,1,z\n10,a,y,0,,z\n")
    assert found.rows.names == ("b", "a")
    assert found.items.sources == ("x", "y")
    assert found.facts.actions == 3
    assert found.rows.labels.tolist() == [[1], [UNKNOWN]]


def test_parquet_and_csv_give_the_same_rows(tmp_path: Path) -> None:
    text = imported(tmp_path, "uid,iid,ts,kind,clicked\n1,5,10,0,true\n2,4,11,1,false\n")
    table = pa.table({"uid": [1, 2], "iid": [5, 4], "ts": [10, 11], "kind": [0, 1], "clicked": [True, False]})
    pq.write_table(table, tmp_path / "rows.parquet")
    other = number(read_mapped(tmp_path / "rows.parquet", read_columns(COLUMNS)))
    assert text.items == other.items
    assert text.rows.names == other.rows.names
    for column in ("users", "items", "actions", "timestamps", "labels"):
        np.testing.assert_array_equal(getattr(text.rows, column), getattr(other.rows, column))


def test_rows_that_repeat_another_in_every_column_are_left_out_and_counted(tmp_path: Path) -> None:
    row, other = "1,5,10,0,1\n", "1,5,10,1,1\n"
    found = imported(tmp_path, "uid,iid,ts,kind,clicked\n" + row + other + row + row)
    assert found.rows.actions.tolist() == [0, 1]
    assert found.facts.notes == ("2 rows that repeated an earlier one in every column were left out.",)


def test_milliseconds_become_seconds(tmp_path: Path) -> None:
    found = imported(tmp_path, "uid,iid,ts\n1,5,10999\n", "user=uid,item=iid,timestamp=ts", milliseconds=True)
    assert found.rows.timestamps.tolist() == [10]
    assert found.facts.labels == ()


def test_times_that_look_like_milliseconds_are_refused_with_a_hint(tmp_path: Path) -> None:
    text, columns = "uid,iid,ts\n1,5,1700000000000\n1,6,1700000060000\n", "user=uid,item=iid,timestamp=ts"
    with pytest.raises(InvalidInput, match=r"^ts: .*--milliseconds"):
        imported(tmp_path, text, columns)
    assert imported(tmp_path, text, columns, milliseconds=True).rows.timestamps.tolist() == [1700000000, 1700000060]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("uid,iid,ts,kind\n1,2,3,0\n", "clicked"),
        ("uid,iid,ts,kind,clicked\n1,2,,0,1\n", "ts"),
        ("uid,iid,ts,kind,clicked\n1,2,soon,0,1\n", "ts"),
        ("uid,iid,ts,kind,clicked\n1,2,1.5,0,1\n", "ts"),
        ("uid,iid,ts,kind,clicked\n1,2,-3,0,1\n", "timestamp"),
        ("uid,iid,ts,kind,clicked\n1,2,3,-1,1\n", "kind"),
        ("uid,iid,ts,kind,clicked\n1,2,3,0,2\n", "clicked"),
        ("uid,iid,ts,kind,clicked\n1,2,3,0,perhaps\n", "clicked"),
        ("uid,iid,ts,kind,clicked\n,2,3,0,1\n4,2,3,0,1\n", "user"),
        ("uid,iid,ts,kind,clicked\n1,,3,0,1\n4,2,3,0,1\n", "item"),
        ("uid,iid,ts,kind,clicked\n,x,3,0,1\nb,y,3,0,1\n", "user: is missing in 1 rows"),
        ("uid,iid,ts,kind,clicked\na,,3,0,1\na,  ,3,0,1\nb,y,3,0,1\n", "item: is missing in 2 rows"),
        ("uid,iid,ts,kind,clicked\n", "rows"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(text: str, field: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=field):
        imported(tmp_path, text)


def test_an_empty_text_is_missing_in_parquet_too(tmp_path: Path) -> None:
    users = pa.array(["a", "", None]).dictionary_encode()
    pq.write_table(pa.table({"uid": users, "iid": [1, 2, 3], "ts": [10, 11, 12]}), tmp_path / "rows.parquet")
    rows = read_mapped(tmp_path / "rows.parquet", read_columns("user=uid,item=iid,timestamp=ts"))
    with pytest.raises(InvalidInput, match="user: is missing in 2 rows"):
        number(rows)


@pytest.mark.parametrize("columns", ["user=a,item=b", "user", "user=a,item=b,timestamp=c,weight=d", "user=,item=b"])
def test_a_map_that_says_too_little_or_too_much_is_refused(columns: str) -> None:
    with pytest.raises(InvalidInput, match="columns"):
        read_columns(columns)


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=name):
        read_mapped(tmp_path / name, read_columns(COLUMNS))
