"""Batches are padded to buckets; what is padding changes nothing and is written nowhere."""

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from optional import require
from paged import random_history
from relaygr import Candidates
from relaygr.engine.buckets import APPEND_BUCKETS, SCORE_BUCKETS, Bucket, append_bucket, score_bucket
from relaygr.history import PAGE
from relaygr.kernels import PageLayout, Ragged
from relaygr.model import AppendBatch, ScoreBatch, build_model
from relaygr.model.batch import AppendRow, ScoreRow
from relaygr.model.config import Family
from relaygr.model.inputs import NO_CONTEXT
from relaygr.model.packed import Packed

require("triton", "pip install relaygr[triton]")

from relaygr.kernels.triton import TritonAttention  # noqa: E402

LONGEST = 2


def score_rows(counts: list[int]) -> list[ScoreRow]:
    return [ScoreRow(Candidates(np.arange(count)), None, 0, 0, []) for count in counts]


def append_rows(counts: list[int]) -> list[AppendRow]:
    history = random_history(np.random.default_rng(0), max(counts))
    return [AppendRow(history, NO_CONTEXT, 0, count, [0] * -(-count // PAGE)) for count in counts]


@pytest.mark.parametrize("counts", [[1], [128], [129], [512] * 16, [3, 500, 7], [2048], [1] * 32])
def test_the_smallest_bucket_that_takes_the_scores_is_taken(counts: list[int]) -> None:
    bucket = score_bucket(score_rows(counts))
    assert bucket is not None
    fits = [each for each in SCORE_BUCKETS if each.users >= len(counts) and each.rows >= max(counts)]
    assert bucket.total == min(each.total for each in fits)


@pytest.mark.parametrize("counts", [[2049], [512] * 33, [2048] * 5])
def test_scores_that_no_bucket_takes_run_as_they_are(counts: list[int]) -> None:
    assert score_bucket(score_rows(counts)) is None


@pytest.mark.parametrize(("counts", "taken"), [([16] * 16, True), ([8192], True), ([8193], False), ([1] * 17, False)])
def test_small_appends_have_a_bucket(counts: list[int], taken: bool) -> None:
    assert (append_bucket(append_rows(counts)) is not None) is taken


def test_buckets_are_bounded() -> None:
    assert max(bucket.total for bucket in SCORE_BUCKETS + APPEND_BUCKETS) <= 8192


@pytest.mark.parametrize("family", ["hstu", "softmax"])
@pytest.mark.parametrize("seed", range(2))
def test_a_padded_batch_is_the_batch(family: Family, seed: int) -> None:
    """As a replay runs it: launches planned from the bucket, what there is to do read from its inputs."""
    draw = np.random.default_rng(seed)
    scale_length = 300.0 if family == "hstu" else None
    model = build_model(family, layers=2, dim=32, heads=1, items=40, seed=seed, scale_length=scale_length)
    model.stack.attention = TritonAttention()
    layout = PageLayout(2, 1, 32)
    owned = [[0, 1], [4, 3]]
    lengths = [int(draw.integers(1, LONGEST * PAGE)) for _ in owned]
    histories = [random_history(draw, length) for length in lengths]
    results = []
    for padded in (False, True):
        pages = layout.allocate(7).fill_(7.0)
        for step in range(2):
            cuts = [(0, length // 2) if step == 0 else (length // 2, length) for length in lengths]
            rows = [
                AppendRow(history, NO_CONTEXT, low, high, mine)
                for history, (low, high), mine in zip(histories, cuts, owned, strict=True)
                if high > low
            ]
            if padded:
                packed, ragged = _padded(Bucket(3, 130))
                AppendBatch.fill(packed, model.config, rows)
                model.append(AppendBatch(packed.tokens, ragged), pages)
            else:
                model.append(AppendBatch.pack(model.config, rows), pages)
        scored = [
            ScoreRow(Candidates(draw_items), None, length, length, mine)
            for draw_items, length, mine in zip(([3, 9, 4], [1, 7]), lengths, owned, strict=True)
        ]
        if padded:
            packed, ragged = _padded(Bucket(4, 5))
            ScoreBatch.fill(packed, model.config, scored)
            scores = model.score(ScoreBatch(packed.tokens, None, ragged), pages)[:5]
        else:
            scores = model.score(ScoreBatch.pack(model.config, scored), pages)
        results.append((pages, scores))
    (pages, scores), (padded_pages, padded_scores) = results
    assert torch.allclose(scores, padded_scores, atol=1e-5)
    assert torch.allclose(pages, padded_pages, atol=1e-5)
    assert (padded_pages[6] == 7.0).all()


def _padded(bucket: Bucket) -> tuple[Packed, Ragged]:
    packed = Packed.empty(bucket.shape(LONGEST, 0))
    lengths = (LONGEST * PAGE,) * bucket.users
    rows = (bucket.rows,) * bucket.users
    return packed, Ragged(rows, lengths, packed.starts, packed.cached, packed.table, bounded=True)
