"""Tokens as rows of embedding tables: what a model reads of a history, a context, a candidate.

A token is four row numbers, one in each table; its embedding is the sum of the rows.

    token      | table                     | kinds                 | gaps        | positions
    -----------+---------------------------+-----------------------+-------------+-----------
    context j  | items + row(id, contexts) | actions + 1 + j       | none        | none
    behaviour i| row(item, items)          | action                | bucket(gap) | bucket(i)
    candidate  | row(item, items)          | actions (the marker)  | none        | bucket(n)

Everything a token holds depends on it and on the tokens before it alone, so what follows never changes it.
"""

import functools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr.history import History
from relaygr.model.candidates import Candidates
from relaygr.model.config import MAX_CONTEXT, ModelConfig

__all__ = [
    "GAP_ROWS",
    "POSITION_ROWS",
    "candidate_marks",
    "candidate_tokens",
    "history_tokens",
    "kind_rows",
    "log_bucket",
    "position_row",
    "table_row",
    "table_rows",
    "write_dense",
    "write_history_tokens",
    "write_item_rows",
]

Rows = npt.NDArray[np.int64]

_MANTISSA: Final = 52
_BIAS: Final = 1023
"""Of a float64: bits of its mantissa, and what its exponent is counted from."""
_GAP_BITS: Final = 2
_GAP_LIMIT: Final = 2**31 - 1
_POSITION_BITS: Final = 7
_POSITION_LIMIT: Final = 2**24 - 1
_REMEMBERED: Final = 2**18
"""Positions whose buckets are computed once."""


def log_bucket(values: Rows, bits: int) -> Rows:
    """Integer buckets that widen with the value: exact below 2^(bits+1), then 2^bits buckets to each octave.

    For values up to 2^53. From 2^bits on, a bucket is what a float64 begins with, exponent and first bits, counted from
    another number; below, that would be less than the value.
    """
    buckets: Rows = values.astype(np.float64).view(np.int64)
    buckets >>= _MANTISSA - bits
    buckets -= (_BIAS - 1 + bits) << bits
    return np.maximum(buckets, np.minimum(values, 1 << bits), out=buckets)


def _last_bucket(limit: int, bits: int) -> int:
    return int(log_bucket(np.array([limit], np.int64), bits)[0])


_NO_GAP: Final = _last_bucket(_GAP_LIMIT, _GAP_BITS) + 1
_NO_POSITION: Final = _last_bucket(_POSITION_LIMIT, _POSITION_BITS) + 1
GAP_ROWS: Final = _NO_GAP + 1
POSITION_ROWS: Final = _NO_POSITION + 1


def table_rows(config: ModelConfig) -> int:
    """Rows of the table that ids look up: items, then contexts."""
    return config.items + config.contexts


def kind_rows(config: ModelConfig) -> int:
    """Rows for what a token is: an action, a candidate, or a slot of the context."""
    return config.actions + 1 + MAX_CONTEXT


def table_row(ids: Rows, rows: int) -> Rows:
    """The row of each id: its own where there is one, else a hash of it."""
    if ids.size == 0 or int(ids.max()) < rows:
        return ids
    mixed = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return np.where(ids < rows, ids, (mixed % np.uint64(rows)).astype(np.int64))


def history_tokens(config: ModelConfig, history: History, context: Rows, low: int, high: int) -> Rows:
    """Tokens low … high of context and history, [high - low, 4]. Reads no more of the history than that."""
    tokens = np.empty((high - low, 4), np.int64)
    write_history_tokens(config, [(history, context, low, high)], tokens)
    return tokens


def write_history_tokens(
    config: ModelConfig, parts: Sequence[tuple[History, Rows, int, int]], out: npt.NDArray[np.integer]
) -> None:
    """`history_tokens` of many users, one behind the other, into `out` [rows, 4]."""
    columns: list[tuple[Rows, npt.NDArray[np.int32], Rows]] = []
    places = []
    begin = 0
    for history, context, low, high in parts:
        split = min(max(len(context) - low, 0), high - low)
        if split:
            _write_context(config, context, low, low + split, out[begin : begin + split])
        first, last = low + split - len(context), high - len(context)
        if first < last:
            columns.append((history.items[first:last], history.actions[first:last], history.gaps(first, last)))
            places.append(slice(begin + split, begin + high - low))
            out[places[-1], 3] = _positions(first, last)
        begin += high - low
    if not columns:
        return
    items, actions, gaps = (
        np.concatenate(column) if len(column) > 1 else column[0] for column in zip(*columns, strict=True)
    )
    whole = table_row(items, config.items), actions, log_bucket(np.minimum(gaps, _GAP_LIMIT), _GAP_BITS)
    begin = 0
    for place in places:
        end = begin + place.stop - place.start
        for number, column in enumerate(whole):
            out[place, number] = column[begin:end]
        begin = end


def _write_context(config: ModelConfig, context: Rows, low: int, high: int, out: npt.NDArray[np.integer]) -> None:
    out[:, 0] = config.items + table_row(context[low:high], config.contexts)
    out[:, 1] = config.actions + 1 + np.arange(low, high)
    out[:, 2] = _NO_GAP
    out[:, 3] = _NO_POSITION


def _positions(first: int, last: int) -> Rows:
    """Buckets of the positions first … last - 1."""
    if last > _REMEMBERED:
        return log_bucket(np.minimum(np.arange(first, last), _POSITION_LIMIT), _POSITION_BITS)
    return _first_positions(1 << last.bit_length())[first:last]


@functools.cache
def _first_positions(count: int) -> Rows:
    return log_bucket(np.arange(count), _POSITION_BITS)


def candidate_tokens(config: ModelConfig, items: Rows, position: int) -> Rows:
    """Tokens of candidates that all stand at `position`, the length of the history; [m, 4]."""
    tokens = np.empty((len(items), 4), np.int64)
    tokens[:, 0] = table_row(items, config.items)
    tokens[:, 1], tokens[:, 2] = candidate_marks(config)
    tokens[:, 3] = position_row(position)
    return tokens


def candidate_marks(config: ModelConfig) -> tuple[int, int]:
    """The second and third number of every candidate's token: its kind, and that it has no gap."""
    return config.actions, _NO_GAP


def write_item_rows(
    config: ModelConfig, items: Sequence[npt.NDArray[np.integer]], highest: int, out: npt.NDArray[np.integer]
) -> None:
    """The first number of the tokens of many users' candidates. No item is above `highest`: where no id is hashed this
    is one call, since it is in the way of every step."""
    rows = items if highest < config.items else [table_row(each.astype(np.int64), config.items) for each in items]
    np.concatenate(rows, out=out, casting="unsafe")


def write_dense(
    config: ModelConfig, candidates: Candidates, request: npt.NDArray[np.float32] | None, out: npt.NDArray[np.float32]
) -> None:
    """The request's features, then the candidate's; zeros where not given."""
    split = config.request_features
    out[:, :split] = 0.0 if request is None else request
    out[:, split:] = 0.0 if candidates.features is None else candidates.features


@functools.lru_cache(1 << 16)
def position_row(position: int) -> int:
    """The last number of a token that stands there: `log_bucket` of one position."""
    position = min(position, _POSITION_LIMIT)
    shift = max(position.bit_length() - 1 - _POSITION_BITS, 0)
    return (shift << _POSITION_BITS) + (position >> shift)
