"""Attention over pages in plain Triton: any GPU Triton knows, and its interpreter on a CPU.

An item is ROWS rows of one head of one user. In an append its rows are aligned to pages by position, so that a row's
sum is taken in the same order however its history was cut into appends. Tiles below the diagonal and inside the history
are read without a mask; the last ones with.
"""

import triton
import triton.language as tl

__all__ = ["add_splits", "attend", "combine", "silu", "split_pages", "write_pages"]


@triton.jit
def silu(x, HARDWARE: tl.constexpr):
    """silu(x) = h·(1 + tanh h), h = x/2: one instruction of the special-function unit instead of two."""
    if HARDWARE:
        h = x * 0.5
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [h], dtype=tl.float32, is_pure=True, pack=1)
        return h * t + h
    return x * tl.sigmoid(x)


@triton.jit
def split_pages(pages, blocks, TARGET: tl.constexpr):
    """Pages of one split, from the user's own pages and blocks: up to TARGET blocks in all, two pages each at least."""
    splits = tl.maximum(tl.minimum(TARGET // tl.maximum(blocks, 1), (pages + 1) // 2), 1)
    return tl.maximum((pages + splits - 1) // splits, 1)


@triton.jit
def _tile(
    pages, table, j, layers, layer, head, tokens, heads,
    PAGE: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """K and V of tile j, [KEYS, WIDTH] each: zeros past the head's width and, masked, past the user's tokens."""
    page = tl.load(table + j * KEYS // PAGE).to(tl.int64)
    base = pages + (page * layers + layer) * 2 * PAGE * heads * D + head * D
    token = (j * KEYS) % PAGE + tl.arange(0, KEYS)
    dim = tl.arange(0, WIDTH)
    where = base + token[:, None] * heads * D + dim[None, :]
    apart = PAGE * heads * D
    if MASK or WIDTH != D:
        valid = (dim < D)[None, :]
        if MASK:
            valid &= (j * KEYS + tl.arange(0, KEYS) < tokens)[:, None]
        return tl.load(where, mask=valid, other=0.0), tl.load(where + apart, mask=valid, other=0.0)
    return tl.load(where), tl.load(where + apart)


@triton.jit
def _add(
    q, k, v, acc, top, total, position, j, tokens, scale,
    KEYS: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr, SOFTMAX: tl.constexpr, MASK: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
    if MASK:
        key = j * KEYS + tl.arange(0, KEYS)
        visible = (key < tokens)[None, :]
        if CAUSAL:
            visible &= key[None, :] <= (position + tl.arange(0, ROWS))[:, None]
    if SOFTMAX:
        if MASK:
            s = tl.where(visible, s, float("-inf"))
        highest = tl.maximum(top, tl.max(s, 1))
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        w = tl.exp(s - finite[:, None])
        shrink = tl.exp(top - finite)
        total = total * shrink + tl.sum(w, 1)
        acc = acc * shrink[:, None]
        top = highest
    else:
        w = silu(s, HARDWARE)
        if MASK:
            w = tl.where(visible, w, 0.0)
    acc = tl.dot(w.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
    return acc, top, total


# What differs between batches: a launch must never wait for a compilation.
@triton.jit(do_not_specialize=["table_stride", "heads", "ranks", "height", "layers", "layer"])
def attend(
    q, out, sums, pages, starts, cached, table,
    q_stride, out_stride, table_stride, heads, ranks, height, layers, layer, scale, factor,
    TARGET: tl.constexpr, CAUSAL: tl.constexpr, SOFTMAX: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, HARDWARE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One item. Append writes rows of `out`. SPLIT, as scores always are: the sum of its split in fp32, at the item's
    own `height` rows of `out`, and under softmax the largest logit and the sum of weights of each row, in `sums`."""
    index = tl.program_id(0)
    head = index % heads
    rank = (index // heads) % ranks
    user = index // (heads * ranks)
    begin = tl.load(starts + user)
    end = tl.load(starts + user + 1)
    tokens = tl.load(cached + user)
    low = 0
    if end <= begin:
        return
    if CAUSAL:
        length = tokens
        tokens += end - begin
        block = rank
        if SPLIT:
            blocks = (tokens - 1) // ROWS - length // ROWS + 1
            block = rank % blocks
        position = ((tokens - 1) // ROWS - block) * ROWS
        first = begin + position - length
        high = (tl.minimum(tokens, position + ROWS) + KEYS - 1) // KEYS
        full = position // KEYS
        shift = 0
        if (position + ROWS <= length) | (position < 0):
            return
        if SPLIT:
            shift = (user * ranks + rank) * height - first
            chunk = split_pages((tokens + PAGE - 1) // PAGE, blocks * heads, TARGET)
            low = rank // blocks * chunk * (PAGE // KEYS)
            high = tl.minimum(high, low + chunk * (PAGE // KEYS))
            full = tl.minimum(full, high)
            if low >= high:
                return
    else:
        position = 0
        blocks = (end - begin + ROWS - 1) // ROWS
        first = begin + rank % blocks * ROWS
        shift = (user * ranks + rank) * height - first
        high = (tokens + KEYS - 1) // KEYS
        full = tokens // KEYS
        chunk = split_pages((tokens + PAGE - 1) // PAGE, blocks * heads, TARGET)
        low = rank // blocks * chunk * (PAGE // KEYS)
        high = tl.minimum(high, low + chunk * (PAGE // KEYS))
        full = tl.minimum(full, high)
        if low >= high:
            return
    table += user.to(tl.int64) * table_stride
    row = first + tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    inside = ((row >= begin) & (row < end))[:, None] & (dim < D)[None, :]
    column = head * D + dim[None, :]
    queries = tl.load(q + row.to(tl.int64)[:, None] * q_stride + column, mask=inside, other=0.0)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for j in range(low, full):
        k, v = _tile(pages, table, j, layers, layer, head, tokens, heads, PAGE, KEYS, D, WIDTH, False)
        acc, top, total = _add(
            queries, k, v, acc, top, total, position, j, tokens, scale, KEYS, ROWS, CAUSAL, SOFTMAX, False, HARDWARE
        )
    for j in range(tl.maximum(full, low), high):
        k, v = _tile(pages, table, j, layers, layer, head, tokens, heads, PAGE, KEYS, D, WIDTH, True)
        acc, top, total = _add(
            queries, k, v, acc, top, total, position, j, tokens, scale, KEYS, ROWS, CAUSAL, SOFTMAX, True, HARDWARE
        )
    place = (row + shift).to(tl.int64)
    if not SOFTMAX:
        acc = acc * factor
    elif not SPLIT:
        acc = acc / total[:, None]
    else:
        beside = sums + (place * heads + head) * 2
        mine = (row >= begin) & (row < end)
        tl.store(beside, top, mask=mine)
        tl.store(beside + 1, total, mask=mine)
    tl.store(out + place[:, None] * out_stride + column, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["ranks", "height"])
def combine(
    parts, sums, q, k_new, v_new, u, weight, bias, out, starts, cached,
    q_stride, new_stride, u_stride, out_stride, ranks, height, scale, factor, eps,
    TARGET: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
    MANY: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr, HARDWARE: tl.constexpr,
    SOFTMAX: tl.constexpr, GATE: tl.constexpr, CONCAT: tl.constexpr, WAIT: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """A, the candidate itself and the sums of its user's splits, in order: LINES rows. GATE: [U | A | U·LN(A)], or
    U·LN(A), of them."""
    if WAIT:
        tl.extra.cuda.gdc_wait()
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    user = tl.program_id(1)
    begin = tl.load(starts + user)
    end = tl.load(starts + user + 1)
    first = begin + tl.program_id(0) * LINES
    if first >= end:
        return
    pages = (tl.load(cached + user) + PAGE - 1) // PAGE
    blocks = (end - begin + ROWS - 1) // ROWS
    chunk = split_pages(pages, blocks * HEADS, TARGET)
    splits = (pages + chunk - 1) // chunk
    row = (first + tl.arange(0, LINES)).to(tl.int64)
    head = tl.arange(0, MANY)
    dim = tl.arange(0, WIDTH)
    column = (head[:, None] * D + dim[None, :])[None, :, :]
    mine = (row < end)[:, None] & (head < HEADS)[None, :]
    inside = mine[:, :, None] & (dim < D)[None, None, :]
    own = row[:, None, None] * new_stride + column
    query = tl.load(q + row[:, None, None] * q_stride + column, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(k_new + own, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(v_new + own, mask=inside, other=0.0).to(tl.float32)
    acc = v
    top = tl.sum(query * k, 2) * scale
    total = tl.full([LINES, MANY], 1.0, tl.float32)
    if not SOFTMAX:
        acc = (silu(top, HARDWARE) * factor)[:, :, None] * v
    place = (user * ranks + (first - begin) // ROWS).to(tl.int64) * height + (first - begin) % ROWS
    line = place + tl.arange(0, LINES)
    for start in range(0, splits, AHEAD):
        for i in tl.static_range(AHEAD):  # so that several loads are in flight
            live = start + i < splits
            at = line + (start + i) * blocks * height
            part = tl.load(parts + at[:, None, None] * (HEADS * D) + column, mask=inside & live, other=0.0)
            if SOFTMAX:
                beside = sums + (at[:, None] * HEADS + head[None, :]) * 2
                highest = tl.load(beside, mask=mine & live, other=float("-inf"))
                weights = tl.load(beside + 1, mask=mine & live, other=0.0)
                both = tl.maximum(top, highest)
                before = tl.exp(top - both)
                now = tl.exp(highest - both)
                acc = acc * before[:, :, None] + part * now[:, :, None]
                total = total * before + weights * now
                top = both
            else:
                acc += part
    if SOFTMAX:
        acc = acc / total[:, :, None]
    attended = acc.to(out.dtype.element_ty)
    where = out + row[:, None, None] * out_stride + column
    if GATE:
        values = tl.where(inside, attended.to(tl.float32), 0.0)
        mean = tl.sum(tl.sum(values, 2), 1) / (HEADS * D)
        centred = tl.where(inside, values - mean[:, None, None], 0.0)
        spread = 1 / tl.sqrt(tl.sum(tl.sum(centred * centred, 2), 1) / (HEADS * D) + eps)
        w = tl.load(weight + column, mask=column < HEADS * D, other=0.0).to(tl.float32)
        b = tl.load(bias + column, mask=column < HEADS * D, other=0.0).to(tl.float32)
        gate = tl.load(u + row[:, None, None] * u_stride + column, mask=inside, other=0.0)
        gated = gate.to(tl.float32) * (centred * spread[:, None, None] * w + b)
        if CONCAT:
            tl.store(where, gate, mask=inside)
            tl.store(where + HEADS * D, attended, mask=inside)
            where += 2 * HEADS * D
        tl.store(where, gated.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(where, attended, mask=inside)


@triton.jit(do_not_specialize=["ranks", "height"])
def add_splits(
    parts, sums, out, starts, cached, out_stride, ranks, height,
    TARGET: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """A of LINES new tokens of one head from the sums of their splits, in order."""
    user = tl.program_id(1)
    head = tl.program_id(2)
    begin = tl.load(starts + user)
    end = tl.load(starts + user + 1)
    first = begin + tl.program_id(0) * LINES
    if first >= end:
        return
    length = tl.load(cached + user)
    tokens = length + end - begin
    blocks = (tokens - 1) // ROWS - length // ROWS + 1
    chunk = split_pages((tokens + PAGE - 1) // PAGE, blocks * HEADS, TARGET)
    row = first + tl.arange(0, LINES)
    mine = row < end
    position = length + row - begin
    block = (tokens - 1) // ROWS - position // ROWS
    reach = tl.minimum((position // ROWS + 1) * ROWS, tokens)
    splits = tl.where(mine, ((reach + PAGE - 1) // PAGE + chunk - 1) // chunk, 0)
    dim = tl.arange(0, WIDTH)
    column = head * D + dim[None, :]
    inside = mine[:, None] & (dim < D)[None, :]
    line = (user * ranks + block).to(tl.int64) * height + position % ROWS
    acc = tl.zeros([LINES, WIDTH], tl.float32)
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    for start in range(0, tl.max(splits, 0), AHEAD):
        for i in tl.static_range(AHEAD):  # so that several loads are in flight
            live = start + i < splits
            at = line + (start + i) * blocks * height
            part = tl.load(parts + at[:, None] * (HEADS * D) + column, mask=inside & live[:, None], other=0.0)
            if SOFTMAX:
                beside = sums + (at * HEADS + head) * 2
                highest = tl.load(beside, mask=live, other=float("-inf"))
                weights = tl.load(beside + 1, mask=live, other=0.0)
                both = tl.maximum(top, highest)
                finite = tl.where(both == float("-inf"), 0.0, both)
                before = tl.exp(top - finite)
                now = tl.exp(highest - finite)
                acc = acc * before[:, None] + part * now[:, None]
                total = total * before + weights * now
                top = both
            else:
                acc += part
    if SOFTMAX:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + row.to(tl.int64)[:, None] * out_stride + column, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["table_stride", "heads", "layers", "layer"])
def write_pages(
    k, v, pages, starts, cached, table, k_stride, v_stride, table_stride, heads, layers, layer,
    PAGE: tl.constexpr, D: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Put LINES new tokens of one user where they belong, WIDTH values of each at a time."""
    user = tl.program_id(1)
    begin = tl.load(starts + user)
    row = begin + tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = row < tl.load(starts + user + 1)
    position = tl.load(cached + user) + row - begin
    page = tl.load(table + user.to(tl.int64) * table_stride + position // PAGE, mask=inside, other=0).to(tl.int64)
    base = ((page * layers + layer) * 2 * PAGE + position % PAGE) * heads * D
    for first in range(0, heads * D, WIDTH):
        dim = first + tl.arange(0, WIDTH)
        mask = inside[:, None] & (dim < heads * D)[None, :]
        where = pages + base[:, None] + dim[None, :]
        new = row.to(tl.int64)[:, None]
        tl.store(where, tl.load(k + new * k_stride + dim[None, :], mask=mask).to(pages.dtype.element_ty), mask=mask)
        where += PAGE * heads * D
        tl.store(where, tl.load(v + new * v_stride + dim[None, :], mask=mask).to(pages.dtype.element_ty), mask=mask)
