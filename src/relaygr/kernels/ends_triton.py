"""Embedding and head in Triton: one kernel each. Sums are taken in float32 and rounded once."""

import torch
import triton
import triton.language as tl

from relaygr.kernels.device import has_tanh
from relaygr.kernels.ends import HotRows
from relaygr.kernels.mail import Mail
from relaygr.kernels.mail_triton import receipt, recipient

__all__ = ["embed", "head"]


@triton.jit(do_not_specialize=["rows", "token_stride", "number_stride"])
def embed_rows(
    tokens, table, kinds, gaps, positions, hot, slots, out, rows, token_stride, number_stride,
    DIM: tl.constexpr, PADDED: tl.constexpr, LINES: tl.constexpr, HOT: tl.constexpr,
):  # fmt: skip
    """The sum of four rows for each of LINES tokens. HOT: rows of the table that have a slot are read from `hot`."""
    row = tl.program_id(0) * LINES + tl.arange(0, LINES)
    dim = tl.arange(0, PADDED)
    inside = row < rows
    whole = inside[:, None] & (dim < DIM)[None, :]
    place = tokens + row.to(tl.int64) * token_stride
    item = tl.load(place, mask=inside, other=0).to(tl.int64)
    if HOT:
        slot = tl.load(slots + item, mask=inside, other=-1).to(tl.int64)
        warm = (slot >= 0)[:, None]
        x = tl.load(hot + slot[:, None] * DIM + dim[None, :], mask=whole & warm, other=0.0).to(tl.float32)
        x += tl.load(table + item[:, None] * DIM + dim[None, :], mask=whole & (slot < 0)[:, None], other=0.0).to(
            tl.float32
        )
    else:
        x = tl.load(table + item[:, None] * DIM + dim[None, :], mask=whole, other=0.0).to(tl.float32)
    kind = tl.load(place + number_stride, mask=inside, other=0).to(tl.int64)
    x += tl.load(kinds + kind[:, None] * DIM + dim[None, :], mask=whole, other=0.0).to(tl.float32)
    gap = tl.load(place + 2 * number_stride, mask=inside, other=0).to(tl.int64)
    x += tl.load(gaps + gap[:, None] * DIM + dim[None, :], mask=whole, other=0.0).to(tl.float32)
    position = tl.load(place + 3 * number_stride, mask=inside, other=0).to(tl.int64)
    x += tl.load(positions + position[:, None] * DIM + dim[None, :], mask=whole, other=0.0).to(tl.float32)
    where = out + row.to(tl.int64)[:, None] * DIM + dim[None, :]
    tl.store(where, x.to(out.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=["rows"])
def head_rows(
    x, norm_weight, norm_bias, weight, bias, out, limit, letters, state, rows, eps,
    DIM: tl.constexpr, PADDED: tl.constexpr, TASKS: tl.constexpr, LINES: tl.constexpr, LIMITED: tl.constexpr,
    MAILED: tl.constexpr, PROGRAMS: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """LN(x)·W + b of LINES rows. MAILED: to where the next letter says."""
    if LIMITED:
        rows = tl.load(limit)
    if MAILED:
        letter, out = recipient(letters, state, PROGRAMS)
    row = tl.program_id(0) * LINES + tl.arange(0, LINES)
    dim = tl.arange(0, PADDED)
    inside = row < rows
    whole = inside[:, None] & (dim < DIM)[None, :]
    place = row.to(tl.int64)
    values = tl.load(x + place[:, None] * DIM + dim[None, :], mask=whole, other=0.0).to(tl.float32)
    mean = tl.sum(values, 1) / DIM
    centred = tl.where(whole, values - mean[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 1) / DIM + eps)
    w = tl.load(norm_weight + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    b = tl.load(norm_bias + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    normed = centred * scale[:, None] * w[None, :] + b[None, :]
    for task in tl.static_range(TASKS):
        column = tl.load(weight + dim * TASKS + task, mask=dim < DIM, other=0.0).to(tl.float32)
        score = tl.sum(normed * column[None, :], 1) + tl.load(bias + task).to(tl.float32)
        tl.store(out + place * TASKS + task, score, mask=inside)
    if MAILED:
        receipt(letter, state, PROGRAMS, TIMED)


def embed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    kinds: torch.Tensor,
    gaps: torch.Tensor,
    positions: torch.Tensor,
    hot: HotRows | None,
) -> torch.Tensor:
    """[t, dim]; see `ends.embed`."""
    rows, dim = len(tokens), kinds.shape[1]
    out = torch.empty((rows, dim), dtype=kinds.dtype, device=kinds.device)
    if rows:
        lines = 4
        embed_rows[triton.cdiv(rows, lines),](
            tokens, table, kinds, gaps, positions,
            kinds if hot is None else hot.rows, tokens if hot is None else hot.slots,
            out, rows, tokens.stride(0), tokens.stride(1),
            DIM=dim, PADDED=triton.next_power_of_2(dim), LINES=lines, HOT=hot is not None, num_warps=4,
        )  # fmt: skip
    return out


def head(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    limit: torch.Tensor | None = None,
    mail: Mail | None = None,
) -> torch.Tensor:
    """float32 [t, tasks]; see `ends.head`."""
    rows, dim = x.shape
    tasks = weight.shape[1]
    out = torch.empty((rows if mail is None else 0, tasks), dtype=torch.float32, device=x.device)
    if rows:
        lines = 4
        programs = triton.cdiv(rows, lines)
        head_rows[programs,](
            x.contiguous(), norm_weight, norm_bias, weight, bias, out, limit, None if mail is None else mail.letters,
            None if mail is None else mail.state, rows, eps,
            DIM=dim, PADDED=triton.next_power_of_2(dim), TASKS=tasks, LINES=lines, LIMITED=limit is not None,
            MAILED=mail is not None, PROGRAMS=programs if mail is not None else 1,
            TIMED=has_tanh(x.device), num_warps=4,
        )  # fmt: skip
    return out
