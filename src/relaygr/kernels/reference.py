"""The definition of attention over pages, in plain torch, on any device.

Keys are taken a block of pages at a time, gathered once, and queries a block of rows at a time against them: memory
stays bounded, and a block's weights stay in the processor's cache while they are used.

          keys 0 …      keys 2048 …
    rows  █████████████ ░             ░ not visible, not computed
          █████████████ ██░           a row's sum is taken in the order of the blocks, whatever
          █████████████ ████░         the batch and however its history was cut into appends
"""

from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F

from relaygr.history import PAGE
from relaygr.kernels.attention import Silu, Softmax, Weighting
from relaygr.kernels.ragged import Ragged

__all__ = ["ReferenceAttention"]

_KEY_PAGES: Final = 16
_WEIGHTS: Final = 2**19
"""Weights of one block, all heads together: rows are taken as many at a time as this allows."""
_LEAST_ROWS: Final = 64


class ReferenceAttention:
    """Attention as it is defined. Stateless."""

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, layer: int, batch: Ragged) -> None:
        users, positions = batch.row_users(), batch.token_positions()
        slots = _lines(pages, layer, batch.table[users, positions // PAGE]) * PAGE + positions % PAGE
        pool = pages.view(-1, *k.shape[1:])
        pool.index_copy_(0, slots, k)
        pool.index_copy_(0, slots + PAGE, v)

    def append(
        self, weighting: Weighting, q: torch.Tensor, pages: torch.Tensor, layer: int, batch: Ragged
    ) -> torch.Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        blocks = _Blocks(q, pages, layer)
        first = 0
        for user, rows in enumerate(batch.rows):
            cached = batch.lengths[user]
            total = _accumulator(weighting, q[first : first + rows])
            for start, k, v in blocks.keys(batch.table[user], cached + rows):
                for low, high in blocks.rows(max(start - cached, 0), rows):
                    diagonal = cached + low - start
                    seen = min(diagonal + high - low, k.shape[1])
                    total.add(slice(low, high), k[:, :seen], v[:, :seen], diagonal, blocks.weights(high - low, seen))
            out[first : first + rows] = total.result()
            first += rows
        return out

    def score(
        self,
        weighting: Weighting,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: torch.Tensor,
        layer: int,
        batch: Ragged,
    ) -> torch.Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        blocks = _Blocks(q, pages, layer)
        first = 0
        for user, rows in enumerate(batch.rows):
            mine = slice(first, first + rows)
            total = _accumulator(weighting, q[mine])
            for _, keys, values in blocks.keys(batch.table[user], batch.lengths[user]):
                seen = keys.shape[1]
                for low, high in blocks.rows(0, rows):
                    total.add(slice(low, high), keys, values, seen, blocks.weights(high - low, seen))
            total.add_self(k[mine], v[mine])
            out[mine] = total.result()
            first += rows
        return out


def _lines(pages: torch.Tensor, layer: int, page: torch.Tensor) -> torch.Tensor:
    """Where the keys of these pages lie in this layer, counted in the keys of one page; the values lie one further."""
    return (page.long() * pages.shape[1] + layer) * 2


class _Blocks:
    """How one layer's work is cut, and the memory that every block of it uses again."""

    def __init__(self, q: torch.Tensor, pages: torch.Tensor, layer: int) -> None:
        self._pages, self._layer = pages, layer
        self._heads = q.shape[1]
        self._wide = torch.promote_types(q.dtype, torch.float32)
        self._rows = max(_WEIGHTS // (self._heads * _KEY_PAGES * PAGE), _LEAST_ROWS)
        self._weights = q.new_empty(self._heads * min(self._rows, len(q)) * _KEY_PAGES * PAGE, dtype=self._wide)
        self._gathered = pages.new_empty(2, _KEY_PAGES, *pages.shape[3:])

    def keys(self, table: torch.Tensor, length: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """The first `length` keys and values, [head, key, dim] each, block by block, with their first position.

        A block is gone when the next one is asked for.
        """
        lines = _lines(self._pages, self._layer, table)
        pool = self._pages.view(-1, *self._pages.shape[3:])
        for start in range(0, length, _KEY_PAGES * PAGE):
            stop = min(start + _KEY_PAGES * PAGE, length)
            chosen = lines[start // PAGE : -(-stop // PAGE)]
            k, v = (
                torch.index_select(pool, 0, chosen + kind, out=self._gathered[kind, : len(chosen)])
                .flatten(0, 1)[: stop - start]
                .to(self._wide)
                .transpose(0, 1)
                for kind in (0, 1)
            )
            yield start, k, v

    def rows(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        for start in range(low, high, self._rows):
            yield start, min(start + self._rows, high)

    def weights(self, rows: int, keys: int) -> torch.Tensor:
        """Room for the weights of a block, [head, row, key]; its contents undefined."""
        return self._weights[: self._heads * rows * keys].view(self._heads, rows, keys)


def _accumulator(weighting: Weighting, q: torch.Tensor) -> "_SiluSum | _SoftmaxSum":
    return _SiluSum(weighting, q) if isinstance(weighting, Silu) else _SoftmaxSum(weighting, q)


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """[row, head, dim] as [head, row, dim], in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).transpose(0, 1)


class _SiluSum:
    """Σ silu(q·k·scale)·v over blocks of keys, accumulated in fp32 at least."""

    def __init__(self, weighting: Silu, q: torch.Tensor) -> None:
        self._length = weighting.length
        self._q = _by_head(q) * weighting.scale
        self._sum = torch.zeros_like(self._q, memory_format=torch.contiguous_format)

    def add(self, rows: slice, k: torch.Tensor, v: torch.Tensor, diagonal: int, weights: torch.Tensor) -> None:
        """Row i of `rows` sees keys 0 … diagonal + i."""
        torch.bmm(self._q[:, rows], k.transpose(1, 2), out=weights)
        F.silu(weights, inplace=True)
        if diagonal < k.shape[1] - 1:
            weights[:, :, diagonal:].tril_()
        self._sum[:, rows].baddbmm_(weights, v)

    def add_self(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._sum.addcmul_(F.silu((self._q * _by_head(k)).sum(-1, keepdim=True)), _by_head(v))

    def result(self) -> torch.Tensor:
        """[row, head, dim]."""
        return self._sum.div_(self._length).transpose(0, 1)


class _SoftmaxSum:
    """Softmax over blocks of keys, rescaled as the running maximum grows."""

    def __init__(self, weighting: Softmax, q: torch.Tensor) -> None:
        self._q = _by_head(q) * weighting.scale
        self._sum = torch.zeros_like(self._q, memory_format=torch.contiguous_format)
        self._max = self._q.new_full((*self._q.shape[:2], 1), -torch.inf)
        self._total = torch.zeros_like(self._max)

    def add(self, rows: slice, k: torch.Tensor, v: torch.Tensor, diagonal: int, weights: torch.Tensor) -> None:
        """Row i of `rows` sees keys 0 … diagonal + i."""
        torch.bmm(self._q[:, rows], k.transpose(1, 2), out=weights)
        if diagonal < k.shape[1] - 1:
            corner = weights[:, :, diagonal:]
            corner.masked_fill_(corner.new_ones(corner.shape[1:], dtype=torch.bool).triu_(1), -torch.inf)
        self._weigh(rows, weights)
        self._sum[:, rows].baddbmm_(weights, v)

    def add_self(self, k: torch.Tensor, v: torch.Tensor) -> None:
        weights = (self._q * _by_head(k)).sum(-1, keepdim=True)
        self._weigh(slice(None), weights)
        self._sum.addcmul_(weights, _by_head(v))

    def _weigh(self, rows: slice, logits: torch.Tensor) -> None:
        """Logits become weights under the new maximum, in place; what was summed before is brought to it.

        Every row sees the first key of its first block, so the maximum is finite from there on.
        """
        before, total = self._max[:, rows], self._total[:, rows]
        top = torch.maximum(before, logits.amax(-1, keepdim=True))
        logits.sub_(top).exp_()
        shrink = (before - top).exp_()
        self._sum[:, rows] *= shrink
        torch.addcmul(logits.sum(-1, keepdim=True), total, shrink, out=total)
        before.copy_(top)

    def result(self) -> torch.Tensor:
        """[row, head, dim]."""
        return (self._sum / self._total).transpose(0, 1)
