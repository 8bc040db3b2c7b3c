"""A batch in one buffer: what is packed comes out, aligned, with room to spare or none."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from behaviours import numbered
from relaygr import Candidates
from relaygr.model import build_model
from relaygr.model.batch import AppendBatch, AppendRow, ScoreBatch, ScoreRow
from relaygr.model.packed import BatchShape, Packed
from relaygr.model.tokens import candidate_tokens

MODEL = build_model(
    "hstu", layers=1, dim=8, heads=1, items=50, seed=0, scale_length=1.0, request_features=2, candidate_features=3
)


@given(st.integers(0, 5), st.integers(0, 9), st.integers(0, 7), st.none() | st.integers(0, 3))
def test_every_part_begins_at_sixteen_bytes_and_none_overlaps(
    users: int, rows: int, pages: int, features: int | None
) -> None:
    packed = Packed.empty(BatchShape(users, rows, pages, features))
    packed.words.zero_()
    own = [packed.tokens] if features is None else [packed.positions, packed.items]
    parts = [packed.starts, packed.cached, packed.table, *own]
    for part in parts if packed.dense is None else [*parts, packed.dense]:
        assert part.storage_offset() % 4 == 0
        part += 1
    assert int((packed.words != 0).sum()) == sum(part.numel() for part in parts) + rows * (features or 0)
    assert packed.words.max() <= torch.tensor(1.0).view(torch.int32)


def _score_rows(draw: np.random.Generator, users: int) -> list[ScoreRow]:
    rows = []
    for _ in range(users):
        count, tokens = int(draw.integers(1, 9)), int(draw.integers(0, 400))
        features = draw.random((count, 3), np.float32) if draw.random() < 0.5 else None
        candidates = Candidates(draw.integers(0, 90, count), features)
        request = draw.random(2, np.float32) if draw.random() < 0.5 else None
        rows.append(ScoreRow(candidates, request, tokens, tokens, draw.integers(0, 99, -(-tokens // 128)).tolist()))
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_in_a_larger_buffer_is_the_batch_and_harmless_rows(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = _score_rows(draw, 3)
    exact = ScoreBatch.pack(MODEL.config, rows)
    roomy = Packed.empty(BatchShape(5, 64, 9, 5))
    roomy.words.fill_(-1)
    ScoreBatch.fill(roomy, MODEL.config, rows)
    total = exact.ragged.total
    assert torch.equal(roomy.items[:total], exact.items)
    assert not roomy.items[total:].any()
    assert roomy.positions.tolist() == [*exact.positions.tolist(), 0, 0]
    assert roomy.dense is not None
    assert exact.dense is not None
    assert torch.equal(roomy.dense[:total], exact.dense)
    assert not roomy.dense[total:].any()
    assert roomy.starts.tolist() == [*exact.ragged.starts.tolist(), total, total]
    assert roomy.cached.tolist() == [*exact.ragged.cached.tolist(), 0, 0]
    for user, row in enumerate(rows):
        assert roomy.table[user, : len(row.pages)].tolist() == row.pages


def test_a_buffer_used_again_holds_what_its_own_batch_says() -> None:
    """Whatever was there before: more rows or fewer, of a model with more items or fewer."""
    draw = np.random.default_rng(0)
    packed, appended = Packed.empty(BatchShape(5, 64, 9, 5)), Packed.empty(BatchShape(5, 64, 9))
    history = numbered(40)
    for _ in range(60):
        if draw.random() < 0.3:
            low, high = sorted(draw.choice(41, 2, replace=False).tolist())
            append = [AppendRow(history, np.empty(0, np.int64), low, high, [1])]
            AppendBatch.fill(appended, MODEL.config, append)
            assert torch.equal(appended.tokens[: high - low], AppendBatch.pack(MODEL.config, append).tokens)
            assert not appended.tokens[high - low :].any()
            continue
        rows = _score_rows(draw, int(draw.integers(1, 5)))
        ScoreBatch.fill(packed, MODEL.config, rows)
        batch = ScoreBatch.pack(MODEL.config, rows)
        total, users = batch.ragged.total, len(rows)
        assert torch.equal(packed.items[:total], batch.items)
        assert not packed.items[total:].any()
        assert packed.positions.tolist() == [*batch.positions.tolist(), *[0] * (5 - users)]
        assert packed.starts.tolist() == [*batch.ragged.starts.tolist(), *[total] * (5 - users)]
        assert packed.cached.tolist() == [*batch.ragged.cached.tolist(), *[0] * (5 - users)]


def test_pages_that_do_not_fit_into_their_line_are_refused() -> None:
    packed = Packed.empty(BatchShape(2, 8, 3, 5))
    with pytest.raises(ValueError, match="take 20 bytes where there is room for 12"):
        ScoreBatch.fill(packed, MODEL.config, [ScoreRow(Candidates([1]), None, 0, 0, [1, 2, 3, 4, 5])])


def test_candidates_stand_for_the_tokens_they_are_defined_as() -> None:
    draw = np.random.default_rng(2)
    rows = _score_rows(draw, 4)
    batch = ScoreBatch.pack(MODEL.config, rows)
    for user, row in enumerate(rows):
        tokens = candidate_tokens(MODEL.config, row.candidates.items, row.position)
        own = slice(int(batch.ragged.starts[user]), int(batch.ragged.starts[user + 1]))
        assert batch.items[own].tolist() == tokens[:, 0].tolist()
        assert set(tokens[:, 3].tolist()) == {int(batch.positions[user])}


def test_appends_are_packed_in_the_order_of_their_rows() -> None:
    histories = [numbered(20, salt=salt) for salt in range(2)]
    context = np.array([3], np.int64)
    rows = [AppendRow(histories[0], context, 5, 12, [4]), AppendRow(histories[1], context, 0, 21, [7])]
    packed = Packed.empty(BatchShape(3, 40, 2))
    AppendBatch.fill(packed, MODEL.config, rows)
    both = AppendBatch.pack(MODEL.config, rows)
    each = [AppendBatch.pack(MODEL.config, [row]).tokens for row in rows]
    assert torch.equal(both.tokens, torch.cat(each))
    assert torch.equal(packed.tokens[:28], both.tokens)
    assert packed.starts.tolist() == [0, 7, 28, 28]
    assert packed.cached.tolist() == [5, 0, 0]
