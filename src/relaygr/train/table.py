"""Any CSV or Parquet file, by a map of its columns."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from relaygr.errors import InvalidInput
from relaygr.train.dataset import UNKNOWN, Facts
from relaygr.train.importing import Source, column_integers, read_table

__all__ = ["read_columns", "read_mapped"]

_REQUIRED: Final = ("user", "item", "timestamp")
_SECONDS: Final = 1e11
"""Seconds beyond this are of the year 5138 and later; so many milliseconds are of 1973."""


def read_columns(text: str) -> dict[str, str]:
    """A map of columns from "user=uid,item=iid,timestamp=ts,action=kind,label:click=clicked"."""
    columns = {}
    for part in text.split(","):
        name, equals, column = part.strip().partition("=")
        if not equals or not column:
            raise InvalidInput("columns", f"{part.strip()!r} is not of the form user=COLUMN")
        if name not in (*_REQUIRED, "action") and not name.startswith("label:"):
            raise InvalidInput("columns", f"{name!r} is none of user, item, timestamp, action, label:NAME")
        columns[name] = column
    for name in _REQUIRED:
        if name not in columns:
            raise InvalidInput("columns", f"say no column for {name}: add {name}=COLUMN")
    return columns


def read_mapped(path: Path, columns: Mapping[str, str], *, milliseconds: bool = False, licence: str = "") -> Source:
    """Rows of one file. Actions are whole numbers from 0; without such a column every action is 0. Labels are 0 or 1
    or true or false; a missing one is unknown: such a behaviour is history, and no example."""
    table = read_table(path, tuple(columns.values()))
    times = column_integers(table, columns["timestamp"], path)
    if not milliseconds and len(times) and np.median(times) > _SECONDS:
        raise InvalidInput(
            columns["timestamp"],
            f"of {path} looks like milliseconds, not seconds (its median is {np.median(times):.0f}): "
            "add --milliseconds",
        )
    actions = np.zeros(table.num_rows, np.int64)
    if "action" in columns:
        actions = column_integers(table, columns["action"], path)
        if len(actions) and actions.min() < 0:
            raise InvalidInput(columns["action"], f"of {path} must not be negative")
    labels = [name for name in columns if name.startswith("label:")]
    read = [_label(table, columns[name], path) for name in labels]
    facts = Facts(
        path.name.partition(".")[0],
        tuple(name.removeprefix("label:") for name in labels),
        int(actions.max(initial=0)) + 1,
        licence or "not stated",
    )
    return Source(
        facts,
        table[columns["user"]].combine_chunks(),
        table[columns["item"]].combine_chunks(),
        actions,
        times // 1000 if milliseconds else times,
        np.stack(read, axis=1) if read else np.empty((table.num_rows, 0), np.int8),
        licence_text=f"{licence}\n" if licence else "",
    )


def _label(table: pa.Table, column: str, path: Path) -> npt.NDArray[np.int8]:
    try:
        values = table[column].cast(pa.float64()).combine_chunks().fill_null(UNKNOWN).to_numpy()
    except pa.ArrowException:
        try:
            values = table[column].cast(pa.bool_()).cast(pa.int8()).combine_chunks().fill_null(UNKNOWN).to_numpy()
        except pa.ArrowException as error:
            raise InvalidInput(column, f"of {path} must be 0 or 1, or true or false: {error}") from error
    if not np.isin(values, (0, 1, UNKNOWN)).all():
        raise InvalidInput(column, f"of {path} must be 0 or 1, or true or false")
    return np.asarray(values, np.int8)
