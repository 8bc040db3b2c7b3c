"""The Triton kernels compute what `reference.py` defines."""

from typing import Final

import pytest
import torch

from optional import require
from paged_batches import LAYER, Case, make_case, relative_error
from relaygr.kernels import ReferenceAttention, Silu, Softmax, Weighting, attention_for

require("triton", "pip install relaygr[triton]")

from relaygr.kernels.triton import TritonAttention  # noqa: E402

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES: Final = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TOLERANCE: Final = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 5e-3}
if DEVICE == "cuda":
    TOLERANCE[torch.float32] = 1e-3  # the hardware's tanh is good to 2⁻¹¹

WEIGHTINGS: Final[list[Weighting]] = [Silu(scale=0.25, length=64.0), Softmax(scale=0.25)]
APPENDS: Final = [
    ([1], [0]),
    ([128], [0]),
    ([129], [0]),
    ([5], [127]),
    ([1], [128]),
    ([40, 0, 3, 130], [0, 50, 126, 128]),
    ([2, 2, 2], [255, 256, 257]),
]
SCORES: Final = [
    ([1], [0]),
    ([1], [1]),
    ([3], [128]),
    ([70], [300]),
    ([1, 0, 130, 4], [0, 7, 129, 512]),
    ([2, 65], [640, 300]),
]


def _triton(hopper: bool = True) -> TritonAttention:
    return TritonAttention(hopper=hopper)


