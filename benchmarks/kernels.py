"""Speed and correctness of the kernels on one GPU: a table, and a JSON file with machine, commit, inputs and figures.

    python benchmarks/kernels.py --commit $(git rev-parse --short HEAD) [--only score,layer]

Sections that are not run keep what the file has of them; each says its commit, time and ceilings.
Every figure is a median over replays of a captured graph whose launches read different layers of the pool, so that keys
come from device memory unless a user's fit the cache by themselves. Ceilings are measured in the same run: a large bf16
matrix product, once (as the figures are measured) and a hundred times on end (at the card's power limit), and a large
elementwise kernel for the memory. Causal FLOPs are counted as 2·n²·H·d, those of scores as 4·m·n·H·d.
"""

import argparse
import functools
import importlib.util
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest import mock

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import relaygr.kernels
from relaygr.history import PAGE
from relaygr.kernels import PageLayout, Ragged, ReferenceAttention, Silu, Softmax, Weighting, hopper
from relaygr.kernels import layer as hstu
from relaygr.kernels.triton import TritonAttention

DEVICE: Final = "cuda"
DTYPE: Final = torch.bfloat16
CACHE_BYTES: Final = 128 << 20
TOLERANCE: Final = 5e-3
HEADS: Final = 4
LAYER_ROWS: Final = (512, 2048, 8192, 32768)

TRIED: Final = {
    "append": [
        "one Triton loop, pointer loads, 128 rows (the portable kernel; its figure is in this file)",
        "two warpgroups and a producer warp with bulk tensor copies (kept)",
        "S of the next tile and P·V of the last one started before the weights are computed (kept)",
        "steps unrolled by two, so that weights need no register copies (kept)",
        "rounds of alternating direction over a static list instead of a counter: up to 20% slower",
        "users one after the other, or all interleaved, instead of groups whose keys fit the cache: slower",
        "warpgroups weighing in turns: slower in appends, faster in scores",
        "K and V of a tile on one barrier: faster for heads of 64, needs the room for a stage more",
        "part of the tanh as a polynomial on the multipliers: slower, the issue slots are what is short",
        "two tiles of S in registers: the assembler serialises it across the loop; inside a pair of tiles, slower",
        "packed tanh of two 16-bit values: the unit does them one after the other",
    ],
    "layer": [
        "LayerNorm in the projection's own blocks, 512 rows: 12.5 µs against 7.0 with a kernel of its own",
        "the same by moments that the product before leaves, rows normed as they are read: 14.4 µs against 5.7 + 2.3",
        "norm, gate and concat in the output product's blocks: wrong results, cause not found",
        "sum of splits, norm, gate and concat in one kernel (kept): 4.6 µs; all splits of a row as one block: 9.1 µs",
        "every kernel launched while the one before it ends, ranks at 8K: 15% slower, since blocks that wait gather on"
        " the few multiprocessors that attention leaves free, or two on one",
        "the same but for the sum of splits, and products with a multiprocessor for each block: 6% faster (kept)",
        "fetching weights into the cache during that wait: no difference",
        "2,048 rows: tiles of 64 × 128 in the output product (kept): 10 µs against 21 with 128 × 256",
    ],
    "score": [
        "keys split over blocks, chosen from each user's own rows and length, sums added by a second kernel (kept)",
        "tiles of 64 and 128 keys, two to six in flight; weighing in turns (kept: 128 keys, three, in turns)",
        "first keys read while the projection ends (kept): 1 to 3% faster for 4 and 16 users, no difference for one",
    ],
}


@dataclass(frozen=True)
class Target:
    """One attention row of the targets, or one shape of such a row."""

    name: str
    kind: str
    users: int
    tokens: int
    rows: int
    head_dim: int
    least: float


TARGETS: Final = [
    Target("causal, 16K tokens, 4 × 128", "append", 1, 16384, 0, 128, 620),
    Target("causal, 16K tokens, 4 × 64", "append", 1, 16384, 0, 64, 540),
    Target("causal, 16K tokens, 4 × 256", "append", 1, 16384, 0, 256, 660),
    Target("causal, 16 users of 2K, 4 × 64", "append", 16, 2048, 0, 64, 400),
    Target("causal, 16 users of 2K, 4 × 128", "append", 16, 2048, 0, 128, 460),
    Target("causal, 16 users of 2K, 4 × 256", "append", 16, 2048, 0, 256, 530),
    Target("512 candidates over 16K keys, 4 × 128", "score", 1, 16384, 512, 128, 450),
]


