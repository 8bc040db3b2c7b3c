"""KuaiRand: logs of its releases, and Parquet files of its interactions."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relaygr.errors import InvalidInput
from relaygr.train.dataset import UNKNOWN, Dataset
from relaygr.train.importing import number
from relaygr.train.kuairand import read_kuairand

HEADER = "user_id,video_id,date,hourmin,time_ms,is_click,is_like,long_view\n"


def data(folder: Path) -> Dataset:
    imported = number(read_kuairand(folder))
    return Dataset(imported.facts, imported.items, imported.rows)


def test_logs_are_read_together_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "log_standard_4_22_to_5_08_pure.csv").write_text(HEADER + "1,7,20220501,1200,9000,0,0,0\n")
    (folder / "log_standard_4_08_to_4_21_pure.csv").write_text(HEADER + "1,9,20220410,900,5999,1,1,1\n")
    found = data(tmp_path)
    assert [found.catalogue.sources[item] for item in found.history(0).items] == ["9", "7"]
    assert found.history(0).timestamps.tolist() == [5, 9]
    assert found.history(0).actions.tolist() == [7, 0]
    np.testing.assert_array_equal(found.labels, [[1, 1, 1], [0, 0, 0]])


def test_earlier_sequences_are_history_and_no_examples(tmp_path: Path) -> None:
    rows = {"user_id": [1, 1], "item_id": [5, 6], "ts": [20_000, 30_000]}
    labels = {"is_click": [1, 0], "long_view": [0, 0], "is_like": [0, 0]}
    pq.write_table(pa.table({**rows, **labels}), tmp_path / "interactions.parquet")
    earlier = {"user_id": [1], "last_time_ms": [10_000], "watch_seq": [[8, 9, 8]], "like_seq": [[9]]}
    pq.write_table(pa.table({**earlier, "long_watch_seq": [[8, 9]]}), tmp_path / "user_sequences.parquet")
    found = data(tmp_path)
    assert [found.catalogue.sources[item] for item in found.history(0).items] == ["8", "9", "8", "5", "6"]
    assert found.history(0).actions.tolist() == [9, 11, 9, 1, 0]
    assert (found.labels[:3] == UNKNOWN).all()
    assert any("50" in note for note in found.facts.notes)


def test_a_log_without_a_label_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "log_standard_x.csv").write_text("user_id,video_id,time_ms,is_click,is_like\n1,2,3,0,0\n")
    with pytest.raises(InvalidInput, match="long_view"):
        read_kuairand(tmp_path)


def test_a_folder_with_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="log_standard"):
        read_kuairand(tmp_path)
