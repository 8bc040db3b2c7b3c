"""What became of every request, one row each: kept as Parquet, so that others can count for themselves."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from relaygr.errors import InvalidInput

__all__ = ["Record", "load_records", "save_records"]

_KEY: Final = b"relaygr.run"


class Record(NamedTuple):
    """One request, the past left out."""

    at: float
    """Seconds from the start: when it was to be sent."""
    user: int
    visit: int
    length: int
    """Behaviours ranked on, as asked for."""
    decision: str
    """What was decided about its signal."""
    path: str
    """What its rank needed; empty where it was not answered."""
    failure: str
    """Why it counts as failed; empty where it does not."""
    ranking_ms: float
    """From when ranking was to begin until it was answered or failed."""
    pipeline_ms: float
    """From when the request was to be sent."""
    late_in_full: bool
    """Whether, as its rank began, the queue and computing all of its history would have passed the ranking budget."""


def save_records(path: Path, records: Sequence[Record], made: dict[str, Any]) -> None:
    """With how they came to be, as the file's metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: [record[index] for record in records] for index, name in enumerate(Record._fields)})
    pq.write_table(table.replace_schema_metadata({_KEY: json.dumps(made).encode()}), path)


def load_records(path: Path) -> tuple[list[Record], dict[str, Any]]:
    """Raises InvalidInput for a file that holds none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise InvalidInput("records", f"cannot be read from {path}: {error}") from error
    made = (table.schema.metadata or {}).get(_KEY)
    if made is None:
        raise InvalidInput("records", f"{path} was not written by relaygr lab run")
    columns = [table[name].to_pylist() for name in Record._fields]
    return [Record(*row) for row in zip(*columns, strict=True)], json.loads(made)
