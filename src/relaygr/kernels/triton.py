"""Attention over pages on a GPU: the launches. The kernels are in `portable` (Triton) and `hopper` (Gluon).

Grids come from the host's view of a batch (`rows`, `lengths`); everything else is read on the device. So a captured
launch may be replayed with other starts, lengths and tables, within the bounds of the batch it was captured with.

Scores of one user are work items, heads × blocks of its rows × splits of its keys, numbered by the user itself: what
`_TARGET` allows is the most that any number of rows takes, and every item has rows of its own for its sum.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton

from relaygr.history import PAGE
from relaygr.kernels import layer_triton, portable
from relaygr.kernels.attention import Silu, Weighting
from relaygr.kernels.device import can_chain, chain, has_tanh, is_hopper, multiprocessors
from relaygr.kernels.layer import LayerWeights, Projected, split
from relaygr.kernels.ragged import Ragged

__all__ = ["TritonAttention"]

_SHARED_KEYS: Final = 32 << 20
"""Bytes of K and V of one layer that blocks work on at a time: what the second-level cache holds with room to spare."""

_TARGET: Final = 128
"""Blocks that one user's scores are split into at most: about the multiprocessors of a Hopper GPU."""

_APPEND_TARGET: Final = 256
"""The same of an append, whose blocks differ in length. One that has as many blocks by its rows alone is not split."""

_LINES: Final = 4
"""Rows whose splits one block adds up."""


@dataclass(frozen=True)
class _Tiles:
    """A Hopper launch: keys of a tile, tiles of K and of V in flight, query blocks in flight; whether K and V arrive as
    one; whether the two warpgroups weigh in turns."""

    keys: int
    stages: int
    queries: int
    joint: bool = False
    turns: bool = False


_APPEND: Final = {
    32: _Tiles(128, 4, 2, joint=True),
    64: _Tiles(128, 4, 2, joint=True),
    128: _Tiles(64, 4, 2),
    256: _Tiles(64, 2, 1),
}
_SCORE: Final = {
    32: _Tiles(128, 4, 1, turns=True),
    64: _Tiles(128, 4, 1, turns=True),
    128: _Tiles(128, 3, 1, turns=True),
    256: _Tiles(64, 2, 1),
}