@dataclass
class Section:
    """What one run measured of one subject."""

    commit: str
    when: str
    ceilings: dict[str, float]
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Report:
    """What goes into the file."""

    machine: dict[str, Any]
    inputs: dict[str, Any]
    layer_tried: list[str]
    sections: dict[str, Section] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")


Job = tuple[str, Callable[[], dict[str, Any]]]


def median_ms(launches: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Milliseconds of one launch: the median replay of a graph of all of them, over their number."""
    return side_by_side({"": launches}, replays)[""]


def side_by_side(variants: Mapping[str, Sequence[Callable[[], object]]], replays: int = 15) -> dict[str, float]:
    """`median_ms` of several, replayed in turns: whatever the clocks do, they do to all."""
    graphs = {}
    for name, launches in variants.items():
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for launch in launches:
                launch()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for replay in range(replays + 3):
        for name, graph in graphs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            if replay >= 3:
                times[name].append(start.elapsed_time(stop) / len(variants[name]))
    return {name: sorted(some)[len(some) // 2] for name, some in times.items()}


def measure_ceilings() -> dict[str, float]:
    left, right = (torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE) for _ in range(2))
    burst = min(median_ms([lambda: left @ right]) for _ in range(3))
    sustained = median_ms([lambda: left @ right] * 100, replays=3)
    source = torch.randn(1 << 30, device=DEVICE, dtype=DTYPE)
    sink = torch.empty_like(source)
    copy = median_ms([lambda: torch.neg(source, out=sink)] * 4)  # a kernel: copies in a graph go to the copy engine
    return {
        "matrix_tflops": round(2 * 8192**3 / burst / 1e9, 1),
        "matrix_sustained_tflops": round(2 * 8192**3 / sustained / 1e9, 1),
        "copy_gb_s": round(2 * source.numel() * source.element_size() / copy / 1e6, 1),
    }


class Bench:
    """Attention on shapes, each on a pool of its own. Shares are of the ceilings given."""

    def __init__(self, ceilings: dict[str, float]) -> None:
        self._ceilings = ceilings
        self._attention = TritonAttention()

    def append(
        self, users: int, tokens: int, head_dim: int, *, weighting: Weighting | None = None, hopper: bool = True,
        shuffled: bool = True,
    ) -> dict[str, Any]:  # fmt: skip
        layers = _layers(users * tokens, head_dim, most=4)
        pages, batch = _pool(users, tokens, layers, head_dim, new=tokens, shuffled=shuffled)
        q = torch.randn(users * tokens, HEADS, head_dim, device=DEVICE, dtype=DTYPE)
        attention = self._attention if hopper else TritonAttention(hopper=False)
        chosen = weighting or Silu(head_dim**-0.5, float(tokens))
        launches = [partial(attention.append, chosen, q, pages, layer, batch) for layer in range(layers)]
        ms = median_ms(launches)
        flops = users * 2 * tokens**2 * HEADS * head_dim
        moved = users * tokens * HEADS * head_dim * DTYPE.itemsize * 4
        return self._figure(
            "append", ms, flops, moved, users=users, tokens=tokens, head_dim=head_dim, weighting=type(chosen).__name__,
            kernel="hopper" if hopper and isinstance(chosen, Silu) else "portable",
        )  # fmt: skip

    def score(
        self, users: int, tokens: int, rows: int, head_dim: int, *, weighting: Weighting | None = None
    ) -> dict[str, Any]:
        layers = _layers(users * tokens, head_dim, most=16)
        pages, batch = _pool(users, tokens, layers, head_dim, new=0, rows=rows)
        q, k, v = (torch.randn(users * rows, HEADS, head_dim, device=DEVICE, dtype=DTYPE) for _ in range(3))
        chosen = weighting or Silu(head_dim**-0.5, float(tokens))
        launches = [partial(self._attention.score, chosen, q, k, v, pages, layer, batch) for layer in range(layers)]
        ms = median_ms(launches)
        flops = users * 4 * rows * tokens * HEADS * head_dim
        moved = users * (2 * tokens + 4 * rows) * HEADS * head_dim * DTYPE.itemsize
        return self._figure(
            "score", ms, flops, moved, users=users, tokens=tokens, rows=rows, head_dim=head_dim,
            weighting=type(chosen).__name__, kernel="hopper" if isinstance(chosen, Silu) else "portable",
        )  # fmt: skip

    def _figure(self, kind: str, ms: float, flops: int, moved: int, **shape: object) -> dict[str, Any]:
        ceilings = self._ceilings
        tflops, gb_s = flops / ms / 1e9, moved / ms / 1e6
        return {
            "kind": kind,
            **shape,
            "heads": HEADS,
            "us": round(ms * 1e3, 2),
            "tflops": round(tflops, 1),
            "gb_s": round(gb_s, 1),
            "of_product": round(tflops / ceilings["matrix_tflops"], 3),
            "of_sustained_product": round(tflops / ceilings["matrix_sustained_tflops"], 3),
            "of_copy_ceiling": round(gb_s / ceilings["copy_gb_s"], 3),
        }


def _layers(tokens: int, head_dim: int, *, most: int) -> int:
    """Layers of the pool that together exceed the cache."""
    per_layer = tokens * HEADS * head_dim * 2 * DTYPE.itemsize
    return max(2, min(most, -(-CACHE_BYTES // per_layer)))


def _pool(
    users: int, tokens: int, layers: int, head_dim: int, *, new: int, rows: int = 0, shuffled: bool = True
) -> tuple[torch.Tensor, Ragged]:
    """Random pages in random order, and a batch that appends `new` of `tokens` tokens or scores `rows` candidates."""
    per_user = PageLayout.count(tokens)
    pages = PageLayout(layers, HEADS, head_dim, DTYPE).allocate(users * per_user, device=DEVICE)
    for first in range(0, len(pages), 256):
        pages[first : first + 256].normal_()
    order = torch.randperm(len(pages)) if shuffled else torch.arange(len(pages))
    tables = order.view(users, per_user).tolist()
    return pages, Ragged.build([new or rows] * users, [tokens - new] * users, tables, DEVICE)


def check(
    head_dim: int, rows: Sequence[int], cached: Sequence[int], weighting: Weighting, *, causal: bool
) -> dict[str, Any]:
    """bf16 against float64: fresh inputs, NaN in free pages, in the room behind tokens, and in fresh memory."""
    layers, layer = 2, 1
    ends = [c + (r if causal else 0) for r, c in zip(rows, cached, strict=True)]
    counts = [PageLayout.count(n) for n in ends]
    order = torch.randperm(sum(counts) + 3).tolist()
    tables = [order[sum(counts[:u]) : sum(counts[: u + 1])] for u in range(len(counts))]
    batch = Ragged.build(rows, cached, tables, DEVICE)
    pages = PageLayout(layers, HEADS, head_dim, DTYPE).allocate(len(order), device=DEVICE).fill_(torch.nan)
    for user, length in enumerate(cached):
        for start in range(0, length, PAGE):
            page = pages[tables[user][start // PAGE], layer, :, : min(PAGE, length - start)]
            page.copy_(torch.randn(page.shape))
    q, k, v = (torch.randn(sum(rows), HEADS, head_dim, device=DEVICE, dtype=DTYPE) for _ in range(3))
    reference = ReferenceAttention()
    errors = {}
    for name, attention in (("hopper", TritonAttention()), ("portable", TritonAttention(hopper=False))):
        torch.full((64 << 20,), torch.nan, device=DEVICE)  # what the allocator hands out next is poisoned
        if causal:
            attention.write(k, v, pages, layer, batch)
        wide = pages.double().nan_to_num_(0.0)
        if causal:
            result = attention.append(weighting, q, pages, layer, batch)
            expected = reference.append(weighting, q.double(), wide, layer, batch)
        else:
            result = attention.score(weighting, q, k, v, pages, layer, batch)
            expected = reference.score(weighting, q.double(), k.double(), v.double(), wide, layer, batch)
        finite = bool(result.isfinite().all())
        difference = (result.double() - expected).pow(2).sum((0, 2)) / expected.pow(2).sum((0, 2))
        errors[name] = float(difference.sqrt().max()) if finite else float("inf")
    return {
        "kind": "append" if causal else "score", "head_dim": head_dim, "weighting": type(weighting).__name__,
        "rows": list(rows), "cached": list(cached), "error": errors, "passed": max(errors.values()) <= TOLERANCE,
    }  # fmt: skip


def layer_figures(rows: int, dim: int, heads: int, head_dim: int) -> dict[str, Any]:
    """What stands around attention in one layer, plain torch against fused, in microseconds."""
    width = heads * head_dim

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)

    before, after = hstu.Norm(random(dim), random(dim), 1e-6), hstu.Norm(random(width), random(width), 1e-6)
    weight, bias, last = random(dim, 4 * width, scale=dim**-0.5), random(4 * width), random(3 * width, dim, scale=0.02)
    x, attended = random(rows, dim), random(rows, heads, head_dim)
    count = PageLayout.count(rows)
    pages = PageLayout(1, heads, head_dim, DTYPE).allocate(count, device=DEVICE)
    batch = Ragged.build([rows], [0], [list(range(count))], DEVICE)
    attention = TritonAttention()

    def plain() -> None:
        projected = hstu.project_plain(x, before, weight, bias, heads, silu_all=False)
        attention.write(projected.k, projected.v, pages, 0, batch)

    def fused() -> tuple[torch.Tensor, torch.Tensor]:
        return hstu.project_into(attention, x, before, weight, bias, pages, 0, batch, silu_all=False)

    u, _ = fused()
    close = hstu.finish_plain(x, u, attended, after, last, concat=True).float()
    difference = hstu.finish(x, u, attended, after, last, concat=True).float() - close
    times = {
        "project_plain_us": median_ms([plain] * 4),
        "project_fused_us": median_ms([fused] * 4),
        "finish_plain_us": median_ms([lambda: hstu.finish_plain(x, u, attended, after, last, concat=True)] * 4),
        "finish_fused_us": median_ms([lambda: hstu.finish(x, u, attended, after, last, concat=True)] * 4),
        "product_alone_us": median_ms([lambda: x @ weight] * 4),
    }
    return {
        "rows": rows, "dim": dim, "heads": heads, "head_dim": head_dim,
        **{name: round(ms * 1e3, 2) for name, ms in times.items()},
        "finish_difference": float(difference.norm() / close.norm()),
    }  # fmt: skip


def stack_figures(
    users: int, tokens: int, candidates: int, *, append: bool = True, layers: int = 8, dim: int = 512
) -> dict[str, Any]:
    """All layers of a model, without embeddings and heads: whole histories appended, candidates scored on them."""
    head_dim = dim // HEADS

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)

    def norm() -> hstu.Norm:
        return hstu.Norm(random(dim), random(dim), 1e-6)

    pages, history = _pool(users, tokens, layers, head_dim, new=tokens)
    tables = history.table.tolist()
    batch = Ragged.build([candidates] * users, [tokens] * users, tables, DEVICE)
    bound = Ragged.bound(users, candidates, history.table.shape[1], DEVICE)
    for mine, exact in ((bound.starts, batch.starts), (bound.cached, batch.cached), (bound.table, batch.table)):
        mine.copy_(exact)
    stack = [
        hstu.LayerWeights(
            norm(), random(dim, 4 * dim, scale=0.03), random(4 * dim), norm(), random(3 * dim, dim, scale=0.02),
            silu_all=False, concat=True,
        )
        for _ in range(layers)
    ]  # fmt: skip
    weighting, attention = Silu(head_dim**-0.5, float(tokens)), TritonAttention()

    def pre_infer(x: torch.Tensor) -> None:
        for layer, (before, weight, bias, after, last, _, _) in enumerate(stack):
            u, q = hstu.project_into(attention, x, before, weight, bias, pages, layer, history, silu_all=False)
            if layer < layers - 1:
                attended = attention.append(weighting, q, pages, layer, history)
                x = hstu.finish(x, u, attended, after, last, concat=True)

    def rank(batch: Ragged, x: torch.Tensor) -> None:
        for layer, weights in enumerate(stack):
            x = hstu.score(attention, weighting, x, weights, pages, layer, batch)

    x = random(users * candidates, dim)
    times = side_by_side({"rank_ms": [partial(rank, batch, x)], "rank_of_bounds_ms": [partial(rank, bound, x)]}, 31)
    if append:
        times["pre_infer_ms"] = median_ms([partial(pre_infer, random(users * tokens, dim))])
    return {
        "users": users, "tokens": tokens, "candidates": candidates, "layers": layers, "dim": dim,
        **{name: round(ms, 4) for name, ms in times.items()},
    }  # fmt: skip


def plan(bench: Bench) -> dict[str, list[Job]]:
    """What each section measures."""
    jobs: dict[str, list[Job]] = {
        "targets": [(target.name, partial(_measure_target, bench, target)) for target in TARGETS],
        "correctness": [],
        "append": [],
        "score": [("softmax 512 over 16384", partial(bench.score, 1, 16384, 512, 128, weighting=Softmax(128**-0.5)))],
        "paging": [(f"paging {head_dim}", partial(_paging, head_dim)) for head_dim in (64, 128, 256)],
        "layer": [(f"layer {rows}", partial(layer_figures, rows, 512, 4, 128)) for rows in LAYER_ROWS],
        "stack": [(f"stack {n}", partial(stack_figures, 1, n, 512)) for n in (8192, 32768)],
    }
    for head_dim in (32, 64, 128, 256):
        for weighting in (Silu(head_dim**-0.5, 100.0), Softmax(head_dim**-0.5)):
            name = f"check {head_dim} {type(weighting).__name__}"
            rows, cached = [1, 77, 500, 129], [0, 256, 130, 1023]
            jobs["correctness"].append((name, partial(check, head_dim, rows, cached, weighting, causal=True)))
            rows, cached = [1, 77, 500, 3], [1, 0, 130, 4000]
            jobs["correctness"].append((name, partial(check, head_dim, rows, cached, weighting, causal=False)))

    def add(section: str, name: str, measure: Callable[..., dict[str, Any]], *shape: int, **options: Any) -> None:
        jobs[section].append((name, partial(measure, *shape, **options)))

    for head_dim in (64, 128, 256):
        for n in (1024, 2048, 4096, 8192, 32768, 65536):
            add("append", f"append {n} of {head_dim}", bench.append, 1, n, head_dim)
        add("append", f"portable {head_dim}", bench.append, 1, 16384, head_dim, hopper=False)
        add("append", f"softmax {head_dim}", bench.append, 1, 16384, head_dim, weighting=Softmax(head_dim**-0.5))
    for users in (4, 16, 32):
        add("append", f"append, {users} users", bench.append, users, 4096, 128)
    add("append", "append, 16 users of 16K", bench.append, 16, 16384, 128)
    for n in (1024, 4096, 8192, 16384, 32768, 65536):
        for m in (1, 128, 512, 2048):
            add("score", f"score {m} over {n}", bench.score, 1, n, m, 128)
    for head_dim in (64, 256):
        for n in (8192, 32768):
            add("score", f"score 512 over {n} of {head_dim}", bench.score, 1, n, 512, head_dim)
    for users in (4, 16):
        add("stack", f"stack, {users} users", stack_figures, users, 8192, 512, append=False)
    for users in (8, 32):
        add("score", f"score, {users} users", bench.score, users, 8192, 512, 128)
    return jobs


def run(report: Report, commit: str, only: Sequence[str], out: Path, console: Console) -> None:
    ceilings = measure_ceilings()
    jobs = plan(Bench(ceilings))
    if unknown := set(only) - set(jobs):
        raise SystemExit(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(jobs)}")
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, torch.inference_mode():
        task = progress.add_task("", total=sum(len(jobs[name]) for name in only))
        for name in only:
            section = Section(commit, datetime.now(UTC).isoformat(timespec="seconds"), ceilings)
            for title, job in jobs[name]:
                progress.update(task, description=title)
                section.rows.append(job())
                progress.advance(task)
            report.sections[name] = section
            report.save(out)


def _measure_target(bench: Bench, target: Target) -> dict[str, Any]:
    """After a second of rest, as a request finds the card, and straight behind a product on end, at its power limit."""

    def measure() -> dict[str, Any]:
        if target.kind == "append":
            return bench.append(target.users, target.tokens, target.head_dim)
        return bench.score(target.users, target.tokens, target.rows, target.head_dim)

    measure()
    time.sleep(1)
    figure = measure()
    left, right = (torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE) for _ in range(2))
    median_ms([lambda: left @ right] * 100, replays=3)
    hot = measure()
    return {
        "name": target.name,
        "target_tflops": target.least,
        "reached_tflops": figure["tflops"],
        "reached": figure["tflops"] >= target.least,
        "behind_a_product_tflops": hot["tflops"],
        "of_product": figure["of_product"],
        "of_sustained_product": figure["of_sustained_product"],
        "us": figure["us"],
        "tried": TRIED[target.kind],
    }


def _paging(head_dim: int, tokens: int = 16384) -> dict[str, Any]:
    """What reading through a table costs: the kernel over pages in random order and in a row, and the same kernel
    without a table over K and V that are each contiguous, replayed in turns."""
    layers = _layers(tokens, head_dim, most=4)
    pages, shuffled = _pool(1, tokens, layers, head_dim, new=tokens)
    in_a_row = Ragged.build([tokens], [0], [list(range(len(pages)))], DEVICE)
    q = torch.randn(tokens, HEADS, head_dim, device=DEVICE, dtype=DTYPE)
    weighting, attention = Silu(head_dim**-0.5, float(tokens)), TritonAttention()

    def append(batch: Ragged, layer: int) -> None:
        attention.append(weighting, q, pages, layer, batch)

    def append_without_table(layer: int) -> None:
        with mock.patch.object(relaygr.kernels, "hopper", _kernel_without_table()):
            append(in_a_row, layer)

    times = side_by_side(
        {
            "shuffled": [partial(append, shuffled, layer) for layer in range(layers)],
            "in_a_row": [partial(append, in_a_row, layer) for layer in range(layers)],
            "contiguous": [partial(append_without_table, layer) for layer in range(layers)],
        },
        replays=41,
    )
    return {
        "head_dim": head_dim, "tokens": tokens, **{f"{name}_us": round(ms * 1e3, 2) for name, ms in times.items()},
        "cost": round(times["shuffled"] / times["contiguous"] - 1, 4),
    }  # fmt: skip


@functools.cache
def _kernel_without_table() -> ModuleType:
    """The Hopper kernel for one user whose K and V are contiguous: page numbers are computed, not read."""
    source = Path(hopper.__file__).read_text()
    for paged, contiguous in (
        ("gl.load(pages + (high - 1) // PER)", "0"),
        ("gl.load(pages + gl.maximum(j - 1, 0) // PER)", "0"),
        ("((page * layers + layer) * 2) * PER + j % PER", "layer * 2 * table_stride * PER + j"),
        ("[line + PER, shift, column]", "[line + table_stride * PER, shift, column]"),
    ):
        assert source.count(paged) == 1, paged
        source = source.replace(paged, contiguous)
    path = Path(tempfile.mkdtemp()) / "contiguous.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("contiguous", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def show(report: Report, console: Console) -> None:
    for name, section in report.sections.items():
        console.print(f"{name}, commit {section.commit}, ceilings {section.ceilings}")
        if name == "correctness":
            worst = max(max(row["error"].values()) for row in section.rows)
            console.print(f"largest error against float64: {worst:.2e} of {TOLERANCE:.0e} allowed")
            continue
        hidden = ("tried", "kind", "heads")
        table = Table(*(key for key in section.rows[0] if key not in hidden))
        for row in section.rows:
            table.add_row(*(str(value) for key, value in row.items() if key not in hidden))
        console.print(table)


def _machine() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    import triton

    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver_and_power": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True, help="the commit that is measured")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernels-h200.json")
    parser.add_argument("--only", default="", help="sections to run, by name, with commas; else all")
    arguments = parser.parse_args()
    torch.manual_seed(torch.seed() % 2**31)
    report = Report(
        machine=_machine(),
        inputs={"dtype": "bfloat16", "heads": HEADS, "values": "standard normal", "seed": torch.initial_seed(),
                "timing": "median of 15 graph replays or more, different layers per launch"},
        layer_tried=TRIED["layer"],
    )  # fmt: skip
    if arguments.out.exists():
        kept = json.loads(arguments.out.read_text())["sections"]
        report.sections = {name: Section(**section) for name, section in kept.items()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    only = arguments.only.split(",") if arguments.only else list(plan(Bench({})))
    console = Console()
    run(report, arguments.commit, only, arguments.out, console)
    show(report, console)


if __name__ == "__main__":
    main()
