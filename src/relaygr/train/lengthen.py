"""Data sets of longer histories, resampled from real ones. What comes out is synthetic, and says so."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from relaygr.history.longer import lengthened
from relaygr.history.quantiles import Quantiles
from relaygr.train.dataset import UNKNOWN, Behaviours, Dataset, Facts
from relaygr.train.importing import Imported

__all__ = ["lengthen"]


def lengthen(
    dataset: Dataset,
    lengths: Quantiles,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Imported:
    """The data set with each user's history grown to a length drawn from `lengths`; one that is longer stays as it is.

    Made-up behaviours have no labels: they are history and never examples. Their times are before the real ones.
    """
    random = np.random.default_rng(seed)
    wanted = np.maximum(np.rint(lengths.draw(random, dataset.users)), 1)
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
