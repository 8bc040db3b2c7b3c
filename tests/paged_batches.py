"""Random batches over pages for kernel tests: free pages, and the room behind a user's tokens, hold NaN."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from relaygr.history import PAGE
from relaygr.kernels import PageLayout, Ragged

LAYERS, LAYER, SPARE = 3, 1, 2


@dataclass(frozen=True)
class Case:
    """Rows and cached tokens of each user, and everything a kernel reads. `k`, `v` are the rows' own."""

    batch: Ragged
    pages: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def wide(self) -> "Case":
        """The same in float64, with a cleared pool where nothing was written: what the definition reads."""
        pages = self.pages.double()
        return Case(self.batch, pages, self.q.double(), self.k.double(), self.v.double())


def make_case(
    rows: Sequence[int],
    cached: Sequence[int],
    *,
    heads: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    reach: bool,
    seed: int = 0,
) -> Case:
    """`reach`: the tables reach over the new rows too, as an append needs. Cached tokens are written, rows are not."""
    generator = torch.Generator().manual_seed(seed)
    ends = [c + (r if reach else 0) for r, c in zip(rows, cached, strict=True)]
    counts = [PageLayout.count(n) for n in ends]
    order = torch.randperm(sum(counts) + SPARE, generator=generator).tolist()
    tables, taken = [], 0
    for count in counts:
        tables.append(order[taken : taken + count])
        taken += count
    pages = PageLayout(LAYERS, heads, head_dim, dtype).allocate(len(order))
    pages.fill_(torch.nan)
    for table, tokens in zip(tables, cached, strict=True):
        for position in range(0, tokens, PAGE):
            some = min(PAGE, tokens - position)
            page = pages[table[position // PAGE], LAYER, :, :some]
            page.copy_(torch.randn(page.shape, generator=generator))
    q, k, v = (torch.randn(sum(rows), heads, head_dim, generator=generator).to(device, dtype) for _ in range(3))
    return Case(Ragged.build(rows, cached, tables, device), pages.to(device), q, k, v)


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest ‖Δ‖₂/‖ref‖₂ over heads; infinite where anything is not finite."""
    if not result.isfinite().all():
        return float("inf")
    difference = (result.double() - reference.double()).pow(2).sum((0, 2))
    return float((difference / reference.double().pow(2).sum((0, 2)).clamp_min(1e-300)).sqrt().max())
