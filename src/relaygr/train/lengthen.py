"""Longer histories from real ones: each user's own behaviour, resampled. What comes out is synthetic, and says so.

A user's history is cut into sessions, where more than half an hour passed. New sessions are drawn from the user's own,
and put before the first real one, each a gap before the next that is drawn from the user's own gaps between sessions.
Inside a session the behaviours keep their order and gaps; a tenth of its items are replaced by others that the user
met, so that no session is a plain copy. The real history stays at the end, as it was.

    real                                  ▒▒▒ ▒▒ ▒▒▒▒▒
    lengthened    ░░ ░░░ ░░░░░ ░░░ ░░ ░░░ ▒▒▒ ▒▒ ▒▒▒▒▒
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr.errors import InvalidInput
from relaygr.train.dataset import UNKNOWN, Behaviours, Dataset, Facts
from relaygr.train.importing import Imported

__all__ = ["lengthen", "quantile_lengths"]

_SESSION_S: Final = 1800
_OTHER: Final = 0.1
_FIRST_GAP_S: Final = 86_400
"""Between sessions of a user who has had one only."""

Ints = npt.NDArray[np.int64]


def quantile_lengths(
    quantiles: Sequence[tuple[float, float]],
) -> Callable[[np.random.Generator, int], Ints]:
    """Draws lengths from a distribution given by points (share of users, length), between which it is log-linear."""
    shares, lengths = np.array([share for share, _ in quantiles]), np.array([length for _, length in quantiles])
    if len(shares) < 1 or (np.diff(shares) <= 0).any() or shares.min() < 0 or shares.max() > 1:
        raise InvalidInput("lengths", "must be points SHARE:LENGTH with shares rising from 0 to 1")
    if (lengths < 1).any() or (np.diff(lengths) < 0).any():
        raise InvalidInput("lengths", "must be at least 1 and not fall")

    def draw(random: np.random.Generator, users: int) -> Ints:
        drawn = np.exp(np.interp(random.random(users), shares, np.log(lengths)))
        return np.asarray(np.rint(drawn), np.int64)

    return draw


def lengthen(
    dataset: Dataset,
    draw: Callable[[np.random.Generator, int], Ints],
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Imported:
    """The data set with each user's history grown to a length from `draw`; one that is longer stays as it is.

    Made-up behaviours have no labels: they are history and never examples. Their times are before the real ones.
    """
    random = np.random.default_rng(seed)
    wanted = draw(random, dataset.users)
    parts: list[tuple[Ints, Ints, Ints, Ints, npt.NDArray[np.int8]]] = []
    for user in range(dataset.users):
        low, high = int(dataset.offsets[user]), int(dataset.offsets[user + 1])
        real = slice(low, high)
        made = _before(random, dataset, low, high, int(wanted[user]) - (high - low))
        count = len(made[0])
        unknown = np.full((count, dataset.labels.shape[1]), UNKNOWN, np.int8)
        parts.append(
            (
                np.full(count + high - low, user, np.int64),
                np.concatenate((made[0], dataset.items[real])),
                np.concatenate((made[1], dataset.actions[real])),
                np.concatenate((made[2], dataset.timestamps[real])),
                np.concatenate((unknown, dataset.labels[real])),
            )
        )
        progress(user + 1, dataset.users)
    users, items, actions, times, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
    rows = Behaviours(users, dataset.names, items, actions.astype(np.int32), times, labels)
    facts: Facts = replace(
        dataset.facts,
        name=f"{dataset.facts.name}-lengthened",
        synthetic=True,
        notes=(
            *dataset.facts.notes,
            f"Synthetic: histories were lengthened from {len(dataset)} to {len(rows)} behaviours (seed {seed}) by "
            "resampling each user's own sessions before their first real one.",
        ),
    )
    return Imported(facts, dataset.catalogue, rows, dataset.licence_text)


def _before(random: np.random.Generator, dataset: Dataset, low: int, high: int, count: int) -> tuple[Ints, Ints, Ints]:
    """Items, actions and times of `count` behaviours, made of those of rows low … high, that end before the first."""
    none = np.empty(0, np.int64)
    if count <= 0 or high <= low:
        return none, none, none
    items, actions = dataset.items[low:high], dataset.actions[low:high].astype(np.int64)
    gaps = np.diff(dataset.timestamps[low:high], prepend=dataset.timestamps[low])
    breaks = np.flatnonzero(gaps > _SESSION_S)
    starts = np.concatenate(([0], breaks))
    stops = np.concatenate((breaks, [high - low]))
    between = gaps[breaks] if len(breaks) else np.array([_FIRST_GAP_S])
    sizes = stops - starts
    chosen: list[int] = []
    total = 0
    while total < count:
        more = random.integers(0, len(starts), max(1, (count - total) // max(1, int(sizes.mean()))))
        chosen += more.tolist()
        total += int(sizes[more].sum())
    sessions = [np.arange(starts[session], stops[session]) for session in chosen]
    rows = np.concatenate(sessions)
    inside = gaps[rows]
    firsts = np.cumsum([len(session) for session in sessions])[:-1]
    inside[firsts] = random.choice(between, len(firsts))
    rows, inside = rows[-count:], inside[-count:]
    last = int(dataset.timestamps[low]) - int(random.choice(between))
    times = np.maximum(last - np.concatenate((np.cumsum(inside[:0:-1])[::-1], [0])), 0)  # nothing is before 1970
    changed = items[rows]
    other = random.random(count) < _OTHER
    changed[other] = random.choice(items, int(other.sum()))
    return changed, actions[rows], times
