"""Batches are padded to buckets; what is padding changes nothing and is written nowhere."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from optional import require
from paged import random_history
from relaygr import Candidates
from relaygr.engine.buckets import APPEND_BUCKETS, SCORE_BUCKETS, Bucket, append_buckets, grouped, score_buckets
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


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=80))
def test_groups_hold_every_row_once_and_fit_their_bucket(rows: list[int]) -> None:
    groups = grouped(SCORE_BUCKETS, tuple(rows))
    assert sorted(index for group in groups for index in group.members) == list(range(len(rows)))
    for members, bucket, each in groups:
        assert each == tuple(rows[index] for index in members)
        if bucket is None:
            assert rows[members[0]] > max(each.rows for each in SCORE_BUCKETS)
        else:
            fits = [each for each in SCORE_BUCKETS if each.users >= len(members)]
            fits = [each for each in fits if each.rows >= max(rows[index] for index in members)]
            assert bucket.total == min(each.total for each in fits)


@pytest.mark.parametrize(
    ("rows", "buckets"),
    [
        ([512] * 16, [(16, 512)]),
        ([512] * 20, [(32, 512)]),
        ([2048] * 17, [(16, 2048), (1, 2048)]),
        ([3, 500, 7], [(4, 512)]),
        ([2049, 1], [None, (1, 128)]),
        ([1] * 40, [(32, 128), (8, 128)]),
    ],
)
def test_scores_are_replayed_in_as_few_groups_as_fit(rows: list[int], buckets: list[tuple[int, int] | None]) -> None:
    assert [group.bucket for group in grouped(SCORE_BUCKETS, tuple(rows))] == buckets


@pytest.mark.parametrize(("rows", "buckets"), [([16] * 16, [(16, 128)]), ([16384], [(1, 16384)]), ([16385], [None])])
def test_larger_appends_are_not_replayed(rows: list[int], buckets: list[tuple[int, int] | None]) -> None:
    assert [group.bucket for group in grouped(APPEND_BUCKETS, tuple(rows))] == buckets


def test_products_that_do_not_skip_padding_get_no_more_of_it() -> None:
    assert [group.bucket for group in grouped(append_buckets("hstu"), (4096, 16))] == [(4, 4096)]
    assert [group.bucket for group in grouped(append_buckets("softmax"), (4096, 16))] == [(1, 4096), (1, 128)]
    assert [group.bucket for group in grouped(append_buckets("softmax"), (14_000,))] == [(1, 16384)]
    five = (2048,) * 5
    assert [group.bucket for group in grouped(score_buckets("hstu"), five)] == [(8, 2048)]
    assert [group.bucket for group in grouped(score_buckets("softmax"), five)] == [(4, 2048), (1, 2048)]


def test_buckets_are_bounded() -> None:
    assert max(bucket.total for bucket in SCORE_BUCKETS) <= 32768
    assert max(bucket.total for bucket in APPEND_BUCKETS) <= 16384


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
                packed, ragged = _padded(Bucket(3, 130), None)
                AppendBatch.fill(packed, model.config, rows)
                model.append(AppendBatch(packed.tokens, ragged), pages)
            else:
                model.append(AppendBatch.pack(model.config, rows), pages)
        scored = [
            ScoreRow(Candidates(draw_items), None, length, length, mine)
            for draw_items, length, mine in zip(([3, 9, 4], [1, 7]), lengths, owned, strict=True)
        ]
        if padded:
            packed, ragged = _padded(Bucket(4, 5), 0)
            ScoreBatch.fill(packed, model.config, scored)
            scores = model.score(ScoreBatch(packed.items, packed.positions, None, ragged), pages)[:5]
        else:
            scores = model.score(ScoreBatch.pack(model.config, scored), pages)
        results.append((pages, scores))
    (pages, scores), (padded_pages, padded_scores) = results
    assert torch.allclose(scores, padded_scores, atol=1e-5)
    assert torch.allclose(pages, padded_pages, atol=1e-5)
    assert (padded_pages[6] == 7.0).all()


def _padded(bucket: Bucket, features: int | None) -> tuple[Packed, Ragged]:
    packed = Packed.empty(bucket.shape(LONGEST, features))
    lengths = (LONGEST * PAGE,) * bucket.users
    rows = (bucket.rows,) * bucket.users
    return packed, Ragged(rows, lengths, packed.starts, packed.cached, packed.table, bounded=True)
