"""Scores of a trained model on targets, offline: next items over the whole catalogue, and ranking."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from relaygr.model import RankingModel
from relaygr.train.dataset import Dataset
from relaygr.train.forward import forward, scores_of
from relaygr.train.metrics import auc, calibration, hit_rate, ndcg, normalized_entropy
from relaygr.train.objectives import item_vectors, query_vectors
from relaygr.train.sequences import Batch, Sequences
from relaygr.train.split import Targets

__all__ = ["next_item_metrics", "next_item_ranks", "ranking_metrics", "ranking_scores"]

_TOKENS = 2**16
"""Tokens of a batch, padding included."""


def next_item_ranks(
    model: RankingModel,
    sequences: Sequences,
    dataset: Dataset,
    targets: Targets,
    length: int,
    *,
    leave_out_all: bool = False,
) -> npt.NDArray[np.int64]:
    """Where each target's item stands among all items, from 1, by the newest `length` behaviours before it.

    Items among those behaviours are left out, or with `leave_out_all` those of all behaviours before it. Of equal
    scores the item of the lower number is first.
    """
    ranks = np.empty(len(targets), np.int64)
    with torch.inference_mode():
        items = item_vectors(model)
        for chosen, batch, wanted in _batches(sequences, dataset, targets, length):
            last = (batch.lengths - 1).clamp(min=0)
            history = forward(model, batch.tokens).history
            queries = query_vectors(model, history[torch.arange(len(history), device=history.device), last])
            scores = queries @ items.T
            seen = torch.where(batch.valid, batch.tokens[..., 0], wanted[:, None])
            own = scores.gather(1, wanted[:, None])
            scores.scatter_(1, seen, -torch.inf)
            if leave_out_all:
                scores[_seen_before(dataset, targets, chosen)] = -torch.inf
            scores.scatter_(1, wanted[:, None], own)
            before = torch.arange(len(items), device=scores.device) < wanted[:, None]
            ahead = (scores > own) | ((scores == own) & before)
            ranks[chosen] = (ahead.sum(1) + 1).cpu().numpy()
    return ranks


def _seen_before(
    dataset: Dataset, targets: Targets, chosen: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row of the chosen target, and item, for every behaviour before each of them."""
    firsts, places = dataset.offsets[targets.users[chosen]], targets.places[chosen]
    items = [dataset.items[first : first + place] for first, place in zip(firsts, places, strict=True)]
    return np.repeat(np.arange(len(chosen)), places), np.concatenate(items)


def next_item_metrics(ranks: npt.NDArray[np.int64]) -> dict[str, float]:
    return {**{f"hr@{k}": hit_rate(ranks, k) for k in (10, 50, 200)}, "ndcg@10": ndcg(ranks, 10)}


def ranking_scores(
    model: RankingModel, sequences: Sequences, dataset: Dataset, targets: Targets, length: int
) -> npt.NDArray[np.float32]:
    """Logits [targets, tasks] of each target as the candidate behind the newest `length` behaviours before it."""
    scores = np.empty((len(targets), model.config.tasks), np.float32)
    with torch.inference_mode():
        for chosen, batch, wanted in _batches(sequences, dataset, targets, length):
            sees = batch.lengths[:, None]
            candidates = sequences.candidates(wanted[:, None], sees)
            found = forward(model, batch.tokens, candidates, sees).candidates
            assert found is not None
            scores[chosen] = scores_of(model, found)[:, 0].float().cpu().numpy()
    return scores


def ranking_metrics(dataset: Dataset, targets: Targets, scores: npt.NDArray[np.float32]) -> dict[str, dict[str, float]]:
    """For each label: AUC, normalized entropy, calibration, and how often it is positive."""
    labels = dataset.labels[dataset.offsets[targets.users] + targets.places]
    found = {}
    for task, name in enumerate(dataset.facts.labels):
        own, logits = labels[:, task], scores[:, task]
        found[name] = {
            "auc": auc(own, logits),
            "normalized_entropy": normalized_entropy(own, logits),
            "calibration": calibration(own, logits),
            "positive": float((own > 0).mean()),
        }
    return found


def _batches(
    sequences: Sequences, dataset: Dataset, targets: Targets, length: int
) -> Iterator[tuple[npt.NDArray[np.int64], Batch, torch.Tensor]]:
    """Which targets, the behaviours before them, and their items: batches of like lengths, so that little is padded."""
    stops = dataset.offsets[targets.users] + targets.places
    lengths = np.minimum(targets.places, length)
    order = np.argsort(lengths, kind="stable")
    low = 0
    while low < len(order):
        high = low + 1
        while high < len(order) and (high + 1 - low) * max(int(lengths[order[high]]), 1) <= _TOKENS:
            high += 1
        chosen = order[low:high]
        longest = max(int(lengths[chosen].max()), 1)
        starts, counts, wanted = (
            torch.from_numpy(values[chosen]).to(sequences.device)
            for values in (stops - lengths, lengths, dataset.items[stops])
        )
        yield chosen, sequences.windows(starts, counts, longest), wanted
        low = high
