"""KuaiRand: the logs of its releases (Pure, 1K, 27K), and Parquet files of its interactions."""

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from relaygr.errors import InvalidInput
from relaygr.train.dataset import UNKNOWN, Facts
from relaygr.train.importing import Source, column_integers, read_table

__all__ = ["LABELS", "read_kuairand"]

LABELS: Final = ("is_click", "long_view", "is_like")
_CITATION: Final = (
    "Chongming Gao et al. 2022. KuaiRand: An Unbiased Sequential Recommendation Dataset with Randomly Exposed Videos. "
    "CIKM 2022."
)
_LICENCE: Final = "KuaiRand, CC BY-SA 4.0: name it and share alike"
_ACTIONS: Final = "An action is the sum of 1 for a click, 2 for a long view and 4 for a like."
_EARLIER: Final = 8
"""Actions of behaviours known from an earlier sequence alone: this, plus 1 for a long view and 2 for a like."""


def read_kuairand(folder: Path) -> Source:
    """The standard logs (log_standard_*.csv) in `folder` or its `data`, in the order of their names; or
    interactions.parquet, with the sequences that came before it in user_sequences.parquet where that is there."""
    logs = sorted(folder.glob("log_standard_*.csv")) or sorted((folder / "data").glob("log_standard_*.csv"))
    if logs:
        return _logs(folder, logs)
    if (folder / "interactions.parquet").exists():
        return _parquet(folder)
    raise InvalidInput("source", f"{folder} holds neither log_standard_*.csv nor interactions.parquet")


def _logs(folder: Path, logs: list[Path]) -> Source:
    tables = [read_table(path, ("user_id", "video_id", "time_ms", *LABELS)) for path in logs]
    table = pa.concat_tables(tables)
    labels = _labels(table, folder)
    facts = Facts(folder.name, LABELS, 12, _LICENCE, _CITATION, notes=(_ACTIONS,))
    return Source(
        facts,
        table["user_id"].combine_chunks(),
        table["video_id"].combine_chunks(),
        _action(labels),
        column_integers(table, "time_ms", folder) // 1000,
        labels,
    )


def _parquet(folder: Path) -> Source:
    path = folder / "interactions.parquet"
    table = read_table(path, ("user_id", "item_id", "ts", *LABELS))
    labels = _labels(table, path)
    users, items = column_integers(table, "user_id", path), column_integers(table, "item_id", path)
    times = column_integers(table, "ts", path) // 1000
    actions = _action(labels)
    notes: tuple[str, ...] = (_ACTIONS,)
    sequences = folder / "user_sequences.parquet"
    if sequences.exists():
        earlier = _earlier(sequences)
        users = np.concatenate((earlier[0], users))
        items = np.concatenate((earlier[1], items))
        actions = np.concatenate((earlier[2], actions))
        times = np.concatenate((earlier[3], times))
        labels = np.concatenate((np.full((len(earlier[0]), len(LABELS)), UNKNOWN, np.int8), labels))
        notes = (
            *notes,
            "What a user watched before the interactions is known as a sequence, cut to the newest 50, without times: "
            "it is history with the time of its last entry, and no example. Its actions are 8, plus 1 for a video "
            "the user watched long and 2 for one they liked.",
        )
    facts = Facts(folder.name, LABELS, 12, _LICENCE, _CITATION, notes=notes)
    return Source(facts, pa.array(users), pa.array(items), actions, times, labels)


def _earlier(path: Path) -> tuple[npt.NDArray[np.int64], ...]:
    """Users, items, actions and times of the sequences, row by row."""
    table = read_table(path, ("user_id", "last_time_ms", "watch_seq", "like_seq", "long_watch_seq"))
    parts: tuple[list[int], ...] = ([], [], [], [])
    for row in table.to_pylist():
        liked, long = set(row["like_seq"] or ()), set(row["long_watch_seq"] or ())
        for item in row["watch_seq"] or ():
            action = _EARLIER + (item in long) + 2 * (item in liked)
            for part, value in zip(parts, (row["user_id"], item, action, row["last_time_ms"] // 1000), strict=True):
                part.append(value)
    users, items, actions, times = (np.array(part, np.int64) for part in parts)
    return users, items, actions, times


def _labels(table: pa.Table, source: Path) -> npt.NDArray[np.int8]:
    return np.stack([column_integers(table, label, source) for label in LABELS], axis=1).astype(np.int8)


def _action(labels: npt.NDArray[np.int8]) -> npt.NDArray[np.int64]:
    return np.asarray(labels.astype(np.int64) @ np.array([1, 2, 4]), np.int64)
