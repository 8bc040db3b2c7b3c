"""What one brings along to draw traffic from: users as they came, and lengths of histories as they are."""

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from relaygr.errors import InvalidInput
from relaygr.history import open_store
from relaygr.history.opening import REDIS, without_password
from relaygr.history.quantiles import Quantiles
from relaygr.lab.chains import Arrivals, Requests

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Recorded", "stored_lengths"]


class Recorded:
    """Chains: users of a recorded trace, with the gaps they had and, where recorded, the lengths of their histories.

    A rate is reached by how often users are repeated beside each other, each time beginning at any time: more often
    than they were recorded, or less. The seconds between two requests of a user stay what they were.
    """

    def __init__(
        self, at: npt.ArrayLike, user: npt.ArrayLike, source: str, length: npt.ArrayLike | None = None
    ) -> None:
        """One of each for every request, in any order. `length`: behaviours of the user then; none count as one."""
        times, names = np.asarray(at, np.float64), np.asarray(user)
        if times.ndim != 1 or times.shape != names.shape or not len(times) or not np.isfinite(times).all():
            raise InvalidInput("recorded", "must have as many times as users, at least one, all finite")
        _, users = np.unique(names, return_inverse=True)
        order = np.lexsort((times, users))
        self._at = np.round(times[order] - times.min(), 6)  # dates and seconds since long ago differ below that
        self._user = users[order]
        self._length = None if length is None else _lengths(length, len(times))[order]
        self.source = source
        self.seen = True

    @staticmethod
    def read(path: Path) -> "Recorded":
        """From a CSV (.csv, .csv.gz) or Parquet file with the columns user and at, and length where there is one.

        `at` is in seconds, from anywhere, or a date and time. Raises InvalidInput that tells the column.
        """
        table = _table(path)
        lengths = "length" in table.column_names
        return Recorded(
            _seconds(_column(table, "at", path), path),
            np.asarray(_column(table, "user", path).to_numpy()),
            f"recorded: {path.name}",
            _numbers(_column(table, "length", path), "length", path) if lengths else None,
        )

    @functools.cached_property
    def digest(self) -> str:
        """Of all that requests are drawn from, whatever file it came in: times, in microseconds since the first, whose
        they are, and lengths. Of users' names the order alone counts."""
        parts = [self._at, self._user, *([] if self._length is None else [self._length])]
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]

    @functools.cached_property
    def returning(self) -> bool:
        """Whether anybody comes twice."""
        return bool((np.diff(self._user) == 0).any())

    def returns_within(self, seconds: float) -> float:
        """Of all requests of users who were there before, the share that came so soon."""
        gaps = np.diff(self._at)[np.diff(self._user) == 0]
        return float((gaps < seconds).mean()) if len(gaps) else 1.0

    @functools.cached_property
    def lengths(self) -> Quantiles | None:
        """Of the histories that were ranked on; None where they were not recorded."""
        return None if self._length is None else Quantiles.of(self._length, self.source)

    def requests(
        self, random: np.random.Generator, rate: float, low: float, high: float, arrivals: Arrivals
    ) -> Requests:
        seconds = high - low
        # A user's requests before and after a gap as long as all of it cannot both be seen: each part comes by itself.
        follows = (np.diff(self._user, prepend=-1) == 0) & (np.diff(self._at, prepend=0.0) < seconds)
        first = np.flatnonzero(~follows)
        each = np.diff(np.append(first, len(follows)))
        span = self._at[first + each - 1] - self._at[first]
        part = np.repeat(np.arange(len(first)), random.poisson(rate / len(follows) * (span + seconds)))
        begun = random.uniform(low - span[part], high)
        # Of each copy only the run that may be seen, rounding allowed for: parts laid end to end, one search finds all.
        ends = np.append(0.0, np.cumsum(span))
        laid = np.repeat(ends[:-1], each) + (self._at - np.repeat(self._at[first], each))
        slack = 8 * np.spacing(ends[-1] + abs(low) + abs(high))
        bounds = first[part], first[part] + each[part]
        start = np.clip(np.searchsorted(laid, ends[part] + (low - begun) - slack), *bounds)
        end = np.clip(np.searchsorted(laid, ends[part] + (high - begun) + slack, "right"), *bounds)
        run = end - start
        user = np.repeat(np.arange(len(part)), run)
        index = np.arange(len(user)) + np.repeat(start - (np.cumsum(run) - run), run)
        at = begun[user] + (self._at[index] - self._at[first[part]][user])
        seen = (at >= low) & (at < high)
        return Requests(user[seen], at[seen], None if self._length is None else self._length[index[seen]])


def stored_lengths(name: str) -> Quantiles:
    """How many behaviours users of a store have, none counting as one: a folder, or redis://host:6379/0.

    Raises InvalidInput. What is told of it is without a password.
    """
    if not name.startswith(REDIS) and not (Path(name) / "data.mdb").exists():
        raise InvalidInput("lengths", f"{name} is no folder with a store: relaygr data store fills one")
    try:
        with open_store(name, readonly=True) as store:
            lengths = [max(store.length(user), 1) for user in store.users()]
    except InvalidInput as error:
        raise InvalidInput("lengths", f"of a store: {error.field} {error.problem}") from error
    shown = without_password(name)
    if not lengths:
        raise InvalidInput("lengths", f"{shown} has no users")
    return Quantiles.of(lengths, f"behaviours of {len(lengths):,} users in the store {shown}")


def _lengths(length: npt.ArrayLike, count: int) -> npt.NDArray[np.int64]:
    lengths = np.asarray(length)
    if lengths.shape != (count,) or not np.isfinite(lengths).all() or (lengths != np.rint(lengths)).any():
        raise InvalidInput("recorded", "length must be a whole number for each request")
    if lengths.min() < 0:
        raise InvalidInput("recorded", "length must not be negative")
    return np.maximum(lengths.astype(np.int64), 1)


def _table(path: Path) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    if not path.exists():
        raise InvalidInput("recorded", f"{path} does not exist")
    try:
        if path.name.lower().endswith((".csv", ".csv.gz")):
            missing = pyarrow.csv.ConvertOptions(null_values=[""], strings_can_be_null=True)  # users may be called NA
            return pyarrow.csv.read_csv(path, convert_options=missing)
        return pyarrow.parquet.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise InvalidInput("recorded", f"cannot be read from {path}: {error}") from error


def _column(table: "pa.Table", name: str, path: Path) -> "pa.ChunkedArray":
    if name not in table.column_names:
        raise InvalidInput("recorded", f"has no column {name!r}; {path} has {', '.join(table.column_names)}")
    column = table[name]
    if column.null_count:
        raise InvalidInput("recorded", f"has no {name!r} in {column.null_count} rows of {path}")
    return column


def _seconds(column: "pa.ChunkedArray", path: Path) -> npt.NDArray[np.float64]:
    import pyarrow as pa

    if not pa.types.is_timestamp(column.type):
        return _numbers(column, "at", path)
    return np.asarray(column.cast(pa.timestamp("us"), safe=False).cast(pa.int64()).to_numpy(), np.float64) / 1e6


def _numbers(column: "pa.ChunkedArray", name: str, path: Path) -> npt.NDArray[Any]:
    import pyarrow as pa

    try:
        return np.asarray(column.cast(pa.float64()).to_numpy(), np.float64)
    except pa.ArrowException as error:
        raise InvalidInput("recorded", f"column {name!r} of {path} must hold numbers: {error}") from error
