"""Answers checked against the model itself, run in full with plain kernels in float32, on nothing that was cached."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr.history import PAGE, History
from relaygr.kernels import attention_for
from relaygr.lab.run import Sample
from relaygr.model import AppendBatch, RankingModel, ScoreBatch
from relaygr.model.batch import AppendRow, ScoreRow
from relaygr.model.candidates import Candidates
from relaygr.model.inputs import NO_CONTEXT

__all__ = ["Checked", "check"]

_CHUNK: Final = 1024
_ROUNDING: Final = 1e-5
"""Of float32: what scores may differ by, in units of the largest."""


@dataclass(frozen=True)
class Checked:
    """Largest differences of scores over all samples."""

    samples: int
    difference: float
    """Between what was answered and full inference in the same precision."""
    allowed: float
    """In float32 what rounding explains; in others, how far full inference in them is from that in float32."""

    @property
    def holds(self) -> bool:
        return self.difference <= self.allowed


def check(model: RankingModel, samples: Sequence[Sample], device: str, dtype: str) -> Checked:
    """Compare what was answered with full inference: by the definition in float32, and in `dtype` with its kernels."""
    exact = copy.deepcopy(model).to(device=device, dtype=torch.float32)
    half = None
    if dtype != "float32":
        half = copy.deepcopy(model).to(device=device, dtype=getattr(torch, dtype))
        half.stack.attention = attention_for(torch.device(device))
    difference = allowed = 0.0
    for sample in samples:
        tasks = slice(sample.scores.shape[1])  # over HTTP, the first alone
        right = _scores(exact, sample.history, sample.candidates)[:, tasks]
        full = right if half is None else _scores(half, sample.history, sample.candidates)[:, tasks]
        rounding = _ROUNDING * max(1.0, float(np.abs(right).max()))
        noise = rounding if half is None else float(np.abs(full - right).max())
        difference, allowed = max(difference, float(np.abs(sample.scores - full).max())), max(allowed, noise)
    return Checked(len(samples), difference, allowed)


def _scores(model: RankingModel, history: History, items: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Of candidates on all of this history, computed here and now."""
    count = max(1, -(-len(history) // PAGE))
    pages, places = model.layout.allocate(count, device=model.device), np.arange(count)
    chunk = _CHUNK if model.layout.dtype is torch.float32 else max(len(history), 1)
    for low in range(0, len(history), chunk):
        row = AppendRow(history, NO_CONTEXT, low, min(low + chunk, len(history)), places)
        model.append(AppendBatch.pack(model.config, [row], model.device), pages)
    score = ScoreRow(Candidates(items), None, len(history), len(history), places)
    return np.asarray(model.score(ScoreBatch.pack(model.config, [score], model.device), pages).cpu().numpy())
