"""From rows of a source to a data set: numbering, duplicates, checks. The sources are read beside this file."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from relaygr.errors import InvalidInput
from relaygr.train.dataset import UNKNOWN, Behaviours, Facts, Items, require_columns

__all__ = ["Imported", "Source", "column_integers", "number", "read_csv", "read_table"]


@dataclass(frozen=True)
class Source:
    """Rows as a source has them, in its order, columns of one length."""

    facts: Facts
    users: pa.Array
    """Ids of any type."""
    items: pa.Array
    actions: npt.NDArray[np.int64]
    timestamps: npt.NDArray[np.int64]
    """Seconds."""
    labels: npt.NDArray[np.int8]
    """[rows, labels]"""
    titles: dict[str, str] = field(default_factory=dict)
    """By an item's id, as text; the order of its keys is the order in which items are numbered."""
    licence_text: str = ""


@dataclass(frozen=True)
class Imported:
    """A data set, ready to be saved."""

    facts: Facts
    items: Items
    rows: Behaviours
    licence_text: str = ""


def number(source: Source) -> Imported:
    """Users and items get numbers, rows that repeat an earlier one in every column are left out, the rest is checked.

    Items are numbered in the order of `titles`, or else of their ids; those without a behaviour get no number.
    """
    for name, column in (("user", source.users), ("item", source.items)):
        if missing := column.null_count + _empty(column):
            raise InvalidInput(name, f"is missing in {missing} rows")
    if not len(source.users):
        raise InvalidInput("rows", "there are none")
    users = source.users.dictionary_encode()
    items = source.items.dictionary_encode()
    codes, order = items.indices.to_numpy(), items.dictionary
    ids = [str(value) for value in order.to_pylist()]
    if source.titles:
        place = {identity: index for index, identity in enumerate(source.titles)}
        ranks = np.array([place.get(identity, len(place)) for identity in ids])
        by_id = np.lexsort((np.arange(len(ids)), ranks))
    else:
        by_id = pc.array_sort_indices(order).to_numpy()
    numbers = np.empty(len(ids), np.int64)
    numbers[by_id] = np.arange(len(ids))
    if int(source.actions.min()) < 0 or int(source.actions.max()) >= source.facts.actions:
        raise InvalidInput("action", f"must be from 0 to {source.facts.actions - 1}")
    if int(source.timestamps.min()) < 0:
        raise InvalidInput("timestamp", "must not be negative")
    if source.labels.size and not np.isin(source.labels, (0, 1, UNKNOWN)).all():
        raise InvalidInput("labels", "must be 0 or 1, or missing")
    rows = Behaviours(
        users.indices.to_numpy().astype(np.int64),
        tuple(str(value) for value in users.dictionary.to_pylist()),
        numbers[codes],
        source.actions.astype(np.int32),
        source.timestamps,
        source.labels,
    )
    rows, repeated = _without_repeats(rows)
    notes = source.facts.notes
    if repeated:
        notes = (*notes, f"{repeated} rows that repeated an earlier one in every column were left out.")
    titles = tuple(source.titles.get(ids[i], ids[i]) for i in by_id) if source.titles else None
    return Imported(
        replace(source.facts, notes=notes), Items(tuple(ids[i] for i in by_id), titles), rows, source.licence_text
    )


def _empty(column: pa.Array) -> int:
    """How many texts of a column of texts are empty or of spaces alone."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return 0
    return int(pc.sum(pc.equal(pc.utf8_trim_whitespace(column), "")).as_py() or 0)


def _without_repeats(rows: Behaviours) -> tuple[Behaviours, int]:
    """The rows, each of several equal ones at its first place; and how many that leaves out.

    Where labels are unknown, so may be times: there, equal rows may be several behaviours, and all stay.
    """
    packed = np.column_stack((rows.users, rows.items, rows.actions, rows.timestamps, rows.labels))
    order = np.lexsort(packed.T[::-1])
    ordered = packed[order]
    repeats = np.zeros(len(rows), bool)
    repeats[order[1:]] = (ordered[1:] == ordered[:-1]).all(axis=1)  # lexsort is stable: the first of equals comes first
    repeats &= (rows.labels != UNKNOWN).all(axis=1)
    if not repeats.any():
        return rows, 0
    keep = ~repeats
    kept = Behaviours(
        rows.users[keep],
        rows.names,
        rows.items[keep],
        rows.actions[keep],
        rows.timestamps[keep],
        rows.labels[keep],
    )
    return kept, int(repeats.sum())


def read_table(path: Path, columns: Sequence[str]) -> pa.Table:
    """These columns of a Parquet or CSV file (.csv, .csv.gz, .tsv)."""
    if path.suffix == ".parquet":
        try:
            there = pq.read_schema(path).names
            require_columns(path, there, columns)
            return pq.read_table(path, columns=list(dict.fromkeys(columns)))
        except (OSError, pa.ArrowException) as error:
            raise InvalidInput("source", f"{path} cannot be read as Parquet: {error}") from error
    table = read_csv(path, "\t" if ".tsv" in path.suffixes else ",")
    require_columns(path, table.column_names, columns)
    return table.select(list(dict.fromkeys(columns)))


def read_csv(path: Path, delimiter: str = ",", *, quoted: bool = True) -> pa.Table:
    """All columns of a CSV file with a header."""
    options = csv.ParseOptions(delimiter=delimiter, quote_char='"' if quoted else False)
    try:
        return csv.read_csv(path, parse_options=options)
    except (OSError, pa.ArrowException) as error:
        raise InvalidInput("source", f"{path} cannot be read as CSV: {error}") from error


def column_integers(table: pa.Table, column: str, source: str | Path) -> npt.NDArray[np.int64]:
    """A column of whole numbers, without gaps; floats are taken where they are whole."""
    values: Any = table[column]
    if values.null_count:
        raise InvalidInput(column, f"of {source} is missing in {values.null_count} rows")
    try:
        return np.asarray(values.combine_chunks().cast(pa.int64()).to_numpy(), np.int64)
    except pa.ArrowException as error:
        raise InvalidInput(column, f"of {source} must hold whole numbers: {error}") from error
