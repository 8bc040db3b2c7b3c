"""A trace: who asks when, and what stands around each request. One Parquet file, with how it was made."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from relaygr.errors import InvalidInput

__all__ = ["Trace"]

_KEY: Final = b"relaygr.trace"


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their times, as columns of equal length.

    Those before 0 are the past: what a server may have left of it is there when the experiment begins.
    """

    at: npt.NDArray[np.float64]
    """Seconds from the start."""
    user: npt.NDArray[np.int64]
    visit: npt.NDArray[np.int32]
    """How many requests of this user came before."""
    length: npt.NDArray[np.int32]
    """Behaviours of the user at that time."""
    new: npt.NDArray[np.int32]
    """Of these: since the user's request before."""
    candidates: npt.NDArray[np.int32]
    retrieval_ms: npt.NDArray[np.float32]
    pre_processing_ms: npt.NDArray[np.float32]
    made: dict[str, Any]
    """How it was made: the workload, its sources, and whether it is a hybrid of several."""

    def __post_init__(self) -> None:
        if len({len(column) for column in self._columns().values()}) != 1:
            raise InvalidInput("trace", "has columns of different lengths")
        if (np.diff(self.at) < 0).any():
            raise InvalidInput("at", "must not fall")

    def __len__(self) -> int:
        return len(self.at)

    @property
    def returning(self) -> float:
        """The share of requests, the past left out, whose user asked before."""
        present = self.at >= 0
        return float((self.visit[present] > 0).mean()) if present.any() else 0.0

    def save(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table({name: pa.array(column) for name, column in self._columns().items()})
        pq.write_table(table.replace_schema_metadata({_KEY: json.dumps(self.made).encode()}), path)

    @staticmethod
    def load(path: Path) -> "Trace":
        """Raises InvalidInput for a file that is no trace."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not path.exists():
            raise InvalidInput("trace", f"{path} does not exist")
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise InvalidInput("trace", f"cannot be read from {path}: {error}") from error
        made = (table.schema.metadata or {}).get(_KEY)
        if made is None:
            raise InvalidInput("trace", f"{path} was not written by relaygr lab workload")
        columns = {name: np.asarray(table[name]) for name in Trace._names()}
        return Trace(**columns, made=json.loads(made))

    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        return {name: getattr(self, name) for name in self._names()}

    @staticmethod
    def _names() -> list[str]:
        return [field.name for field in fields(Trace) if field.name != "made"]
