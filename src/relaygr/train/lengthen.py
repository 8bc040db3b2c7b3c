"""Data sets of longer histories, resampled from real ones. What comes out is synthetic, and says so."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from relaygr.errors import InvalidInput
from relaygr.history.longer import lengthened
from relaygr.train.dataset import UNKNOWN, Behaviours, Dataset, Facts
from relaygr.train.importing import Imported

__all__ = ["lengthen", "quantile_lengths"]

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
    histories, labels = [], []
    for user in range(dataset.users):
        real = dataset.history(user)
        histories.append(lengthened(real, int(wanted[user]), random))
        unknown = np.full((len(histories[-1]) - len(real), dataset.labels.shape[1]), UNKNOWN, np.int8)
        labels += [unknown, dataset.labels[dataset.offsets[user] : dataset.offsets[user + 1]]]
        progress(user + 1, dataset.users)
    rows = Behaviours(
        np.repeat(np.arange(dataset.users), [len(history) for history in histories]),
        dataset.names,
        np.concatenate([history.items for history in histories]),
        np.concatenate([history.actions for history in histories]),
        np.concatenate([history.timestamps for history in histories]),
        np.concatenate(labels),
    )
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
