"""Embedding and head in Triton: one kernel each. Sums are taken in float32 and rounded once."""

from typing import Final

import torch
import triton
import triton.language as tl

from relaygr.kernels.device import has_tanh
from relaygr.kernels.ends import Tables
from relaygr.kernels.mail import Mail
from relaygr.kernels.mail_triton import receipt, recipient

__all__ = ["embed", "embed_candidates", "head"]

_LINES: Final = 4
"""Rows of a program."""
_USERS: Final = 32
"""Of a batch: more are compiled for anew."""


@triton.jit
def _item_rows(table, hot, slots, item, whole, inside, dim, DIM: tl.constexpr, HOT: tl.constexpr):
    """Rows of the table, in float32. HOT: those that have a slot are read from `hot`."""
    if HOT:
        slot = tl.load(slots + item, mask=inside, other=-1).to(tl.int64)
        warm = (slot >= 0)[:, None]
        x = tl.load(hot + slot[:, None] * DIM + dim[None, :], mask=whole & warm, other=0.0).to(tl.float32)
        x += tl.load(table + item[:, None] * DIM + dim[None, :], mask=whole & (slot < 0)[:, None], other=0.0).to(
            tl.float32
        )
    else:
        x = tl.load(table + item[:, None] * DIM + dim[None, :], mask=whole, other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["rows", "token_stride", "number_stride"])
def embed_rows(
    tokens, table, kinds, gaps, positions, hot, slots, out, rows, token_stride, number_stride,
    DIM: tl.constexpr, PADDED: tl.constexpr, LINES: tl.constexpr, HOT: tl.constexpr,
):  # fmt: skip
    """The sum of four rows for each of LINES tokens."""
    row = tl.program_id(0) * LINES + tl.arange(0, LINES)
    dim = tl.arange(0, PADDED)
    inside = row < rows
    whole = inside[:, None] & (dim < DIM)[None, :]
    place = tokens + row.to(tl.int64) * token_stride
    item = tl.load(place, mask=inside, other=0).to(tl.int64)
    x = _item_rows(table, hot, slots, item, whole, inside, dim, DIM, HOT)
    kind = tl.load(place + number_stride, mask=inside, other=0).to(tl.int64)
    x += tl.load(kinds + kind[:, None] * DIM + dim[None, :], mask=whole, other=0.0).to(tl.float32)
    gap = tl.load(place + 2 * number_stride, mask=inside, other=0).to(tl.int64)
    x += tl.load(gaps + gap[:, None] * DIM + dim[None, :], mask=whole, other=0.0).to(tl.float32)
    position = tl.load(place + 3 * number_stride, mask=inside, other=0).to(tl.int64)
    x += tl.load(positions + position[:, None] * DIM + dim[None, :], mask=whole, other=0.0).to(tl.float32)
    where = out + row.to(tl.int64)[:, None] * DIM + dim[None, :]
    tl.store(where, x.to(out.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=["rows", "users", "kind", "gap"])
def embed_candidate_rows(
    items, places, starts, table, kinds, gaps, positions, hot, slots, out, rows, users, kind, gap,
    DIM: tl.constexpr, PADDED: tl.constexpr, LINES: tl.constexpr, USERS: tl.constexpr, HOT: tl.constexpr,
):  # fmt: skip
    """The same where kind and gap are those of all rows, and the position is that of the row's user."""
    row = tl.program_id(0) * LINES + tl.arange(0, LINES)
    dim = tl.arange(0, PADDED)
    inside = row < rows
    whole = inside[:, None] & (dim < DIM)[None, :]
    there = row < tl.load(starts + users)  # what is behind is left from an earlier replay: it is not read
    item = tl.load(items + row, mask=there, other=0).to(tl.int64)
    x = _item_rows(table, hot, slots, item, whole & there[:, None], there, dim, DIM, HOT)
    user = tl.arange(0, USERS)
    ends = tl.load(starts + 1 + user, mask=user < users, other=2**31 - 1)
    owner = tl.minimum(tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1), users - 1)
    place = tl.load(places + owner).to(tl.int64)
    inner = (dim < DIM)[None, :]
    x += tl.load(kinds + kind.to(tl.int64) * DIM + dim[None, :], mask=inner, other=0.0).to(tl.float32)
    x += tl.load(gaps + gap.to(tl.int64) * DIM + dim[None, :], mask=inner, other=0.0).to(tl.float32)
    x += tl.load(positions + place[:, None] * DIM + dim[None, :], mask=whole, other=0.0).to(tl.float32)
    where = out + row.to(tl.int64)[:, None] * DIM + dim[None, :]
    tl.store(where, x.to(out.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=["rows"])
def head_rows(
    x, norm_weight, norm_bias, weight, bias, out, limit, letters, state, rows, eps,
    DIM: tl.constexpr, PADDED: tl.constexpr, TASKS: tl.constexpr, LINES: tl.constexpr, LIMITED: tl.constexpr,
    MAILED: tl.constexpr, PROGRAMS: tl.constexpr, LETTER: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """LN(x)·W + b of LINES rows. MAILED: to where the next letter says."""
    if LIMITED:
        rows = tl.load(limit)
    if MAILED:
        letter, out = recipient(letters, state, PROGRAMS, LETTER)
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


def embed(tokens: torch.Tensor, tables: Tables) -> torch.Tensor:
    """[t, dim]; see `ends.embed`."""
    rows, dim = len(tokens), tables.kinds.shape[1]
    out = torch.empty((rows, dim), dtype=tables.kinds.dtype, device=tables.kinds.device)
    if rows:
        hot, slots = tables.hot or (tables.kinds, tokens)  # of which nothing is read
        embed_rows[triton.cdiv(rows, _LINES),](
            tokens, tables.items, tables.kinds, tables.gaps, tables.positions, hot, slots,
            out, rows, tokens.stride(0), tokens.stride(1),
            DIM=dim, PADDED=triton.next_power_of_2(dim), LINES=_LINES, HOT=tables.hot is not None, num_warps=4,
        )  # fmt: skip
    return out


def embed_candidates(
    items: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor, marks: tuple[int, int], tables: Tables
) -> torch.Tensor:
    """[t, dim]; see `ends.embed_candidates`. `starts` are those of the batch."""
    rows, users, dim = len(items), len(positions), tables.kinds.shape[1]
    out = torch.empty((rows, dim), dtype=tables.kinds.dtype, device=tables.kinds.device)
    if rows:
        hot, slots = tables.hot or (tables.kinds, items)
        embed_candidate_rows[triton.cdiv(rows, _LINES),](
            items, positions, starts, tables.items, tables.kinds, tables.gaps, tables.positions, hot, slots,
            out, rows, users, *marks,
            DIM=dim, PADDED=triton.next_power_of_2(dim), LINES=_LINES,
            USERS=max(_USERS, triton.next_power_of_2(users)), HOT=tables.hot is not None, num_warps=4,
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
        programs = triton.cdiv(rows, _LINES)
        head_rows[programs,](
            x.contiguous(), norm_weight, norm_bias, weight, bias, out, limit, None if mail is None else mail.letters,
            None if mail is None else mail.state, rows, eps,
            DIM=dim, PADDED=triton.next_power_of_2(dim), TASKS=tasks, LINES=_LINES, LIMITED=limit is not None,
            MAILED=mail is not None, PROGRAMS=programs if mail is not None else 1,
            LETTER=0 if mail is None else mail.letters.stride(0),
            TIMED=has_tanh(x.device), num_warps=4,
        )  # fmt: skip
    return out
