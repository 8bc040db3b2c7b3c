"""Tokens as rows of embedding tables: what a model reads of a history, a context, a candidate.

A token is four row numbers, one in each table; its embedding is the sum of the rows.

    token      | table                     | kinds                 | gaps        | positions
    -----------+---------------------------+-----------------------+-------------+-----------
    context j  | items + row(id, contexts) | actions + 1 + j       | none        | none
    behaviour i| row(item, items)          | action                | bucket(gap) | bucket(i)
    candidate  | row(item, items)          | actions (the marker)  | none        | bucket(n)

Everything a token holds depends on it and on the tokens before it alone, so what follows never changes it.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr.history import History
from relaygr.model.config import MAX_CONTEXT, ModelConfig

__all__ = [
    "GAP_ROWS",
    "POSITION_ROWS",
    "candidate_tokens",
    "history_tokens",
    "kind_rows",
    "log_bucket",
    "table_row",
    "table_rows",
    "write_candidate_tokens",
]

Rows = npt.NDArray[np.int64]

_GAP_BITS: Final = 2
_GAP_LIMIT: Final = 2**31 - 1
_POSITION_BITS: Final = 7
_POSITION_LIMIT: Final = 2**24 - 1


def log_bucket(values: Rows, bits: int) -> Rows:
    """Integer buckets that widen with the value: exact below 2^(bits+1), then 2^bits buckets to each octave."""
    exponent = np.frexp(np.maximum(values, 1).astype(np.float64))[1].astype(np.int64) - 1
    shift = np.maximum(exponent - bits, 0)
    return (shift << bits) + (values >> shift)


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
    split = min(max(len(context) - low, 0), high - low)
    if split:
        slots = np.arange(low, low + split)
        tokens[:split, 0] = config.items + table_row(context[low : low + split], config.contexts)
        tokens[:split, 1] = config.actions + 1 + slots
        tokens[:split, 2] = _NO_GAP
        tokens[:split, 3] = _NO_POSITION
    first, last = low + split - len(context), high - len(context)
    if first < last:
        tokens[split:, 0] = table_row(history.items[first:last], config.items)
        tokens[split:, 1] = history.actions[first:last]
        tokens[split:, 2] = log_bucket(np.minimum(history.gaps(first, last), _GAP_LIMIT), _GAP_BITS)
        tokens[split:, 3] = log_bucket(np.minimum(np.arange(first, last), _POSITION_LIMIT), _POSITION_BITS)
    return tokens


def candidate_tokens(config: ModelConfig, items: Rows, position: int) -> Rows:
    """Tokens of candidates that all stand at `position`, the length of the history; [m, 4]."""
    tokens = np.empty((len(items), 4), np.int64)
    write_candidate_tokens(config, items, [position], [len(items)], tokens)
    return tokens


def write_candidate_tokens(
    config: ModelConfig, items: Rows, positions: Sequence[int], counts: Sequence[int], out: npt.NDArray[np.integer]
) -> None:
    """Tokens of the candidates of many users, counts[u] of user u at positions[u], into `out` [m, 4]."""
    out[:, 0] = table_row(items, config.items)
    out[:, 1] = config.actions
    out[:, 2] = _NO_GAP
    buckets = log_bucket(np.minimum(np.asarray(positions, np.int64), _POSITION_LIMIT), _POSITION_BITS)
    out[:, 3] = np.repeat(buckets, counts)