class TritonAttention:
    """`Attention` on a GPU, or under Triton's interpreter on a CPU. Stateless.

    `hopper=False` keeps to the portable kernels where the device would allow the others.
    """

    def __init__(self, *, hopper: bool = True) -> None:
        self._hopper = hopper

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, layer: int, batch: Ragged) -> None:
        longest = max(batch.rows, default=0)
        if longest == 0:
            return
        _, layers, _, _, heads, dim = pages.shape
        lines = 16
        portable.write_pages[triton.cdiv(longest, lines), len(batch.rows)](
            k, v, pages, batch.starts, batch.cached, batch.table,
            _row_stride(k), _row_stride(v), batch.table.stride(0), heads, layers, layer,
            PAGE=PAGE, D=dim, LINES=lines, WIDTH=min(triton.next_power_of_2(heads * dim), 512), num_warps=4,
        )  # fmt: skip

    def append(
        self, weighting: Weighting, q: torch.Tensor, pages: torch.Tensor, layer: int, batch: Ragged
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        longest = max(batch.rows, default=0)
        if longest == 0:
            return out
        heads, dim = q.shape[1:]
        hopper = isinstance(weighting, Silu) and self._fits_hopper(q, pages)
        rows = PAGE if hopper else _portable_rows(q)
        blocks = _blocks_by_position(longest, rows)
        split = blocks * heads <= _APPEND_TARGET
        ranks = _ranks(batch, heads, blocks, longest, _APPEND_TARGET) if split else blocks
        parts, sums = _parts(weighting, q, batch, ranks, rows) if split else (out, out)
        if isinstance(weighting, Silu) and hopper:
            _launch_hopper(weighting, q, parts, pages, layer, batch, ranks, rows, causal=True, split=split)
        else:
            _launch_portable(
                weighting, q, parts, sums, pages, layer, batch, rows, ranks, rows, causal=True, split=split
            )
        if split:
            lines = 16
            portable.add_splits[triton.cdiv(longest, lines), len(batch.rows), heads](
                parts, sums, out, batch.starts, batch.cached, out.stride(0), ranks, rows,
                TARGET=_APPEND_TARGET, ROWS=rows, LINES=lines, PAGE=PAGE, HEADS=heads, D=dim,
                WIDTH=triton.next_power_of_2(dim), AHEAD=_ahead(q.device),
                SOFTMAX=not isinstance(weighting, Silu), num_warps=4,
            )  # fmt: skip
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
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._score(weighting, Projected(q, v, q, k), None, out, pages, layer, batch)
        return out

    def score_layer(
        self,
        weighting: Weighting,
        x: torch.Tensor,
        weights: LayerWeights,
        pages: torch.Tensor,
        layer: int,
        batch: Ragged,
    ) -> torch.Tensor:
        """A whole layer of candidates x [rows, dim], in as few kernels as there can be, each chained to the next.

        No kernel that writes pages stands right before attention, which reads keys while that one ends.
        """
        uvqk = layer_triton.project(x, weights.before, weights.uvqk, weights.bias, silu_all=weights.silu_all)
        combined = x.new_empty((len(x), len(weights.output)))
        self._score(weighting, split(uvqk, pages.shape[-2]), weights, combined, pages, layer, batch)
        early = can_chain(x.device) and len(x) <= layer_triton.FEW_ROWS
        return layer_triton.multiply_add(x, combined, weights.output, early=early)

    def _score(
        self,
        weighting: Weighting,
        projected: Projected,
        gate: LayerWeights | None,
        out: torch.Tensor,
        pages: torch.Tensor,
        layer: int,
        batch: Ragged,
    ) -> None:
        """Attended rows, or what a layer's last product takes."""
        longest = max(batch.rows, default=0)
        if longest == 0:
            return
        u, v, q, k = projected
        if _row_stride(k) != _row_stride(v):
            k, v = k.contiguous(), v.contiguous()
        hopper = isinstance(weighting, Silu) and self._fits_hopper(q, pages)
        rows = PAGE if hopper else _portable_rows(q)
        heads, dim = q.shape[1:]
        ranks, height = _ranks(batch, heads, triton.cdiv(longest, rows), 0, _TARGET), min(longest, rows)
        parts, sums = _parts(weighting, q, batch, ranks, height)
        chained = gate is not None and can_chain(q.device)
        early = chained and len(q) <= layer_triton.FEW_ROWS
        if isinstance(weighting, Silu) and hopper:
            _launch_hopper(weighting, q, parts, pages, layer, batch, ranks, height, causal=False, chained=chained)
        else:
            _launch_portable(weighting, q, parts, sums, pages, layer, batch, rows, ranks, height, causal=False)
        norm_weight, norm_bias, eps = gate.after if gate else (q, q, 0.0)
        portable.combine[triton.cdiv(longest, _LINES), len(batch.rows)](
            parts, sums, q, k, v, u, norm_weight, norm_bias, out, batch.starts, batch.cached,
            _row_stride(q), _row_stride(k), u.stride(0), out.stride(0), ranks, height,
            weighting.scale, _factor(weighting), eps,
            TARGET=_TARGET, ROWS=rows, LINES=_LINES, PAGE=PAGE, HEADS=heads, MANY=triton.next_power_of_2(heads),
            D=dim, WIDTH=triton.next_power_of_2(dim), AHEAD=_ahead(q.device), HARDWARE=has_tanh(q.device),
            SOFTMAX=not isinstance(weighting, Silu), GATE=gate is not None,
            CONCAT=gate is not None and gate.concat, num_warps=8, **chain(wait=False, trigger=early),
        )  # fmt: skip

    def takes_hopper(self, device: torch.device, head_dim: int, dtype: torch.dtype) -> bool:
        """Whether the Hopper kernel serves such heads there."""
        known = head_dim in _APPEND and dtype in (torch.bfloat16, torch.float16)
        return self._hopper and known and device.type == "cuda" and is_hopper(device)

    def _fits_hopper(self, q: torch.Tensor, pages: torch.Tensor) -> bool:
        """Whether the Hopper kernel takes these: the card, a head dim it has tiles for, 16-bit values, aligned rows."""
        return (
            self.takes_hopper(q.device, q.shape[-1], q.dtype)
            and pages.dtype == q.dtype
            and q.data_ptr() % 16 == 0
            and bool(_row_stride(q) % 8 == 0)
        )


def _row_stride(tensor: torch.Tensor) -> int:
    """Distance of two rows of [rows, head, dim]; the values of a row must lie together."""
    if tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]:
        raise ValueError(f"heads of a row must be contiguous, got strides {tensor.stride()}")
    return tensor.stride(0)


def _blocks_by_position(rows: int, block: int) -> int:
    """Blocks aligned by position that `rows` tokens may touch, wherever they begin."""
    return (rows + 2 * block - 2) // block


