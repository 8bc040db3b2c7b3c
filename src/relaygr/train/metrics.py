"""How good scores are."""

import math

import numpy as np
import numpy.typing as npt

from relaygr.errors import InvalidInput

__all__ = ["auc", "calibration", "hit_rate", "ndcg", "normalized_entropy"]

Floats = npt.NDArray[np.float64]


def hit_rate(ranks: npt.NDArray[np.int64], k: int) -> float:
    """The share of targets among the first k; ranks count from 1."""
    return float((ranks <= k).mean())


def ndcg(ranks: npt.NDArray[np.int64], k: int) -> float:
    """Mean of 1 / log2(1 + rank) over targets, 0 behind the first k. One target each, so the ideal is 1."""
    return float(np.where(ranks <= k, 1 / np.log2(1.0 + ranks), 0.0).mean())


def auc(labels: npt.NDArray[np.generic], scores: npt.NDArray[np.generic]) -> float:
    """The chance that a positive scores above a negative, ties counting half. NaN where one kind is missing."""
    positive = _flags(labels, scores)
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2  # the mean of the ranks that equal scores share
    ranks = middle[inverse]
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return math.nan
    return float((ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def normalized_entropy(labels: npt.NDArray[np.generic], logits: npt.NDArray[np.generic]) -> float:
    """Cross-entropy over that of always saying the mean: below 1 is better than that. NaN where one kind is missing."""
    positive = _flags(labels, logits)
    x = np.asarray(logits, np.float64)
    rate = float(positive.mean())
    if not 0 < rate < 1:
        return math.nan
    cross = float((np.logaddexp(0, x) - np.where(positive, x, 0.0)).mean())
    return cross / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def calibration(labels: npt.NDArray[np.generic], logits: npt.NDArray[np.generic]) -> float:
    """Predicted positives over real ones: 1 is right on the whole. NaN where there is none."""
    positive = _flags(labels, logits)
    predicted = np.exp(-np.logaddexp(0, -np.asarray(logits, np.float64)))
    return float(predicted.sum() / positive.sum()) if positive.any() else math.nan


def _flags(labels: npt.NDArray[np.generic], scores: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    if labels.shape != scores.shape or labels.ndim != 1 or not len(labels):
        raise InvalidInput("labels", f"of shape {labels.shape} do not go with scores of shape {scores.shape}")
    return np.asarray(labels) > 0
