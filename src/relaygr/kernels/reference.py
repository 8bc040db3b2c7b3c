"""The definition of attention over pages, in plain torch, on any device.

Keys are taken a block of pages at a time and queries a block of rows at a time, so memory stays bounded and the
blocks stay in the processor's cache.
"""

from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F

from relaygr.history import PAGE
from relaygr.kernels.attention import Silu, Softmax, Weighting
from relaygr.kernels.ragged import Ragged

__all__ = ["ReferenceAttention"]

_QUERY_ROWS: Final = 256
_KEY_PAGES: Final = 4


class ReferenceAttention:
    """Attention as it is defined. Stateless."""

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, layer: int, batch: Ragged) -> None:
        first = 0
        for user, rows in enumerate(batch.rows):
            cached = batch.lengths[user]
            positions = torch.arange(cached, cached + rows, device=k.device)
            where = batch.table[user].long()[positions // PAGE], positions % PAGE
            for kind, new in ((0, k), (1, v)):
                pages[:, layer, kind].index_put_(where, new[first : first + rows])
            first += rows

    def append(
        self, weighting: Weighting, q: torch.Tensor, pages: torch.Tensor, layer: int, batch: Ragged
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        first = 0
        for user, rows in enumerate(batch.rows):
            cached = batch.lengths[user]
            for low in range(0, rows, _QUERY_ROWS):
                high = min(low + _QUERY_ROWS, rows)
                block = slice(first + low, first + high)
                total = _accumulator(weighting, q[block])
                for start, k, v in _key_blocks(pages, layer, batch.table[user], cached + high):
                    total.add(k, v, _causal_mask(cached + low, high - low, start, k.shape[1], q.device))
                out[block] = total.result()
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
        out = torch.empty_like(q)
        first = 0
        for user, rows in enumerate(batch.rows):
            for low in range(0, rows, _QUERY_ROWS):
                block = slice(first + low, first + min(low + _QUERY_ROWS, rows))
                total = _accumulator(weighting, q[block])
                for _, keys, values in _key_blocks(pages, layer, batch.table[user], batch.lengths[user]):
                    total.add(keys, values, None)
                total.add_self(k[block], v[block])
                out[block] = total.result()
            first += rows
        return out


def _key_blocks(
    pages: torch.Tensor, layer: int, table: torch.Tensor, length: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The first `length` keys and values, [head, key, dim] each, a few pages at a time, with their first position."""
    for start in range(0, length, _KEY_PAGES * PAGE):
        stop = min(start + _KEY_PAGES * PAGE, length)
        chosen = table[start // PAGE : -(-stop // PAGE)]
        k, v = (
            pages[:, layer, kind].index_select(0, chosen).flatten(0, 1)[: stop - start].transpose(0, 1)
            for kind in (0, 1)
        )
        yield start, k, v


def _causal_mask(
    first_query: int, queries: int, first_key: int, keys: int, device: torch.device
) -> torch.Tensor | None:
    """True where a query may see a key, or None where all may see all."""
    if first_key + keys - 1 <= first_query:
        return None
    q = torch.arange(first_query, first_query + queries, device=device)
    k = torch.arange(first_key, first_key + keys, device=device)
    return k <= q[:, None]


def _accumulator(weighting: Weighting, q: torch.Tensor) -> "_SiluSum | _SoftmaxSum":
    return _SiluSum(weighting, q) if isinstance(weighting, Silu) else _SoftmaxSum(weighting, q)


class _SiluSum:
    """Σ silu(q·k·scale)·v over blocks of keys, accumulated in fp32 at least."""

    def __init__(self, weighting: Silu, q: torch.Tensor) -> None:
        self._length = weighting.length
        self._dtype = q.dtype
        self._wide = torch.promote_types(q.dtype, torch.float32)
        self._q = (q.to(self._wide) * weighting.scale).transpose(0, 1)
        self._sum = torch.zeros_like(self._q, memory_format=torch.contiguous_format)

    def add(self, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None) -> None:
        weights = F.silu(torch.bmm(self._q, k.to(self._wide).transpose(1, 2)), inplace=True)
        if visible is not None:
            weights.masked_fill_(~visible, 0.0)
        self._sum.baddbmm_(weights, v.to(self._wide))

    def add_self(self, k: torch.Tensor, v: torch.Tensor) -> None:
        k, v = k.to(self._wide).transpose(0, 1), v.to(self._wide).transpose(0, 1)
        self._sum.addcmul_(F.silu((self._q * k).sum(-1, keepdim=True)), v)

    def result(self) -> torch.Tensor:
        return self._sum.div_(self._length).transpose(0, 1).to(self._dtype)


class _SoftmaxSum:
    """Softmax over blocks of keys, rescaled as the running maximum grows."""

    def __init__(self, weighting: Softmax, q: torch.Tensor) -> None:
        self._dtype = q.dtype
        self._wide = torch.promote_types(q.dtype, torch.float32)
        self._q = (q.to(self._wide) * weighting.scale).transpose(0, 1)
        self._sum = torch.zeros_like(self._q, memory_format=torch.contiguous_format)
        self._max = self._q.new_full((*self._q.shape[:2], 1), -torch.inf)
        self._total = torch.zeros_like(self._max)

    def add(self, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None) -> None:
        logits = torch.bmm(self._q, k.to(self._wide).transpose(1, 2))
        if visible is not None:
            logits.masked_fill_(~visible, -torch.inf)
        weights = self._rescale(logits)
        self._sum.baddbmm_(weights, v.to(self._wide))

    def add_self(self, k: torch.Tensor, v: torch.Tensor) -> None:
        k, v = k.to(self._wide).transpose(0, 1), v.to(self._wide).transpose(0, 1)
        weights = self._rescale((self._q * k).sum(-1, keepdim=True))
        self._sum.addcmul_(weights, v)

    def _rescale(self, logits: torch.Tensor) -> torch.Tensor:
        """Weights of these logits under the new maximum; what was summed before is brought to it.

        Every row sees the first key of its first block, so the maximum is finite from there on.
        """
        top = torch.maximum(self._max, logits.amax(-1, keepdim=True))
        weights = logits.sub_(top).exp_()
        shrink = (self._max - top).exp_()
        self._sum *= shrink
        self._total = self._total * shrink + weights.sum(-1, keepdim=True)
        self._max = top
        return weights

    def result(self) -> torch.Tensor:
        return (self._sum / self._total).transpose(0, 1).to(self._dtype)
