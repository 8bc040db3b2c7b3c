"""The definition of attention over pages, against attention written out densely in float64; its memory and its cost."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from relaygr.history import PAGE
from relaygr.kernels import PageLayout, Ragged, ReferenceAttention, Silu, Softmax, Weighting

WEIGHTINGS = [Silu(scale=0.3, length=70.0), Softmax(scale=0.3)]
every_weighting = pytest.mark.parametrize("weighting", WEIGHTINGS, ids=["silu", "softmax"])

LAYERS, LAYER = 3, 1
BATCHES = [
    ([1], [0]),
    ([5], [0]),
    ([128], [128]),
    ([130, 1, 77], [0, 500, 127]),
    ([0, 40, 0, 3], [10, 0, 0, 1]),
    ([1100, 300], [60, 1024]),
    ([40, 2100], [2040, 0]),
]


class Case:
    """Users with random K and V, in NaN-filled pages that lie anywhere."""

    def __init__(
        self,
        rows: Sequence[int],
        cached: Sequence[int],
        *,
        new: bool,
        heads: int = 2,
        dim: int = 8,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(count: int) -> torch.Tensor:
            return torch.randn(count, heads, dim, generator=generator).to(dtype)

        stored = [have + (more if new else 0) for more, have in zip(rows, cached, strict=True)]
        counts = [PageLayout.count(tokens) for tokens in stored]
        order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        self.table = [[order.pop() for _ in range(count)] for count in counts]
        self.pages = PageLayout(LAYERS, heads, dim, dtype).allocate(sum(counts) + 2).fill_(torch.nan)
        self.batch = Ragged.build(rows, cached, self.table)
        self.keys = [(draw(tokens), draw(tokens)) for tokens in stored]
        self.q, self.k, self.v = (draw(sum(rows)) for _ in range(3))
        for pages, (k, v) in zip(self.table, self.keys, strict=True):
            for token in range(len(k)):
                self.pages[pages[token // PAGE], LAYER, 0, token % PAGE] = k[token]
                self.pages[pages[token // PAGE], LAYER, 1, token % PAGE] = v[token]

    def dense(self, weighting: Weighting, *, candidates: bool) -> torch.Tensor:
        """The whole of it, one user after the other, every pair at once, in float64."""
        parts, first = [], 0
        for user, rows in enumerate(self.batch.rows):
            mine = slice(first, first + rows)
            q = self.q[mine].double()
            k, v = (part.double() for part in self.keys[user])
            logits = torch.einsum("qhd,khd->hqk", q, k) * weighting.scale
            if candidates:
                own = torch.einsum("qhd,qhd->hq", q, self.k[mine].double()) * weighting.scale
                weights = weigh(weighting, torch.cat((logits, own[..., None]), dim=-1))
                out = torch.einsum("hqk,khd->qhd", weights[..., :-1], v)
                out = out + weights[..., -1].T[..., None] * self.v[mine].double()
            else:
                seen = torch.arange(len(k)) <= torch.arange(rows)[:, None] + self.batch.lengths[user]
                out = torch.einsum("hqk,khd->qhd", weigh(weighting, logits.masked_fill(~seen, -torch.inf)), v)
            parts.append(out)
            first += rows
        return torch.cat(parts)


def weigh(weighting: Weighting, logits: torch.Tensor) -> torch.Tensor:
    if isinstance(weighting, Softmax):
        return torch.softmax(logits, dim=-1)
    return torch.nan_to_num(logits * torch.sigmoid(logits)) / weighting.length


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    if len(expected):
        assert (actual.double() - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


@every_weighting
@pytest.mark.parametrize(("rows", "cached"), BATCHES)
@pytest.mark.parametrize(("heads", "dim"), [(2, 8), (3, 4), (1, 32)])
def test_append_is_causal_attention(
    weighting: Weighting, rows: list[int], cached: list[int], heads: int, dim: int
) -> None:
    case = Case(rows, cached, new=True, heads=heads, dim=dim)
    out = ReferenceAttention().append(weighting, case.q, case.pages, LAYER, case.batch)
    assert_close(out, case.dense(weighting, candidates=False))


@every_weighting
@pytest.mark.parametrize(("rows", "cached"), BATCHES)
@pytest.mark.parametrize(("heads", "dim"), [(2, 8), (3, 4), (1, 32)])
def test_score_is_attention_over_the_past_and_oneself(
    weighting: Weighting, rows: list[int], cached: list[int], heads: int, dim: int
) -> None:
    case = Case(rows, cached, new=False, heads=heads, dim=dim)
    before = case.pages.view(torch.int32).clone()
    out = ReferenceAttention().score(weighting, case.q, case.k, case.v, case.pages, LAYER, case.batch)
    assert_close(out, case.dense(weighting, candidates=True))
    assert torch.equal(case.pages.view(torch.int32), before)


@every_weighting
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_sums_are_taken_in_fp32_at_least(weighting: Weighting, dtype: torch.dtype) -> None:
    """A result is off by the rounding of the result, not of the sum."""
    case = Case([70, 30], [600, 5], new=True, dtype=dtype)
    out = ReferenceAttention().append(weighting, case.q, case.pages, LAYER, case.batch)
    assert out.dtype == dtype
    tolerance = max(torch.finfo(dtype).eps, 1e-12)
    assert_close(out, case.dense(weighting, candidates=False), tolerance)
    case = Case([70, 30], [600, 5], new=False, dtype=dtype)
    out = ReferenceAttention().score(weighting, case.q, case.k, case.v, case.pages, LAYER, case.batch)
    assert out.dtype == dtype
    assert_close(out, case.dense(weighting, candidates=True), tolerance)


@every_weighting
def test_large_logits_stay_finite(weighting: Weighting) -> None:
    for dtype in (torch.float64, torch.float32):
        case = Case([300], [900], new=True, dtype=dtype)
        case.q *= 300
        out = ReferenceAttention().append(weighting, case.q, case.pages, LAYER, case.batch)
        assert out.isfinite().all()
        if dtype == torch.float64:  # a logit of 2000 in fp32 is itself off by more than scores may be
            assert_close(out, case.dense(weighting, candidates=False), 1e-10)


@pytest.mark.parametrize(("rows", "cached"), BATCHES)
def test_write_touches_the_slots_of_the_new_tokens_and_nothing_else(rows: list[int], cached: list[int]) -> None:
    case = Case(rows, cached, new=True)
    expected = case.pages.clone()
    first = 0
    for user, count in enumerate(rows):
        for i in range(count):
            page, slot = case.table[user][(cached[user] + i) // PAGE], (cached[user] + i) % PAGE
            expected[page, LAYER, 0, slot], expected[page, LAYER, 1, slot] = case.k[first + i], case.v[first + i]
        first += count
    ReferenceAttention().write(case.k, case.v, case.pages, LAYER, case.batch)
    assert torch.equal(case.pages.view(torch.int32), expected.view(torch.int32))


@every_weighting
def test_a_user_is_computed_bit_by_bit_the_same_in_any_company(weighting: Weighting) -> None:
    """Users are taken one after the other: the kernel's results do not even differ in rounding."""
    rows, cached = [130, 9, 77], [300, 0, 1100]
    for new in (True, False):
        case = Case(rows, cached, new=new)
        both = attend(weighting, case, case.batch, slice(None), new)
        first = 0
        for user, count in enumerate(rows):
            mine = slice(first, first + count)
            alone = Ragged.build([count], [cached[user]], [case.table[user]])
            assert torch.equal(attend(weighting, case, alone, mine, new), both[mine])
            first += count