def _silence_free_room(case: Case) -> Case:
    """The definition multiplies what it masks by zero, so it reads a pool without NaN."""
    wide = case.wide()
    wide.pages.nan_to_num_(0.0)
    return wide


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "cached"), APPENDS)
def test_write_puts_new_tokens_into_their_pages_and_touches_nothing_else(
    rows: list[int], cached: list[int], dtype: torch.dtype
) -> None:
    case = make_case(rows, cached, dtype=dtype, device=DEVICE, reach=True)
    expected = case.pages.clone()
    ReferenceAttention().write(case.k, case.v, expected, LAYER, case.batch)
    _triton().write(case.k, case.v, case.pages, LAYER, case.batch)
    assert torch.equal(case.pages.nan_to_num(-7.0), expected.nan_to_num(-7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda w: type(w).__name__)
@pytest.mark.parametrize(("rows", "cached"), APPENDS)
def test_append_is_what_is_defined(
    rows: list[int], cached: list[int], weighting: Weighting, dtype: torch.dtype
) -> None:
    case = make_case(rows, cached, dtype=dtype, device=DEVICE, reach=True)
    ReferenceAttention().write(case.k, case.v, case.pages, LAYER, case.batch)
    wide = _silence_free_room(case)
    expected = ReferenceAttention().append(weighting, wide.q, wide.pages, LAYER, case.batch)
    for hopper in (False, True) if DEVICE == "cuda" else (False,):
        result = _triton(hopper).append(weighting, case.q, case.pages, LAYER, case.batch)
        assert result.shape == case.q.shape
        assert result.dtype == dtype
        assert relative_error(result, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda w: type(w).__name__)
@pytest.mark.parametrize(("rows", "cached"), SCORES)
def test_score_is_what_is_defined(rows: list[int], cached: list[int], weighting: Weighting, dtype: torch.dtype) -> None:
    case = make_case(rows, cached, dtype=dtype, device=DEVICE, reach=False)
    before = case.pages.clone()
    wide = _silence_free_room(case)
    expected = ReferenceAttention().score(weighting, wide.q, wide.k, wide.v, wide.pages, LAYER, case.batch)
    for hopper in (False, True) if DEVICE == "cuda" else (False,):
        result = _triton(hopper).score(weighting, case.q, case.k, case.v, case.pages, LAYER, case.batch)
        assert result.dtype == dtype
        assert relative_error(result, expected) <= TOLERANCE[dtype]
    assert torch.equal(case.pages.nan_to_num(-7.0), before.nan_to_num(-7.0)), "score writes nothing"


@pytest.mark.parametrize("head_dim", [48, 64, 128, 256])
def test_every_head_dim_gives_what_is_defined(head_dim: int) -> None:
    weighting = Silu(scale=head_dim**-0.5, length=100.0)
    case = make_case([30, 4], [140, 0], heads=1, head_dim=head_dim, dtype=torch.float16, device=DEVICE, reach=True)
    ReferenceAttention().write(case.k, case.v, case.pages, LAYER, case.batch)
    wide = _silence_free_room(case)
    expected = ReferenceAttention().append(weighting, wide.q, wide.pages, LAYER, case.batch)
    assert relative_error(_triton().append(weighting, case.q, case.pages, LAYER, case.batch), expected) <= 2e-3
    case = make_case([30, 4], [140, 0], heads=1, head_dim=head_dim, dtype=torch.float16, device=DEVICE, reach=False)
    wide = _silence_free_room(case)
    expected = ReferenceAttention().score(weighting, wide.q, wide.k, wide.v, wide.pages, LAYER, case.batch)
    result = _triton().score(weighting, case.q, case.k, case.v, case.pages, LAYER, case.batch)
    assert relative_error(result, expected) <= 2e-3


def test_rows_may_be_views_into_wider_rows() -> None:
    weighting = WEIGHTINGS[0]
    case = make_case([20], [130], dtype=torch.float16, device=DEVICE, reach=False)
    wide = torch.cat([case.q.flatten(1), case.k.flatten(1), case.v.flatten(1)], dim=1)
    q, k, v = (part.view(case.q.shape) for part in wide.chunk(3, dim=1))
    attention = _triton()
    assert torch.equal(
        attention.score(weighting, q, k, v, case.pages, LAYER, case.batch),
        attention.score(weighting, case.q, case.k, case.v, case.pages, LAYER, case.batch),
    )


def test_a_score_does_not_depend_on_who_shares_the_batch() -> None:
    both = make_case([20, 3], [700, 129], dtype=torch.float16, device=DEVICE, reach=False)
    rows = slice(0, 20)
    alone = make_case([20], [700], dtype=torch.float16, device=DEVICE, reach=False)
    table = both.batch.table[:1]
    batch = type(both.batch)((20,), (700,), alone.batch.starts, alone.batch.cached, table)
    weighting, attention = WEIGHTINGS[0], _triton()
    together = attention.score(weighting, both.q, both.k, both.v, both.pages, LAYER, both.batch)[rows]
    single = attention.score(weighting, both.q[rows], both.k[rows], both.v[rows], both.pages, LAYER, batch)
    assert torch.equal(together, single)


def test_cutting_a_history_into_appends_changes_no_bit_of_attention() -> None:
    whole = make_case([200], [0], dtype=torch.float16, device=DEVICE, reach=True)
    attention, weighting = _triton(), WEIGHTINGS[0]
    attention.write(whole.k, whole.v, whole.pages, LAYER, whole.batch)
    expected = attention.append(weighting, whole.q, whole.pages, LAYER, whole.batch)
    late = type(whole.batch).build([70], [130], [whole.batch.table[0].tolist()], DEVICE)
    assert torch.equal(attention.append(weighting, whole.q[130:], whole.pages, LAYER, late), expected[130:])


def test_a_device_lends_its_own_lengths_within_the_hosts_bounds() -> None:
    """A captured launch is planned from the host's numbers and replayed with smaller ones on the device."""
    case = make_case([9], [300], dtype=torch.float16, device=DEVICE, reach=False)
    bound = type(case.batch)((64,), (1000,), case.batch.starts, case.batch.cached, case.batch.table)
    weighting, attention = WEIGHTINGS[0], _triton()
    exact = attention.score(weighting, case.q, case.k, case.v, case.pages, LAYER, case.batch)
    assert torch.equal(attention.score(weighting, case.q, case.k, case.v, case.pages, LAYER, bound), exact)


def test_without_a_gpu_the_definition_runs() -> None:
    assert isinstance(attention_for("cpu"), ReferenceAttention)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_on_a_gpu_the_kernels_run() -> None:
    assert isinstance(attention_for("cuda"), TritonAttention)
