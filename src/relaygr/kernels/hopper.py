"""SiLU attention over pages for Hopper, in Gluon: one producer warp, two warpgroups that multiply.

    producer   work list, page table ─▶ bulk tensor copies ─▶ rings of Q, K and V tiles
    consumer   rows 0 … 63 of the block    S = Q·Kᵀ ┐ the next S and this P·V run on the tensor cores
    consumer   rows 64 … 127               P = silu ┘ while the weights between them are computed

The grid is persistent: a block takes items off a list, the longest of a user first. An item is 128 rows of one head of
one user. In an append its rows are aligned to pages by position, so one tile at most crosses the diagonal and the tiles
of a row's sum are the same, in the same order, however its history was cut into appends.

A key tile at the end of a history is copied so that its last valid token comes last: what lies before the page is out
of the tensor's bounds and arrives as zeros. silu(0) = 0, so a zero key has no weight and no tail needs a mask, and
whatever lies in a page behind its tokens is never read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["silu_over_pages"]

ROWS = gl.constexpr(128)
"""Query rows of an item: the tokens of a page."""

_STOP = gl.constexpr(-1)

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Of all threads that run a partition; Triton renamed it in 3.7."""


@gluon.jit
def _silu(s, half_scale):
    """silu(x) = h·(1 + tanh h), h = x/2: one instruction of the special-function unit instead of two."""
    h = s * half_scale
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [h], dtype=gl.float32, is_pure=True, pack=1)
    return h * t + h


