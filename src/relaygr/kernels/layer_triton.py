"""The rest of an HSTU layer in Triton: two kernels before attention, two after; of candidates, one before the product.

Kernels of few rows are bound by their launches. In a layer of candidates each is therefore launched while the one
before it ends, WAITs for that end before it reads what was written or writes anything, and then TRIGGERs the launch of
the next. So never more than two of them run, and what ran before those two has ended.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from relaygr.history import PAGE
from relaygr.kernels.device import can_chain, chain, has_tanh
from relaygr.kernels.layer import Norm
from relaygr.kernels.portable import silu
from relaygr.kernels.ragged import Ragged

__all__ = ["FEW_ROWS", "finish", "multiply_add", "project"]

FEW_ROWS: Final = 512
"""Rows up to which every kernel's blocks have a multiprocessor each, so that launching them early pays."""

_LINES: Final = 4
"""Rows of one block of the kernels that only norm or gate."""


@triton.jit(do_not_specialize=["rows"])
def norm_rows(
    x, weight, bias, out, limit, rows, stride, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, LINES: tl.constexpr, LIMITED: tl.constexpr,
    WAIT: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """LayerNorm of LINES rows."""
    if WAIT:
        tl.extra.cuda.gdc_wait()
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    if LIMITED:
        rows = tl.load(limit)
        if tl.program_id(0) * LINES >= rows:
            return
    row = tl.program_id(0) * LINES + tl.arange(0, LINES)
    dim = tl.arange(0, PADDED)
    inside = (row < rows)[:, None] & (dim < WIDTH)[None, :]
    place = row.to(tl.int64)[:, None]
    values = tl.load(x + place * stride + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, 1) / WIDTH
    centred = tl.where(inside, values - mean[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
    w = tl.load(weight + dim, mask=dim < WIDTH, other=0.0).to(tl.float32)
    b = tl.load(bias + dim, mask=dim < WIDTH, other=0.0).to(tl.float32)
    tl.store(
        out + place * WIDTH + dim[None, :],
        (centred * scale[:, None] * w[None, :] + b[None, :]).to(out.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def _tile_order(rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles in groups of 8 row blocks, so that blocks that run together share rows and columns in the cache."""
    blocks_m = (rows + BLOCK_M - 1) // BLOCK_M
    blocks_n = columns // BLOCK_N
    index = tl.program_id(0)
    group = index // (8 * blocks_n)
    height = tl.minimum(blocks_m - group * 8, 8)
    return group * 8 + index % (8 * blocks_n) % height, index % (8 * blocks_n) // height


@triton.jit(do_not_specialize=["rows", "table_stride", "users", "layers", "layer"])
def project_rows(
    x, weight, bias, out, pages, starts, cached, table, limit, rows, out_stride, table_stride, users, layers, layer,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, PAGED: tl.constexpr, SILU_ALL: tl.constexpr,
    HARDWARE: tl.constexpr, LIMITED: tl.constexpr, WAIT: tl.constexpr, TRIGGER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[U | V | Q | K] = silu(x·W + b), on U or on all. PAGED: K and V go into their pages, out holds [U | Q]."""
    if WAIT:
        tl.extra.cuda.gdc_wait()
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    if LIMITED:
        rows = tl.load(limit)
        if tl.program_id(0) >= (rows + BLOCK_M - 1) // BLOCK_M * (4 * WIDTH // BLOCK_N):
            return
    block_m, block_n = _tile_order(rows, 4 * WIDTH, BLOCK_M, BLOCK_N)
    row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    safe = tl.minimum(row, rows - 1).to(tl.int64)
    a = x + safe[:, None] * DEPTH + depth[None, :]
    b = weight + depth[:, None] * (4 * WIDTH) + column[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, DEPTH, BLOCK_K):
        acc = tl.dot(tl.load(a), tl.load(b), acc, input_precision="ieee")
        a += BLOCK_K
        b += BLOCK_K * 4 * WIDTH
    acc += tl.load(bias + column).to(tl.float32)[None, :]
    part = block_n * BLOCK_N // WIDTH
    if SILU_ALL or part == 0:
        acc = silu(acc, HARDWARE)
    inside = (row < rows)[:, None]
    if PAGED and part % 2 == 1:
        # U V Q K: part 1 is V, part 3 is K; in a page K comes first.
        slot = tl.zeros([BLOCK_M], tl.int64) - 1
        for user in range(0, users):
            begin = tl.load(starts + user)
            mine = (row >= begin) & (row < tl.load(starts + user + 1))
            position = tl.load(cached + user) + row - begin
            page = tl.load(table + user * table_stride + position // PAGE, mask=mine, other=0).to(tl.int64)
            slot = tl.where(mine, (page * layers + layer) * 2 * PAGE + position % PAGE, slot)
        where = pages + (slot + (3 - part) // 2 * PAGE)[:, None] * WIDTH + (column - part * WIDTH)[None, :]
        tl.store(where, acc.to(pages.dtype.element_ty), mask=inside & (slot >= 0)[:, None])
    else:
        if PAGED:
            column -= part // 2 * WIDTH
        where = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gate_rows(
    u, a, weight, bias, out, limit, rows, u_stride, a_stride, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, CONCAT: tl.constexpr, LINES: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """[U | A | U·LN(A)], or U·LN(A), of LINES rows."""
    if LIMITED:
        rows = tl.load(limit)
        if tl.program_id(0) * LINES >= rows:
            return
    row = tl.program_id(0) * LINES + tl.arange(0, LINES)
    dim = tl.arange(0, PADDED)
    inside = (row < rows)[:, None] & (dim < WIDTH)[None, :]
    place = row.to(tl.int64)[:, None]
    gate = tl.load(u + place * u_stride + dim[None, :], mask=inside, other=0.0)
    attended = tl.load(a + place * a_stride + dim[None, :], mask=inside, other=0.0)
    values = attended.to(tl.float32)
    mean = tl.sum(values, 1) / WIDTH
    centred = tl.where(inside, values - mean[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
    w = tl.load(weight + dim, mask=dim < WIDTH, other=0.0).to(tl.float32)
    b = tl.load(bias + dim, mask=dim < WIDTH, other=0.0).to(tl.float32)
    gated = gate.to(tl.float32) * (centred * scale[:, None] * w[None, :] + b[None, :])
    where = out + place * (3 * WIDTH if CONCAT else WIDTH) + dim[None, :]
    if CONCAT:
        tl.store(where, gate, mask=inside)
        tl.store(where + WIDTH, attended, mask=inside)
        where += 2 * WIDTH
    tl.store(where, gated.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def add_product(
    x, left, weight, out, limit, rows, x_stride,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, LIMITED: tl.constexpr, WAIT: tl.constexpr, TRIGGER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x + left·weight."""
    if WAIT:
        tl.extra.cuda.gdc_wait()
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    if LIMITED:
        rows = tl.load(limit)
        if tl.program_id(0) >= (rows + BLOCK_M - 1) // BLOCK_M * (COLUMNS // BLOCK_N):
            return
    block_m, block_n = _tile_order(rows, COLUMNS, BLOCK_M, BLOCK_N)
    row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    safe = tl.minimum(row, rows - 1).to(tl.int64)
    a = left + safe[:, None] * DEPTH + depth[None, :]
    b = weight + depth[:, None] * COLUMNS + column[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, DEPTH, BLOCK_K):
        acc = tl.dot(tl.load(a), tl.load(b), acc, input_precision="ieee")
        a += BLOCK_K
        b += BLOCK_K * COLUMNS
    place = row.to(tl.int64)[:, None]
    inside = (row < rows)[:, None]
    acc += tl.load(x + place * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place * COLUMNS + column[None, :], acc.to(out.dtype.element_ty), mask=inside)


def project(
    x: torch.Tensor,
    norm: Norm,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    silu_all: bool,
    pages: torch.Tensor | None = None,
    layer: int = 0,
    batch: Ragged | None = None,
) -> torch.Tensor:
    """[t, U | V | Q | K]; with pages, K and V go there and [t, U | Q] comes back."""
    rows, dim = x.shape
    width = weight.shape[1] // 4
    paged = pages is not None and batch is not None
    out = x.new_empty((rows, (2 if paged else 4) * width))
    if rows == 0:
        return out
    chained = not paged and can_chain(x.device)
    early = chained and rows <= FEW_ROWS
    limit = batch.limit if paged and batch is not None else None
    normed = x.new_empty((rows, dim))
    norm_rows[triton.cdiv(rows, _LINES),](
        x, norm.weight, norm.bias, normed, x if limit is None else limit, rows, x.stride(0), norm.eps,
        WIDTH=dim, PADDED=triton.next_power_of_2(dim), LINES=_LINES, LIMITED=limit is not None, num_warps=4,
        **chain(wait=early, trigger=early),
    )  # fmt: skip
    block_m, block_n, block_k, warps, stages = _project_tiles(rows, dim, width, x.dtype)
    nothing = x.new_empty(0, dtype=torch.int32) if batch is None else batch.starts
    project_rows[triton.cdiv(rows, block_m) * (4 * width // block_n),](
        normed, weight, bias, out,
        normed if pages is None else pages,
        nothing,
        nothing if batch is None else batch.cached,
        nothing if batch is None else batch.table,
        nothing if limit is None else limit,
        rows, out.stride(0),
        0 if batch is None else batch.table.stride(0),
        0 if batch is None else len(batch.rows),
        0 if pages is None else pages.shape[1],
        layer,
        DEPTH=dim, WIDTH=width, PAGE=PAGE, PAGED=paged, SILU_ALL=silu_all, HARDWARE=has_tanh(x.device),
        LIMITED=limit is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=stages,
        **chain(wait=early, trigger=chained),
    )  # fmt: skip
    return out


def finish(
    x: torch.Tensor,
    u: torch.Tensor,
    a: torch.Tensor,
    norm: Norm,
    weight: torch.Tensor,
    *,
    concat: bool,
    limit: torch.Tensor | None = None,
) -> torch.Tensor:
    """[t, dim]; u and a are [t, width], rows of either may be apart. `limit`: see `Ragged.limit`."""
    rows, width = a.shape
    combined = x.new_empty((rows, len(weight)))
    if rows:
        gate_rows[triton.cdiv(rows, _LINES),](
            u, a, norm.weight, norm.bias, combined, x if limit is None else limit,
            rows, u.stride(0), a.stride(0), norm.eps,
            WIDTH=width, PADDED=triton.next_power_of_2(width), CONCAT=concat, LINES=_LINES, LIMITED=limit is not None,
            num_warps=4,
        )  # fmt: skip
    return multiply_add(x, combined, weight, early=False, limit=limit)


def multiply_add(
    x: torch.Tensor, left: torch.Tensor, weight: torch.Tensor, *, early: bool, limit: torch.Tensor | None = None
) -> torch.Tensor:
    """x + left·weight, [t, dim]. `early`: launched while the kernel before it ends."""
    rows, dim = x.shape
    out = x.new_empty((rows, dim))
    if rows:
        block_m, block_n, block_k, warps, stages = _finish_tiles(rows, dim, len(weight), x.dtype)
        add_product[triton.cdiv(rows, block_m) * (dim // block_n),](
            x, left, weight, out, x if limit is None else limit, rows, x.stride(0),
            DEPTH=len(weight), COLUMNS=dim, LIMITED=limit is not None,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
            **chain(wait=early, trigger=early),
        )  # fmt: skip
    return out


def _block(size: int, most: int) -> int:
    """The largest power of two, up to `most`, that divides `size`."""
    return min(most, size & -size)


def _project_tiles(rows: int, dim: int, width: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Rows, columns and depth of a tile, warps, stages: for few rows, so many that only one block fits.

    Blocks that are launched early would else gather on the multiprocessors that are free first.
    """
    if dtype == torch.float32:
        return 32, _block(width, 32), _block(dim, 32), 4, 2
    if rows <= 1024:
        return 64, _block(width, 128), _block(dim, 64), 4, 5 if rows <= FEW_ROWS else 4
    return 128, _block(width, 256), _block(dim, 64), 8, 3


def _finish_tiles(rows: int, dim: int, depth: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    if dtype == torch.float32:
        return 32, _block(dim, 32), _block(depth, 32), 4, 2
    if rows <= 1024:
        return 64, _block(dim, 32), _block(depth, 128), 4, 5 if rows <= FEW_ROWS else 4
    if rows <= 4096:
        return 64, _block(dim, 128), _block(depth, 64), 4, 4
    return 128, _block(dim, 256), _block(depth, 64), 8, 3