def _ranks(batch: Ragged, heads: int, blocks: int, new: int, target: int) -> int:
    """Blocks of rows times splits of keys, the most that any user within the batch's bounds takes.

    b blocks take b·⌊target / (heads·b)⌋ at most, and few rows take more splits than many. `new`: tokens of a user that
    are keys as well.
    """
    splits = (triton.cdiv(max(batch.lengths) + new, PAGE) + 1) // 2
    return int(max(blocks, min(target // heads, blocks * splits)))


def _parts(
    weighting: Weighting, q: torch.Tensor, batch: Ragged, ranks: int, height: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the sums of all splits, `height` rows each, and under softmax for what is beside them."""
    heads, dim = q.shape[1:]
    parts = torch.empty((len(batch.rows) * ranks * height, heads, dim), dtype=torch.float32, device=q.device)
    return parts, parts.new_empty((len(parts), heads, 0 if isinstance(weighting, Silu) else 2))


def _factor(weighting: Weighting) -> float:
    return 1 / weighting.length if isinstance(weighting, Silu) else 1.0


def _ahead(device: torch.device) -> int:
    """Splits that are read before they are added: few in the interpreter."""
    return 8 if device.type == "cuda" or has_tanh(device) else 2


def _portable_rows(q: torch.Tensor) -> int:
    return 64 if q.dtype == torch.float32 else 128


def _launch_portable(
    weighting: Weighting,
    q: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    batch: Ragged,
    rows: int,
    ranks: int,
    height: int,
    *,
    causal: bool,
    split: bool = True,
) -> None:
    heads, dim = q.shape[1:]
    full = q.dtype == torch.float32
    portable.attend[heads * len(batch.rows) * ranks,](
        q, out, sums, pages, batch.starts, batch.cached, batch.table,
        _row_stride(q), heads * dim, batch.table.stride(0),
        heads, ranks, height, pages.shape[1], layer, weighting.scale, _factor(weighting),
        TARGET=_APPEND_TARGET if causal else _TARGET, CAUSAL=causal,
        SOFTMAX=not isinstance(weighting, Silu), ROWS=rows, KEYS=32 if full else 64,
        PAGE=PAGE, D=dim, WIDTH=max(triton.next_power_of_2(dim), 16), HARDWARE=has_tanh(q.device), SPLIT=split,
        num_warps=4 if full else 8, num_stages=2 if full or dim > 128 else 3,
    )  # fmt: skip


def _launch_hopper(
    weighting: Silu,
    q: torch.Tensor,
    out: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    batch: Ragged,
    ranks: int,
    height: int,
    *,
    causal: bool,
    chained: bool = False,
    split: bool = True,
) -> None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from relaygr.kernels import hopper

    total, heads, dim = q.shape
    count, layers = pages.shape[:2]
    tiles = (_APPEND if causal else _SCORE)[dim]
    width = heads * dim
    element = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    half, tile = [PAGE // 2, dim], [1, tiles.keys, dim]
    queries = TensorDescriptor(
        q, [total, width], [_row_stride(q), 1], half, gl.NVMMASharedLayout.get_default_for(half, element)
    )
    keys = TensorDescriptor(
        pages,
        [count * layers * 2 * (PAGE // tiles.keys), tiles.keys, width],
        [tiles.keys * width, width, 1],
        tile,
        gl.NVMMASharedLayout.get_default_for(tile, element),
    )
    users = len(batch.rows)
    longest = max(n + (r if causal else 0) for r, n in zip(batch.rows, batch.lengths, strict=True))
    group = min(users, max(1, _SHARED_KEYS // max(1, longest * width * 2 * q.element_size())))
    work = heads * users * ranks
    grid = min(work, multiprocessors(q.device))
    dynamic = causal and work > grid
    counter = torch.zeros(1, dtype=torch.int32, device=q.device) if dynamic else batch.starts
    hopper.silu_over_pages[grid,](
        queries, keys, out, width, batch.starts, batch.cached, batch.table, batch.table.stride(0),
        counter, users, group, heads, ranks, height, work, layers, layer, weighting.scale / 2, 1 / weighting.length,
        TARGET=_APPEND_TARGET if causal else _TARGET, CAUSAL=causal,
        KEYS=tiles.keys, D=dim, STAGES=tiles.stages, QUERIES=tiles.queries,
        JOINT=tiles.joint, TURNS=tiles.turns, DYNAMIC=dynamic, WAIT=chained, SPLIT=split,
        num_warps=4, launch_pdl=chained,
    )  # fmt: skip