@gluon.jit
def split_pages(pages, blocks, TARGET: gl.constexpr):
    """Pages of one split, from the user's own pages and blocks: up to TARGET blocks in all, two pages each at least."""
    splits = gl.maximum(gl.minimum(TARGET // gl.maximum(blocks, 1), (pages + 1) // 2), 1)
    return gl.maximum((pages + splits - 1) // splits, 1)


@gluon.jit
def _wait_for_kernel_before():
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_queries(q_desc, q_smem, full, free, items, first, column, D: gl.constexpr, QUERIES: gl.constexpr):
    place = items % QUERIES
    mbarrier.wait(free.index(place), ((items // QUERIES) & 1) ^ 1)
    mbarrier.expect(full.index(place), ROWS * D * (q_smem.dtype.primitive_bitwidth // 8))
    tma.async_copy_global_to_shared(q_desc, [first, column], full.index(place), q_smem.index(place * 2))
    tma.async_copy_global_to_shared(q_desc, [first + ROWS // 2, column], full.index(place), q_smem.index(place * 2 + 1))


@gluon.jit
def _produce(
    q_desc, kv_desc, q_smem, k_smem, v_smem, box, q_full, q_free, k_full, k_free, v_full, v_free, box_full, box_free,
    starts, cached, table, table_stride, counter, users, group, heads, ranks, height, work, layers, layer,
    TARGET: gl.constexpr, CAUSAL: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    QUERIES: gl.constexpr, JOINT: gl.constexpr, DYNAMIC: gl.constexpr, WAIT: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    PER: gl.constexpr = ROWS // KEYS
    box_layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 16, layout=box_layout)
    grid = gl.num_programs(0)
    index = gl.program_id(0)
    tile = 0
    items = 0
    while index < work:
        # Groups of users whose keys the cache holds together; in a group the longest items of every user come first.
        first_user = index // (heads * ranks * group) * group
        among = gl.minimum(group, users - first_user)
        rest = index - first_user * heads * ranks
        head = rest % heads
        user = first_user + (rest // heads) % among
        rank = rest // (heads * among)
        begin = gl.load(starts + user)
        end = gl.load(starts + user + 1)
        tokens = gl.load(cached + user)
        if CAUSAL:
            length = tokens
            tokens += end - begin
            block = rank
            if SPLIT:
                blocks = gl.maximum((tokens - 1) // ROWS - length // ROWS + 1, 1)
                block = rank % blocks
            position = ((tokens - 1) // ROWS - block) * ROWS
            first = begin + position - length
            shift = 0
            low = 0
            high = (gl.minimum(tokens, position + ROWS) + KEYS - 1) // KEYS
            empty = (end <= begin) | (position + ROWS <= length) | (position < 0)
            if SPLIT:
                shift = (user * ranks + rank) * height - first
                chunk = split_pages((tokens + ROWS - 1) // ROWS, blocks * heads, TARGET)
                low = rank // blocks * chunk * PER
                high = gl.minimum(high, low + chunk * PER)
        else:
            position = 0
            blocks = gl.maximum((end - begin + ROWS - 1) // ROWS, 1)
            first = begin + rank % blocks * ROWS
            shift = (user * ranks + rank) * height - first
            chunk = split_pages((tokens + ROWS - 1) // ROWS, blocks * heads, TARGET)
            low = rank // blocks * chunk * PER
            high = gl.minimum((tokens + KEYS - 1) // KEYS, low + chunk * PER)
            empty = end <= begin
        if (high > low) & (not empty):
            slot = items % 2
            mbarrier.wait(box_free.index(slot), ((items // 2) & 1) ^ 1)
            note = gl.where(lane == 0, head, 0)
            note = gl.where(lane == 1, first, note)
            note = gl.where(lane == 2, begin, note)
            note = gl.where(lane == 3, end, note)
            note = gl.where(lane == 4, position, note)
            note = gl.where(lane == 5, high - low, note)
            note = gl.where(lane == 6, high - 1, note)
            note = gl.where(lane == 7, tokens, note)
            note = gl.where(lane == 8, shift, note)
            box.index(slot).store(note)
            _barrier()
            mbarrier.arrive(box_full.index(slot))
            column = head * D
            pages = table + user.to(gl.int64) * table_stride
            page = gl.load(pages + (high - 1) // PER)
            if not WAIT:
                _load_queries(q_desc, q_smem, q_full, q_free, items, first, column, D, QUERIES)
            for step in range(0, high - low):
                j = high - 1 - step
                line = ((page * layers + layer) * 2) * PER + j % PER
                shift = gl.minimum(tokens - j * KEYS, KEYS) - KEYS
                page = gl.load(pages + gl.maximum(j - 1, 0) // PER)
                stage = tile % STAGES
                phase = ((tile // STAGES) & 1) ^ 1
                size: gl.constexpr = KEYS * D * (k_smem.dtype.primitive_bitwidth // 8)
                mbarrier.wait(k_free.index(stage), phase)
                mbarrier.expect(k_full.index(stage), 2 * size if JOINT else size)
                tma.async_copy_global_to_shared(
                    kv_desc, [line, shift, column], k_full.index(stage), k_smem.index(stage)
                )
                arrival = k_full.index(stage)
                if not JOINT:
                    arrival = v_full.index(stage)
                    mbarrier.wait(v_free.index(stage), phase)
                    mbarrier.expect(arrival, size)
                tma.async_copy_global_to_shared(kv_desc, [line + PER, shift, column], arrival, v_smem.index(stage))
                tile += 1
                if WAIT:  # noqa: SIM102
                    # Keys are there already; only the queries come from the kernel before.
                    if step == gl.minimum(high - low, STAGES) - 1:
                        _wait_for_kernel_before()
                        _load_queries(q_desc, q_smem, q_full, q_free, items, first, column, D, QUERIES)
            items += 1
        if DYNAMIC:
            index = grid + gl.atomic_add(counter, 1)
        else:
            index += grid
    if WAIT:
        _wait_for_kernel_before()
    slot = items % 2
    mbarrier.wait(box_free.index(slot), ((items // 2) & 1) ^ 1)
    box.index(slot).store(gl.where(lane == 5, _STOP, 0))
    _barrier()
    mbarrier.arrive(box_full.index(slot))


@gluon.jit
def _pick(note, lane, k: gl.constexpr):
    return gl.sum(gl.where(lane == k, note, 0), 0)


@gluon.jit
def _receive(box, box_full, box_free, items):
    layout: gl.constexpr = gl.BlockedLayout([16], [32], [4], [0])
    slot = items % 2
    mbarrier.wait(box_full.index(slot), (items // 2) & 1)
    note = box.index(slot).load(layout)
    mbarrier.arrive(box_free.index(slot))
    lane = gl.arange(0, 16, layout=layout)
    return (
        _pick(note, lane, 0), _pick(note, lane, 1), _pick(note, lane, 2), _pick(note, lane, 3), _pick(note, lane, 4),
        _pick(note, lane, 5), _pick(note, lane, 6), _pick(note, lane, 7), _pick(note, lane, 8),
    )  # fmt: skip


@gluon.jit
def _advance(
    p, o, q, k_smem, v_smem, k_full, k_free, v_full, v_free, turn, tile, half_scale, more,
    KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, JOINT: gl.constexpr, TURNS: gl.constexpr,
    HALF: gl.constexpr, s_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """One step: start S of this tile and P·V of the one before, weigh S while P·V runs.

    This tile's K has arrived. The wait for the next one stands between the weights and the end of P·V: it is a branch,
    so the assembler cannot sink the weights below the end of P·V, where nothing would run beside them. TURNS lets one
    warpgroup weigh at a time: the other multiplies meanwhile, instead of both queueing for the same unit.
    """
    stage = tile % STAGES
    before = (tile - 1) % STAGES
    zero = gl.zeros([ROWS // 2, KEYS], gl.float32, s_layout)
    s = warpgroup_mma(q, k_smem.index(stage).reshape([KEYS, D]).permute([1, 0]), zero, use_acc=False, is_async=True)
    if not JOINT:
        mbarrier.wait(v_full.index(before), ((tile - 1) // STAGES) & 1)
    o = warpgroup_mma(p, v_smem.index(before).reshape([KEYS, D]), o, is_async=True)
    if TURNS:
        mbarrier.wait(turn.index(HALF), (tile & 1) ^ (1 - HALF))
    s = warpgroup_mma_wait(num_outstanding=1, deps=[s])
    if not JOINT:
        mbarrier.arrive(k_free.index(stage))
    w = gl.convert_layout(_silu(s, half_scale).to(p.dtype), p_layout)
    mbarrier.wait(k_full.index((tile + 1) % STAGES), ((tile + 1) // STAGES) & 1, pred=more)
    if TURNS:
        mbarrier.arrive(turn.index(1 - HALF))
    o, p, w = warpgroup_mma_wait(num_outstanding=0, deps=[o, p, w])
    if JOINT:
        mbarrier.arrive(k_free.index(before))
    else:
        mbarrier.arrive(v_free.index(before))
    return w, o


@gluon.jit
def _consume(
    q_smem, k_smem, v_smem, box, q_full, q_free, k_full, k_free, v_full, v_free, box_full, box_free, turn,
    out, out_stride, half_scale, factor,
    CAUSAL: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, QUERIES: gl.constexpr,
    JOINT: gl.constexpr, TURNS: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    row0: gl.constexpr = HALF * (ROWS // 2)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    tile = 0
    items = 0
    head, first, begin, end, position, steps, top, tokens, shift = _receive(box, box_full, box_free, items)
    while steps > 0:
        place = items % QUERIES
        q = q_smem.index(place * 2 + HALF)
        mbarrier.wait(q_full.index(place), (items // QUERIES) & 1)
        if CAUSAL and KEYS < ROWS and HALF == 0:  # noqa: SIM102
            # The upper half of the diagonal page lies past these rows.
            if top * KEYS > position:
                stage = tile % STAGES
                phase = (tile // STAGES) & 1
                mbarrier.wait(k_full.index(stage), phase)
                mbarrier.arrive(k_free.index(stage))
                if not JOINT:
                    mbarrier.wait(v_full.index(stage), phase)
                    mbarrier.arrive(v_free.index(stage))
                if TURNS:
                    mbarrier.wait(turn.index(0), (tile & 1) ^ 1)
                    mbarrier.arrive(turn.index(1))
                tile += 1
                steps -= 1
                top -= 1
        stage = tile % STAGES
        mbarrier.wait(k_full.index(stage), (tile // STAGES) & 1)
        zero = gl.zeros([ROWS // 2, KEYS], gl.float32, s_layout)
        s = warpgroup_mma(q, k_smem.index(stage).reshape([KEYS, D]).permute([1, 0]), zero, use_acc=False, is_async=True)
        if TURNS:
            mbarrier.wait(turn.index(HALF), (tile & 1) ^ (1 - HALF))
        s = warpgroup_mma_wait(num_outstanding=0, deps=[s])
        if not JOINT:
            mbarrier.arrive(k_free.index(stage))
        w = _silu(s, half_scale)
        if CAUSAL:
            key = gl.minimum(tokens, (top + 1) * KEYS) - KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))
            row = position + row0 + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, s_layout))
            w = gl.where(key[None, :] <= row[:, None], w, 0.0)
        p = gl.convert_layout(w.to(q_smem.dtype), p_layout)
        o = gl.zeros([ROWS // 2, D], gl.float32, o_layout)
        tile += 1
        mbarrier.wait(k_full.index(tile % STAGES), (tile // STAGES) & 1, pred=steps > 1)
        if TURNS:
            mbarrier.arrive(turn.index(1 - HALF))
        # Two at a time, so that the weights of one and of the next keep registers of their own.
        for j in range(0, (steps - 1) // 2):
            p, o = _advance(
                p, o, q, k_smem, v_smem, k_full, k_free, v_full, v_free, turn, tile, half_scale, True,
                KEYS, D, STAGES, JOINT, TURNS, HALF, s_layout, p_layout,
            )  # fmt: skip
            p, o = _advance(
                p, o, q, k_smem, v_smem, k_full, k_free, v_full, v_free, turn, tile + 1, half_scale, 2 * j + 3 < steps,
                KEYS, D, STAGES, JOINT, TURNS, HALF, s_layout, p_layout,
            )  # fmt: skip
            tile += 2
        if steps % 2 == 0:
            p, o = _advance(
                p, o, q, k_smem, v_smem, k_full, k_free, v_full, v_free, turn, tile, half_scale, False,
                KEYS, D, STAGES, JOINT, TURNS, HALF, s_layout, p_layout,
            )  # fmt: skip
            tile += 1
        mbarrier.arrive(q_free.index(place))
        stage = (tile - 1) % STAGES
        if not JOINT:
            mbarrier.wait(v_full.index(stage), ((tile - 1) // STAGES) & 1)
        o = warpgroup_mma(p, v_smem.index(stage).reshape([KEYS, D]), o, is_async=True)
        o, p = warpgroup_mma_wait(num_outstanding=0, deps=[o, p])
        if JOINT:
            mbarrier.arrive(k_free.index(stage))
        else:
            mbarrier.arrive(v_free.index(stage))
        row = first + row0 + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, o_layout))
        column = head * D + gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
        where = out + (row + shift).to(gl.int64)[:, None] * out_stride + column[None, :]
        gl.store(where, (o * factor).to(out.dtype.element_ty), mask=((row >= begin) & (row < end))[:, None])
        items += 1
        head, first, begin, end, position, steps, top, tokens, shift = _receive(box, box_full, box_free, items)


# What differs between batches: a launch must never wait for a compilation.
@gluon.jit(do_not_specialize=["table_stride", "users", "group", "heads", "ranks", "height", "work", "layers", "layer"])
def silu_over_pages(
    q_desc, kv_desc, out, out_stride, starts, cached, table, table_stride, counter,
    users, group, heads, ranks, height, work, layers, layer, half_scale, factor,
    TARGET: gl.constexpr, CAUSAL: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    QUERIES: gl.constexpr, JOINT: gl.constexpr, TURNS: gl.constexpr, DYNAMIC: gl.constexpr,
    WAIT: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """factor · Σ_j silu(q·k_j·scale)·v_j for every item.

    WAIT: it was launched while the kernel before, which writes its queries, ends; the keys were there before that one.
    Append writes the rows of `out`. Score, and an append that is SPLIT, write the sum of each split in fp32, at the
    item's own `height` rows of `out`; a split or a user without keys writes nothing.
    """
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * QUERIES, ROWS // 2, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, 1, KEYS, D], kv_desc.layout)
    v_smem = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, 1, KEYS, D], kv_desc.layout)
    box = gl.allocate_shared_memory(gl.int32, [2, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], bar)
    q_free = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    box_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    box_free = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for i in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(box_full.index(i), count=1)
        mbarrier.init(box_free.index(i), count=2)
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                q_smem, k_smem, v_smem, box, q_full, q_free, k_full, k_free, v_full, v_free, box_full, box_free, turn,
                out, out_stride, half_scale, factor,
                CAUSAL, KEYS, D, STAGES, QUERIES, JOINT, TURNS, 0,
            )),
            (_consume, (
                q_smem, k_smem, v_smem, box, q_full, q_free, k_full, k_free, v_full, v_free, box_full, box_free, turn,
                out, out_stride, half_scale, factor,
                CAUSAL, KEYS, D, STAGES, QUERIES, JOINT, TURNS, 1,
            )),
            (_produce, (
                q_desc, kv_desc, q_smem, k_smem, v_smem, box,
                q_full, q_free, k_full, k_free, v_full, v_free, box_full, box_free,
                starts, cached, table, table_stride, counter, users, group, heads, ranks, height, work, layers,
                layer, TARGET, CAUSAL, KEYS, D, STAGES, QUERIES, JOINT, DYNAMIC, WAIT, SPLIT,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
