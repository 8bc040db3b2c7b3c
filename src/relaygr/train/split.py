"""Which behaviours a model learns from, which choose it, and which it is judged by."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from relaygr.errors import InvalidInput
from relaygr.train.dataset import UNKNOWN, Dataset

__all__ = ["Split", "SplitBy", "Targets", "split"]

SplitBy = Literal["leave-one-out", "time"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Targets:
    """Behaviours to predict, each from those of its user before it."""

    users: Ints
    places: Ints
    """Counted from the user's first behaviour, 0."""

    def __len__(self) -> int:
        return len(self.users)

    def sample(self, most: int, seed: int = 0) -> "Targets":
        """At most that many of them, drawn without replacement, in their order."""
        if len(self) <= most:
            return self
        chosen = np.sort(np.random.default_rng(seed).choice(len(self), most, replace=False))
        return Targets(self.users[chosen], self.places[chosen])


@dataclass(frozen=True)
class Split:
    """Behaviours 0 … train_stop of each user are learnt from; `valid` and `test` come later."""

    train_stop: Ints
    valid: Targets
    test: Targets
    about: str


def split(dataset: Dataset, by: SplitBy, *, train: float = 0.8, valid: float = 0.1) -> Split:
    """Split it.

    leave-one-out: each user's last behaviour is the test and the one before it the validation, for users with three
    and more. time: the first `train` of all behaviours with labels, by time, are learnt from, the next `valid` choose.
    """
    if by == "leave-one-out":
        return _leave_one_out(dataset)
    if by == "time":
        return _by_time(dataset, train, valid)
    raise InvalidInput("split", f"is {by!r}; choose from leave-one-out, time")


def _leave_one_out(dataset: Dataset) -> Split:
    lengths = dataset.lengths
    users = np.flatnonzero(lengths >= 3)
    stop = lengths.copy()
    stop[users] -= 2
    last = lengths[users] - 1
    about = "leave one out: each user's last behaviour is the test, the one before it chose the checkpoint"
    return Split(stop, Targets(users, last - 1), Targets(users, last), about)


def _by_time(dataset: Dataset, train: float, valid: float) -> Split:
    if not 0 < train < train + valid < 1:
        raise InvalidInput("split", f"must leave something to each part, not {train} and {valid}")
    times, users = dataset.timestamps, dataset.user_of_rows()
    known = (dataset.labels != UNKNOWN).all(axis=1)
    if not known.any():
        raise InvalidInput("labels", "are known of no behaviour")
    first, second = (int(np.quantile(times[known], share, method="higher")) for share in (train, train + valid))
    places = np.arange(len(dataset)) - dataset.offsets[users]
    stop = np.bincount(users[times < first], minlength=dataset.users)
    later = (known & (times >= first) & (times < second), known & (times >= second))
    parts = [Targets(users[rows], places[rows]) for rows in later]
    if not len(parts[0]) or not len(parts[1]):
        raise InvalidInput("timestamp", "too many are equal for a split by time")
    about = f"by time: behaviours before {first} were learnt from, those before {second} chose the checkpoint"
    return Split(stop, parts[0], parts[1], about)