def attend(weighting: Weighting, case: Case, batch: Ragged, mine: slice, new: bool) -> torch.Tensor:
    if new:
        return ReferenceAttention().append(weighting, case.q[mine], case.pages, LAYER, batch)
    return ReferenceAttention().score(weighting, case.q[mine], case.k[mine], case.v[mine], case.pages, LAYER, batch)


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch is asked for: the largest tensor made, and the work, multiplications and elements written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0
        self.work = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            if func.is_view:
                return result
            self.largest = max(self.largest, result.numel())
            inner = args[-1].shape[-2] if "bmm" in str(func) else 1
            self.work += result.numel() * inner
        return result


def metered(weighting: Weighting, rows: int, cached: int, *, new: bool) -> Meter:
    heads, dim = 2, 8
    stored = cached + (rows if new else 0)
    pages = PageLayout(1, heads, dim).allocate(PageLayout.count(stored)).normal_()
    batch = Ragged.build([rows], [cached], [list(range(len(pages)))])
    q = torch.randn(rows, heads, dim)
    meter = Meter()
    with meter:
        if new:
            ReferenceAttention().append(weighting, q, pages, 0, batch)
        else:
            ReferenceAttention().score(weighting, q, q, q, pages, 0, batch)
    return meter


@every_weighting
def test_memory_does_not_grow_with_the_history(weighting: Weighting) -> None:
    assert metered(weighting, 64, 16_384, new=False).largest == metered(weighting, 64, 2048, new=False).largest
    assert metered(weighting, 512, 15_872, new=True).largest == metered(weighting, 512, 1536, new=True).largest


@every_weighting
def test_no_step_holds_more_than_a_bounded_block_of_weights(weighting: Weighting) -> None:
    assert metered(weighting, 6000, 0, new=True).largest <= 2**20 < 6000**2
    assert metered(weighting, 3000, 8192, new=False).largest <= 2**20 < 3000 * 8192


@every_weighting
def test_the_cost_of_scoring_is_linear_in_the_history(weighting: Weighting) -> None:
    cost = {n: metered(weighting, 128, n, new=False).work for n in (1024, 2048, 4096, 8192, 16_384)}
    step = cost[2048] - cost[1024]
    for n in (4096, 8192, 16_384):
        assert cost[n] - cost[n // 2] == pytest.approx(step * n / 2048, rel=0.01)
    assert cost[16_384] <= 16.2 * cost[1024]


@every_weighting
def test_an_append_costs_little_more_than_the_pairs_it_attends(weighting: Weighting) -> None:
    """Rows are cut into blocks, so a little above the diagonal is computed and thrown away."""
    n = 4096
    pairs = n * (n + 1) // 2
    per_pair = metered(weighting, 128, n, new=False).work / (128 * n)
    assert metered(weighting, n, 0, new=True).work <= 1.1 * per_pair * pairs
