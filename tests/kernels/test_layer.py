"""The fused parts of an HSTU layer compute what their plain forms define."""

from typing import Final

import pytest
import torch

from optional import require
from paged_batches import LAYER, make_case
from relaygr.kernels import Ragged, ReferenceAttention, Silu, Softmax, Weighting
from relaygr.kernels.layer import (
    LayerWeights,
    Norm,
    finish,
    finish_plain,
    project,
    project_into,
    project_plain,
    score,
)

require("triton", "pip install relaygr[triton]")

from relaygr.kernels import layer_triton  # noqa: E402
from relaygr.kernels.triton import TritonAttention  # noqa: E402

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE: Final = {torch.float32: 3e-6 if DEVICE == "cpu" else 1e-3, torch.float16: 2e-3, torch.bfloat16: 8e-3}
DTYPES: Final = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
HEADS, HEAD_DIM, DIM = 2, 32, 96
WEIGHTINGS: Final[list[Weighting]] = [Silu(scale=0.25, length=64.0), Softmax(scale=0.25)]


def _random(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(DEVICE, dtype)


def _norm(width: int, dtype: torch.dtype) -> Norm:
    return Norm(_random(width, dtype=dtype) + 1, _random(width, dtype=dtype), 1e-6)


def _wide(norm: Norm) -> Norm:
    return Norm(norm.weight.double(), norm.bias.double(), norm.eps)


def _error(result: torch.Tensor, reference: torch.Tensor) -> float:
    assert result.isfinite().all()
    return float((result.double() - reference).norm() / reference.norm())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("silu_all", [False, True])
@pytest.mark.parametrize("rows", [1, 70])
def test_projection_is_what_is_defined(rows: int, silu_all: bool, dtype: torch.dtype) -> None:
    width = HEADS * HEAD_DIM
    x, norm = _random(rows, DIM, dtype=dtype), _norm(DIM, dtype)
    weight, bias = _random(DIM, 4 * width, dtype=dtype, scale=DIM**-0.5), _random(4 * width, dtype=dtype)
    expected = project_plain(x.double(), _wide(norm), weight.double(), bias.double(), HEADS, silu_all=silu_all)
    got = layer_triton.project(x, norm, weight, bias, silu_all=silu_all)
    for part, wanted in zip(got.chunk(4, dim=-1), expected, strict=True):
        assert _error(part, wanted.reshape(rows, width)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("silu_all", [False, True])
def test_projection_puts_keys_and_values_into_their_pages(silu_all: bool) -> None:
    dtype, width = torch.float16, HEADS * HEAD_DIM
    case = make_case([3, 0, 130], [127, 5, 0], heads=HEADS, head_dim=HEAD_DIM, dtype=dtype, device=DEVICE, reach=True)
    rows = case.batch.total
    x, norm = _random(rows, DIM, dtype=dtype), _norm(DIM, dtype)
    weight, bias = _random(DIM, 4 * width, dtype=dtype, scale=DIM**-0.5), _random(4 * width, dtype=dtype)
    flat = layer_triton.project(x, norm, weight, bias, silu_all=silu_all)
    u, v, q, k = flat.chunk(4, dim=-1)
    expected = case.pages.clone()
    shape = (rows, HEADS, HEAD_DIM)
    ReferenceAttention().write(k.reshape(shape), v.reshape(shape), expected, LAYER, case.batch)
    got = layer_triton.project(
        x, norm, weight, bias, silu_all=silu_all, pages=case.pages, layer=LAYER, batch=case.batch
    )
    assert torch.equal(got, torch.cat((u, q), dim=-1))
    assert torch.equal(case.pages.nan_to_num(-7.0), expected.nan_to_num(-7.0))


def test_rows_of_nobody_go_into_no_page() -> None:
    dtype, width = torch.float16, HEADS * HEAD_DIM
    case = make_case([3, 2], [127, 5], heads=HEADS, head_dim=HEAD_DIM, dtype=dtype, device=DEVICE, reach=True)
    bound = Ragged.bound(3, 5, 2, DEVICE)
    bound.starts.copy_(torch.tensor([0, 3, 5, 5]))
    bound.cached[:2] = case.batch.cached
    bound.table[:2] = case.batch.table
    x, norm = _random(bound.total, DIM, dtype=dtype), _norm(DIM, dtype)
    weight, bias = _random(DIM, 4 * width, dtype=dtype, scale=DIM**-0.5), _random(4 * width, dtype=dtype)
    written = case.pages.clone()
    exact = layer_triton.project(
        x[:5], norm, weight, bias, silu_all=False, pages=case.pages, layer=LAYER, batch=case.batch
    )
    padded = layer_triton.project(x, norm, weight, bias, silu_all=False, pages=written, layer=LAYER, batch=bound)
    assert torch.equal(padded[:5], exact)
    assert torch.equal(written.nan_to_num(-7.0), case.pages.nan_to_num(-7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize("rows", [1, 70])
def test_the_end_of_a_layer_is_what_is_defined(rows: int, concat: bool, dtype: torch.dtype) -> None:
    width = HEADS * HEAD_DIM
    x, norm = _random(rows, DIM, dtype=dtype), _norm(width, dtype)
    wider, a = _random(rows, 2 * width, dtype=dtype), _random(rows, HEADS, HEAD_DIM, dtype=dtype)
    u = wider[:, :width]
    weight = _random((3 if concat else 1) * width, DIM, dtype=dtype, scale=width**-0.5)
    expected = finish_plain(x.double(), u.double(), a.double(), _wide(norm), weight.double(), concat=concat)
    got = layer_triton.finish(x, u, a.flatten(1), norm, weight, concat=concat)
    assert _error(got, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("silu_all", "concat"), [(False, True), (True, False)])
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda w: type(w).__name__)
def test_a_layer_of_candidates_is_what_is_defined(
    weighting: Weighting, silu_all: bool, concat: bool, dtype: torch.dtype
) -> None:
    heads, width = 3, 3 * HEAD_DIM  # no power of two
    case = make_case([3, 0, 18], [300, 5, 130], heads=heads, head_dim=HEAD_DIM, dtype=dtype, device=DEVICE, reach=False)
    x = _random(case.batch.total, DIM, dtype=dtype)
    weights = LayerWeights(
        _norm(DIM, dtype),
        _random(DIM, 4 * width, dtype=dtype, scale=DIM**-0.5),
        _random(4 * width, dtype=dtype),
        _norm(width, dtype),
        _random((3 if concat else 1) * width, DIM, dtype=dtype, scale=width**-0.5),
        silu_all=silu_all,
        concat=concat,
    )
    wide = weights._replace(
        before=_wide(weights.before),
        uvqk=weights.uvqk.double(),
        bias=weights.bias.double(),
        after=_wide(weights.after),
        output=weights.output.double(),
    )
    pages = case.pages.double().nan_to_num_(0.0)
    expected = score(ReferenceAttention(), weighting, x.double(), wide, pages, LAYER, case.batch)
    got = TritonAttention().score_layer(weighting, x, weights, case.pages, LAYER, case.batch)
    assert _error(got, expected) <= TOLERANCE[dtype]


def test_one_call_serves_every_device() -> None:
    width = HEADS * HEAD_DIM
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    case = make_case([3, 4], [127, 0], heads=HEADS, head_dim=HEAD_DIM, dtype=dtype, device=DEVICE, reach=True)
    x, norm = _random(case.batch.total, DIM, dtype=dtype), _norm(DIM, dtype)
    weight, bias = _random(DIM, 4 * width, dtype=dtype, scale=DIM**-0.5), _random(4 * width, dtype=dtype)
    with torch.inference_mode():
        projected = project(x, norm, weight, bias, HEADS, silu_all=False)
        expected = case.pages.clone()
        ReferenceAttention().write(projected.k, projected.v, expected, LAYER, case.batch)
        u, q = project_into(ReferenceAttention(), x, norm, weight, bias, case.pages, LAYER, case.batch, silu_all=False)
        assert torch.equal(u, projected.u)
        assert torch.equal(q, projected.q)
        assert torch.equal(case.pages.nan_to_num(-7.0), expected.nan_to_num(-7.0))
        end = finish(x, u, q, _norm(width, dtype), _random(width, DIM, dtype=dtype), concat=False)
    assert end.shape == x.shape


@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 33, 70])
def test_rows_past_the_limit_are_left_alone(rows: int, concat: bool) -> None:
    dtype, width = torch.float16, HEADS * HEAD_DIM
    x, u, a, norm = _random(70, DIM, dtype=dtype), _random(70, width), _random(70, width), _norm(width, dtype)
    u, a = u.to(dtype), a.to(dtype)
    weight = _random((3 if concat else 1) * width, DIM, dtype=dtype, scale=width**-0.5)
    limit = torch.tensor([rows], dtype=torch.int32, device=DEVICE)
    got = layer_triton.finish(x, u, a, norm, weight, concat=concat, limit=limit)[:rows]
    expected = layer_triton.finish(x[:rows], u[:rows], a[:rows], norm, weight, concat=concat)
    assert torch.equal(got, expected)
