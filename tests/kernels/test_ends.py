"""The fused embedding and head compute what their plain forms define."""

from typing import Final

import pytest
import torch

from optional import require
from relaygr.kernels.ends import HotRows, embed, embed_plain, head, head_plain
from relaygr.kernels.layer import Norm

require("triton", "pip install relaygr[triton]")

from relaygr.kernels import ends_triton  # noqa: E402

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE: Final = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
DTYPES: Final = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
ROWS: Final = {"table": 50, "kinds": 9, "gaps": 7, "positions": 11}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _tables(dim: int, dtype: torch.dtype) -> Tables:
    table, kinds, gaps, positions = (
        torch.randn(rows, dim, dtype=torch.float64).to(DEVICE, dtype) for rows in ROWS.values()
    )
    return table, kinds, gaps, positions


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
    table, kinds, gaps, positions = (each.double() for each in tables)
    expected = embed_plain(tokens, table, kinds, gaps, positions)
    assert _error(ends_triton.embed(tokens, *tables, None), expected) <= TOLERANCE[dtype]


def test_hot_rows_are_read_from_the_device_and_the_others_from_the_table() -> None:
    tables, tokens = _tables(64, torch.float32), _tokens(70, planar=True)
    expected = ends_triton.embed(tokens, *tables, None)
    slots = torch.full((ROWS["table"],), -1, dtype=torch.int32, device=DEVICE)
    warm = torch.randperm(ROWS["table"])[:20].to(DEVICE)
    slots[warm] = torch.arange(20, dtype=torch.int32, device=DEVICE)
    table = tables[0].clone()
    table[warm] = torch.nan
    got = ends_triton.embed(
        tokens, table, tables[1], tables[2], tables[3], HotRows(tables[0][warm].contiguous(), slots)
    )
    assert torch.equal(got, expected)


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
    empty = ends_triton.embed(_tokens(0, planar=True), *tables, None)
    assert empty.shape == (0, 32)
    norm = Norm(tables[0][0], tables[0][1], 1e-6)
    assert head(empty, norm, tables[1][0].view(32, 1), tables[1][0, :1]).shape == (0, 1)


@pytest.mark.skipif(DEVICE == "cpu", reason="the fused form is for a GPU")
def test_a_gpu_takes_the_fused_form() -> None:
    tables, tokens = _tables(96, torch.bfloat16), _tokens(70, planar=True)
    with torch.inference_mode():
        assert torch.equal(embed(tokens, *tables), ends_triton.embed(tokens, *tables, None))
