"""The fused embedding and head compute what their plain forms define."""

from dataclasses import replace
from typing import Final

import pytest
import torch

from optional import require
from relaygr.kernels import Ragged
from relaygr.kernels.ends import (
    HotRows,
    Tables,
    embed,
    embed_candidates,
    embed_candidates_plain,
    embed_plain,
    head,
    head_plain,
)
from relaygr.kernels.layer import Norm

require("triton", "pip install relaygr[triton]")

from relaygr.kernels import ends_triton  # noqa: E402

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE: Final = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
DTYPES: Final = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
ROWS: Final = {"items": 50, "kinds": 9, "gaps": 7, "positions": 11}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def _tables(dim: int, dtype: torch.dtype) -> Tables:
    drawn = {name: torch.randn(rows, dim, dtype=torch.float64).to(DEVICE, dtype) for name, rows in ROWS.items()}
    return Tables(drawn["items"], drawn["kinds"], drawn["gaps"], drawn["positions"])


def _wide(tables: Tables) -> Tables:
    items, kinds, gaps, positions, _ = tables
    return Tables(items.double(), kinds.double(), gaps.double(), positions.double())


def _tokens(count: int, *, planar: bool) -> torch.Tensor:
    numbers = torch.stack([torch.randint(rows, (count,), dtype=torch.int32) for rows in ROWS.values()])
    tokens = numbers.t() if planar else numbers.t().contiguous()
    return tokens.to(DEVICE)


def _error(result: torch.Tensor, reference: torch.Tensor) -> float:
    assert result.isfinite().all()
    return float((result.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("planar", [True, False])
@pytest.mark.parametrize(("count", "dim"), [(1, 32), (70, 96)])
def test_an_embedding_is_the_sum_of_four_rows(count: int, dim: int, planar: bool, dtype: torch.dtype) -> None:
    tables, tokens = _tables(dim, dtype), _tokens(count, planar=planar)
    assert _error(ends_triton.embed(tokens, tables), embed_plain(tokens, _wide(tables))) <= TOLERANCE[dtype]


def _candidates(counts: list[int], behind: int = 0) -> tuple[torch.Tensor, torch.Tensor, Ragged, tuple[int, int]]:
    """Items, positions, whose they are, and marks; so many rows behind them belong to nobody."""
    items = torch.randint(ROWS["items"], (sum(counts) + behind,), dtype=torch.int32).to(DEVICE)
    positions = torch.randint(ROWS["positions"], (len(counts),), dtype=torch.int32).to(DEVICE)
    nobody: list[list[int]] = [[] for _ in counts]
    ragged = Ragged.build(counts, [0] * len(counts), nobody, DEVICE)
    rows = (*ragged.rows[:-1], ragged.rows[-1] + behind)
    return items, positions, replace(ragged, rows=rows), (ROWS["kinds"] - 1, ROWS["gaps"] - 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [[1], [3, 60, 0, 7], [0, 0, 5, 0], [2] * 33], ids=str)
def test_candidates_are_embedded_as_the_tokens_they_stand_for(counts: list[int], dtype: torch.dtype) -> None:
    tables = _tables(96, dtype)
    items, positions, ragged, marks = _candidates(counts, behind=3)
    own = positions.repeat_interleave(torch.tensor(counts, device=DEVICE))
    total = len(own)
    tokens = torch.stack([items[:total], *(torch.full_like(own, mark) for mark in marks), own]).t()
    plain = embed_candidates_plain(items, positions, ragged, marks, tables)
    assert torch.equal(plain[:total], embed_plain(tokens, tables))
    fused = ends_triton.embed_candidates(items, positions, ragged.starts, marks, tables)
    assert fused.isfinite().all()
    assert torch.equal(fused[:total], ends_triton.embed(tokens, tables))
    assert _error(fused[:total], embed_plain(tokens, _wide(tables))) <= TOLERANCE[dtype]


def test_hot_rows_are_read_from_the_device_and_the_others_from_the_table() -> None:
    tables, tokens = _tables(64, torch.float32), _tokens(70, planar=True)
    items, positions, ragged, marks = _candidates([30, 40])
    slots = torch.full((ROWS["items"],), -1, dtype=torch.int32, device=DEVICE)
    warm = torch.randperm(ROWS["items"])[:20].to(DEVICE)
    slots[warm] = torch.arange(20, dtype=torch.int32, device=DEVICE)
    cold = tables.items.clone()
    cold[warm] = torch.nan
    part = tables._replace(items=cold, hot=HotRows(tables.items[warm].contiguous(), slots))
    assert torch.equal(ends_triton.embed(tokens, part), ends_triton.embed(tokens, tables))
    scored, expected = (
        ends_triton.embed_candidates(items, positions, ragged.starts, marks, each) for each in (part, tables)
    )
    assert torch.equal(scored, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize(("count", "dim"), [(1, 32), (70, 96)])
def test_scores_are_the_norm_and_the_product(count: int, dim: int, tasks: int, dtype: torch.dtype) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)

    x, norm = draw(count, dim), Norm(draw(dim), draw(dim), 1e-6)
    weight, bias = draw(dim, tasks), draw(tasks)
    wide = Norm(norm.weight.double(), norm.bias.double(), norm.eps)
    expected = head_plain(x.double(), wide, weight.double(), bias.double()).double()
    got = ends_triton.head(x, norm.weight, norm.bias, norm.eps, weight, bias)
    assert got.dtype == torch.float32
    assert _error(got, expected) <= TOLERANCE[dtype]


def test_nothing_is_computed_for_no_rows() -> None:
    tables = _tables(32, torch.float32)
    empty = ends_triton.embed(_tokens(0, planar=True), tables)
    assert empty.shape == (0, 32)
    items, positions, ragged, marks = _candidates([0, 0])
    assert ends_triton.embed_candidates(items, positions, ragged.starts, marks, tables).shape == (0, 32)
    norm = Norm(tables.items[0], tables.items[1], 1e-6)
    assert head(empty, norm, tables.kinds[0].view(32, 1), tables.kinds[0, :1]).shape == (0, 1)


@pytest.mark.skipif(DEVICE == "cpu", reason="the fused form is for a GPU")
def test_a_gpu_takes_the_fused_form() -> None:
    tables, tokens = _tables(96, torch.bfloat16), _tokens(70, planar=True)
    with torch.inference_mode():
        assert torch.equal(embed(tokens, tables), ends_triton.embed(tokens, tables))
        items, positions, ragged, marks = _candidates([30, 40])
        fused = ends_triton.embed_candidates(items, positions, ragged.starts, marks, tables)
        assert torch.equal(embed_candidates(items, positions, ragged, marks, tables), fused)
