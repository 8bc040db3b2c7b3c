"""A data set of behaviours: one columnar form, whatever it was imported from.

folder/
  behaviours.parquet   user, item, action, timestamp, and a column for each label; rows in the order of their source
  items.parquet        item, source (its id there), title
  dataset.json         name, labels, actions, licence, citation, whether synthetic
  LICENCE.txt          the terms, as the source states them, where it came with any
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from relaygr.errors import InvalidInput
from relaygr.history import History

__all__ = ["UNKNOWN", "Behaviours", "Dataset", "Facts", "Items", "Ties", "load", "save"]

Ties = Literal["file", "reversed"]
"""Behaviours of a user at one time: in the order of the source's rows, or in the opposite one."""

UNKNOWN: Final = -1
"""The label of a behaviour whose outcome is not known: history, but no example."""

_COLUMNS: Final = ("user", "item", "action", "timestamp")


@dataclass(frozen=True)
class Facts:
    """What is said about a data set."""

    name: str
    labels: tuple[str, ...]
    """What became of a behaviour: the tasks of a ranking model."""
    actions: int
    """Kinds of action: a behaviour's action is below this."""
    licence: str = "not stated"
    citation: str = ""
    synthetic: bool = False
    """Whether behaviours were made up, from whatever they were made."""
    notes: tuple[str, ...] = ()
    """What was done to the rows of the source, in sentences."""


@dataclass(frozen=True)
class Items:
    """The items, in the order of their numbers: ids in the source, and titles where it has them."""

    sources: tuple[str, ...]
    titles: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True)
class Behaviours:
    """Rows in the order of the source."""

    users: npt.NDArray[np.int64]
    """Numbers of users, into `names`."""
    names: tuple[str, ...]
    items: npt.NDArray[np.int64]
    actions: npt.NDArray[np.int32]
    timestamps: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int8]
    """[rows, labels]: 0, 1, or UNKNOWN."""

    def __len__(self) -> int:
        return len(self.users)


class Dataset:
    """Users' behaviours, oldest first: user u's are rows offsets[u] … offsets[u + 1] of every column."""

    def __init__(
        self, facts: Facts, items: Items, rows: Behaviours, *, ties: Ties = "file", licence_text: str = ""
    ) -> None:
        if ties not in get_args(Ties):
            raise InvalidInput("ties", f"is {ties!r}; choose from {', '.join(get_args(Ties))}")
        self.facts, self.catalogue, self.ties, self.licence_text = facts, items, ties, licence_text
        place = np.arange(len(rows))
        order = np.lexsort((place if ties == "file" else -place, rows.timestamps, rows.users))
        self.names = rows.names
        self.items = rows.items[order]
        self.actions = rows.actions[order]
        self.timestamps = rows.timestamps[order]
        self.labels = rows.labels[order]
        counts = np.bincount(rows.users, minlength=len(rows.names))
        self.offsets: npt.NDArray[np.int64] = np.concatenate(([0], np.cumsum(counts)))

    def __len__(self) -> int:
        return len(self.items)

    @property
    def users(self) -> int:
        return len(self.names)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    def user_of_rows(self) -> npt.NDArray[np.int64]:
        """The user of every row."""
        return np.repeat(np.arange(self.users), self.lengths)

    def history(self, user: int, stop: int | None = None, *, last: int | None = None) -> History:
        """The user's behaviours before their behaviour `stop` (all by default), of these the newest `last`."""
        low, high = int(self.offsets[user]), int(self.offsets[user + 1])
        high = high if stop is None else low + stop
        low = low if last is None else max(low, high - last)
        return History(self.items[low:high], self.actions[low:high], self.timestamps[low:high])


def save(folder: str | Path, facts: Facts, items: Items, rows: Behaviours, licence_text: str = "") -> None:
    """Write a data set. `load` reads it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = pa.array(rows.names, pa.string())
    users = pa.DictionaryArray.from_arrays(pa.array(rows.users.astype(np.int32)), names)
    columns: dict[str, Any] = {
        "user": users,
        "item": rows.items,
        "action": rows.actions,
        "timestamp": rows.timestamps,
        **{label: rows.labels[:, column] for column, label in enumerate(facts.labels)},
    }
    pq.write_table(pa.table(columns), folder / "behaviours.parquet", compression="zstd")
    catalogue: dict[str, Any] = {"item": np.arange(len(items)), "source": list(items.sources)}
    if items.titles is not None:
        catalogue["title"] = list(items.titles)
    pq.write_table(pa.table(catalogue), folder / "items.parquet", compression="zstd")
    text = json.dumps(asdict(facts), indent=2, ensure_ascii=False)
    (folder / "dataset.json").write_text(text + "\n", encoding="utf-8")
    if licence_text:
        (folder / "LICENCE.txt").write_text(licence_text, encoding="utf-8")


def load(folder: str | Path, *, ties: Ties = "file") -> Dataset:
    """The data set that `save` wrote. Raises InvalidInput naming what is missing or wrong."""
    folder = Path(folder)
    try:
        values = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
        table = pq.read_table(folder / "behaviours.parquet")
        catalogue = pq.read_table(folder / "items.parquet")
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InvalidInput("data", f"{folder} is no data set of `relaygr data import`: {error}") from error
    known = {field.name for field in fields(Facts)}
    if not isinstance(values, dict) or set(values) - known:
        raise InvalidInput(
            "data", f"{folder}/dataset.json has fields that are not known: {sorted(set(values) - known)}"
        )
    read: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    facts = Facts(**read)
    require_columns(folder / "behaviours.parquet", table.column_names, (*_COLUMNS, *facts.labels))
    users = table["user"].combine_chunks().dictionary_encode()
    rows = Behaviours(
        users.indices.to_numpy().astype(np.int64),
        tuple(users.dictionary.to_pylist()),
        table["item"].to_numpy().astype(np.int64),
        table["action"].to_numpy().astype(np.int32),
        table["timestamp"].to_numpy().astype(np.int64),
        np.stack([table[label].to_numpy() for label in facts.labels], axis=1).astype(np.int8)
        if facts.labels
        else np.empty((table.num_rows, 0), np.int8),
    )
    titles = tuple(catalogue["title"].to_pylist()) if "title" in catalogue.column_names else None
    items = Items(tuple(catalogue["source"].to_pylist()), titles)
    if len(rows) and (rows.items.min() < 0 or rows.items.max() >= len(items)):
        raise InvalidInput("item", f"{folder}/behaviours.parquet names items that items.parquet lacks")
    if len(rows) and (rows.actions.min() < 0 or rows.actions.max() >= facts.actions):
        raise InvalidInput("action", f"of {folder}/behaviours.parquet must be from 0 to {facts.actions - 1}")
    licence = folder / "LICENCE.txt"
    text = licence.read_text(encoding="utf-8") if licence.exists() else ""
    return Dataset(facts, items, rows, ties=ties, licence_text=text)


def require_columns(source: str | Path, there: Sequence[str], wanted: Sequence[str]) -> None:
    """InvalidInput naming the first column that is wanted and not there."""
    for column in wanted:
        if column not in there:
            raise InvalidInput(column, f"is no column of {source}; it has {', '.join(there)}")
