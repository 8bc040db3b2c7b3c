"""The Triton kernels compute what `reference.py` defines."""

import random
from collections.abc import Callable
from typing import Final

import pytest
import torch

from optional import require
from paged_batches import LAYER, Case, make_case, relative_error
from relaygr.history import PAGE
from relaygr.kernels import PageLayout, Ragged, ReferenceAttention, Silu, Softmax, Weighting, attention_for

require("triton", "pip install relaygr[triton]")

from relaygr.kernels import triton as launches  # noqa: E402
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
    ([20, 128, 1], [700, 300, 0]),
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


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda w: type(w).__name__)
@pytest.mark.parametrize("new", [150, 128, 1])
@pytest.mark.parametrize("split", [True, False])
def test_cutting_a_history_into_appends_changes_no_bit_of_attention_where_keys_are_not_split(
    new: int, split: bool, weighting: Weighting, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not split:  # as where the blocks of rows alone fill the device
        monkeypatch.setattr(launches, "_APPEND_TARGET", 0)
    length = 300
    whole = make_case([length], [0], dtype=torch.float16, device=DEVICE, reach=True)
    attention = _triton()
    attention.write(whole.k, whole.v, whole.pages, LAYER, whole.batch)
    expected = attention.append(weighting, whole.q, whole.pages, LAYER, whole.batch)[length - new :]
    late = type(whole.batch).build([new], [length - new], [whole.batch.table[0].tolist()], DEVICE)
    got = attention.append(weighting, whole.q[length - new :], whole.pages, LAYER, late)
    if not split:
        assert torch.equal(got, expected)
    else:
        assert relative_error(got, expected.double()) <= TOLERANCE[torch.float16]


def test_an_append_does_not_depend_on_who_shares_the_batch() -> None:
    case = make_case([20, 3, 128], [700, 129, 0], dtype=torch.float16, device=DEVICE, reach=True)
    weighting, attention = WEIGHTINGS[0], _triton()
    attention.write(case.k, case.v, case.pages, LAYER, case.batch)
    together = attention.append(weighting, case.q, case.pages, LAYER, case.batch)
    alone = type(case.batch).build([20], [700], [case.batch.table[0].tolist()], DEVICE)
    assert torch.equal(attention.append(weighting, case.q[:20], case.pages, LAYER, alone), together[:20])


def _within_bounds(generator: random.Random, users: int, rows: int, tokens: int) -> tuple[list[int], list[int]]:
    """Rows and cached tokens of up to `users` users, some of them empty; few rows take the most splits."""
    present = generator.randint(1, users)
    counts = [generator.choice([0, 1, generator.randint(1, rows), rows]) for _ in range(present)]
    return counts, [generator.choice([0, 1, generator.randint(0, tokens), tokens]) for _ in range(present)]


def _bound(case: Case, users: int, rows: int, pages: int) -> tuple[Ragged, Callable[[torch.Tensor], torch.Tensor]]:
    """The case in a batch of bounds, as a captured launch holds it, and how its rows get their padding, NaN."""
    bound, present = Ragged.bound(users, rows, pages, DEVICE), len(case.batch.rows)
    bound.starts[: present + 1] = case.batch.starts
    bound.starts[present + 1 :] = case.batch.starts[-1]
    bound.cached[:present] = case.batch.cached
    bound.table[:present, : case.batch.table.shape[1]] = case.batch.table

    def pad(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x.new_full((users * rows - len(x), *x.shape[1:]), torch.nan)))

    return bound, pad


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda w: type(w).__name__)
@pytest.mark.parametrize("seed", range(6))
def test_a_score_captured_with_bounds_is_that_of_the_batch_within_them(seed: int, weighting: Weighting) -> None:
    """A launch is planned from the host's bounds and replayed with other users: not a bit of a row may differ."""
    users, most, pages = 3, 150, 7
    rows, cached = _within_bounds(random.Random(seed), users, most, pages * PAGE)
    case = make_case(rows, cached, heads=1, dtype=torch.float16, device=DEVICE, reach=False, seed=seed)
    bound, pad = _bound(case, users, most, pages)
    for hopper in (False, True) if DEVICE == "cuda" else (False,):
        attention = _triton(hopper)
        exact = attention.score(weighting, case.q, case.k, case.v, case.pages, LAYER, case.batch)
        padded = attention.score(weighting, pad(case.q), pad(case.k), pad(case.v), case.pages, LAYER, bound)
        assert torch.equal(padded[: len(exact)], exact)


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda w: type(w).__name__)
@pytest.mark.parametrize("seed", range(4))
def test_an_append_captured_with_bounds_is_that_of_the_batch_within_them(seed: int, weighting: Weighting) -> None:
    users, most, pages = 3, 40, 3
    rows, cached = _within_bounds(random.Random(seed), users, most, pages * PAGE - most)
    case = make_case(rows, cached, heads=1, dtype=torch.float16, device=DEVICE, reach=True, seed=seed)
    bound, pad = _bound(case, users, most, pages)
    for hopper in (False, True) if DEVICE == "cuda" else (False,):
        attention, written = _triton(hopper), case.pages.clone()
        attention.write(pad(case.k), pad(case.v), written, LAYER, bound)
        attention.write(case.k, case.v, case.pages, LAYER, case.batch)
        assert torch.equal(written.nan_to_num(-7.0), case.pages.nan_to_num(-7.0))
        exact = attention.append(weighting, case.q, case.pages, LAYER, case.batch)
        assert torch.equal(attention.append(weighting, pad(case.q), case.pages, LAYER, bound)[: len(exact)], exact)


def test_bounds_hold_nobody_until_someone_is_put_there() -> None:
    bound = Ragged.bound(2, 5, 3, DEVICE)
    assert bound.total == 10
    q = torch.full((10, 1, 32), torch.nan, dtype=torch.float16, device=DEVICE)
    pages = PageLayout(1, 1, 32, torch.float16).allocate(2, device=DEVICE).fill_(1.0)
    attention = _triton()
    attention.write(q, q, pages, 0, bound)
    assert attention.score(WEIGHTINGS[0], q, q, q, pages, 0, bound).shape == q.shape
    assert attention.append(WEIGHTINGS[0], q, pages, 0, bound).shape == q.shape
    assert (pages == 1).all()
    assert bound.row_users().tolist() == [1] * 10, "a row of nobody has the last user's positions"
    assert bound.token_positions().max() < 10


def test_without_a_gpu_the_definition_runs() -> None:
    assert isinstance(attention_for("cpu"), ReferenceAttention)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_on_a_gpu_the_kernels_run() -> None:
    assert isinstance(attention_for("cuda"), TritonAttention)
