"""How sure figures are: intervals over users, drawn anew with replacement (bootstrap)."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from relaygr.train.metrics import auc

__all__ = ["Draws", "interval", "weighted_auc"]

Floats = npt.NDArray[np.float64]
Arrays = npt.NDArray[Any]


class Draws:
    """How often each target counts, in each of many draws of users; the first draw is everyone, once."""

    def __init__(self, users: Arrays, count: int, seed: int = 0) -> None:
        known, self._own = np.unique(users, return_inverse=True)
        random = np.random.default_rng(seed)
        drawn = random.multinomial(len(known), np.full(len(known), 1 / len(known)), count)
        self._counts = np.concatenate((np.ones((1, len(known)), np.int64), drawn))

    def __len__(self) -> int:
        return len(self._counts)

    def weights(self, draw: int) -> Arrays:
        """[targets]"""
        return np.asarray(self._counts[draw][self._own])

    def means(self, values: Arrays) -> Floats:
        """The mean of a value of each target, in every draw."""
        users = self._counts.shape[1]
        total, size = np.bincount(self._own, values, users), np.bincount(self._own, minlength=users)
        return np.asarray((self._counts @ total) / (self._counts @ size))

    def aucs(self, labels: Arrays, scores: Arrays) -> Floats:
        """AUC in every draw."""
        order = np.argsort(scores, kind="stable")
        ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
        positive = labels[order] > 0
        return np.array([weighted_auc(self.weights(draw)[order], positive, ends) for draw in range(len(self))])

    def aucs_within(self, labels: Arrays, scores: Arrays) -> Floats:
        """The mean of users' own AUCs by their targets, in every draw; users with one kind of label do not count."""
        users = self._counts.shape[1]
        own, size = np.zeros(users), np.zeros(users)
        for user, rows in enumerate(np.split(np.argsort(self._own, kind="stable"), self._ends())):
            value = auc(labels[rows], scores[rows])
            if not math.isnan(value):
                own[user], size[user] = value, len(rows)
        return np.asarray((self._counts @ (own * size)) / (self._counts @ size))

    def _ends(self) -> Arrays:
        """Where one user's targets end, in the order of users, but for the last user."""
        return np.cumsum(np.bincount(self._own))[:-1]


def weighted_auc(weights: Arrays, positive: Arrays, ends: Arrays) -> float:
    """AUC of targets in the order of their scores, each as often as its weight; `ends` are the last of equal scores."""
    below = np.concatenate(([0.0], np.cumsum(np.where(positive, 0, weights))[ends]))
    hits = np.diff(np.concatenate(([0.0], np.cumsum(np.where(positive, weights, 0))[ends])))
    return float((hits * (below[:-1] + below[1:]) / 2).sum() / (hits.sum() * below[-1]))


def interval(draws: Floats) -> dict[str, float]:
    """What came of everyone, and the middle 95% of the draws."""
    low, high = np.quantile(draws[1:], (0.025, 0.975))
    return {"value": round(float(draws[0]), 4), "low": round(float(low), 4), "high": round(float(high), 4)}
