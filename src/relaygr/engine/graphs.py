"""A model's launches captured as CUDA graphs, one for each bucket of batches."""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from relaygr.engine.buckets import Bucket, append_buckets, score_buckets
from relaygr.engine.driver import free_stream, own_stream
from relaygr.engine.mailbox import Mailbox, Posted
from relaygr.engine.trays import Trays
from relaygr.history import PAGE
from relaygr.kernels import Ragged
from relaygr.kernels.mail import Inputs, collect, fetch
from relaygr.model import AppendBatch, Candidates, RankingModel, ScoreBatch
from relaygr.model.batch import ScoreRow
from relaygr.model.packed import Packed
from relaygr.model.stack import BeforeLayer

__all__ = ["Graphs"]

_UNCAPTURED = (256, 1024, 4096, 16384)
"""Rows of a launch: one for each choice of tiles that depends on them."""


@dataclass(frozen=True)
class CapturedAppend:
    """One bucket: where its inputs are read from, how it is told from where to fetch them, and the launches."""

    inputs: Packed
    box: Mailbox
    graph: torch.cuda.CUDAGraph


@dataclass(frozen=True)
class CapturedScore(CapturedAppend):
    """The same, and once more, cut before every layer, for prefixes still arriving."""

    layers: Sequence[torch.cuda.CUDAGraph]


class Graphs:
    """Replays of one model's scores and appends. Inputs are padded to their bucket; kernels skip what is padding.

        pinned words, trays ──fetched──▶ the bucket's inputs ──▶ pages, or scores ──delivered──▶ pinned words

    All of that is captured, so a replay is one call. All buckets share one pool of memory: replays run one after the
    other, on one stream. Each model is captured on a stream of its own: cuBLAS gives a stream one workspace, captured
    products keep writing to it when they are replayed, and the next model is captured while this one serves.
    """

    def __init__(self, model: RankingModel, pages: torch.Tensor, longest: int, trays: Trays) -> None:
        """`longest`: pages of a user at most; `trays`: where what is scored is laid out."""
        self.seconds = 0.0
        self.bytes = 0
        self._model = model
        self._pages = pages
        self._longest = longest
        self._trays = trays
        self._stream = own_stream(pages.device)
        self._features = model.config.request_features + model.config.candidate_features
        self._pool: Any = None
        self._appends: dict[Bucket, CapturedAppend] = {}
        self._scores: dict[Bucket, CapturedScore] = {}
        weakref.finalize(self, _let_go, self._appends, self._scores, self._stream)

    def __len__(self) -> int:
        return len(self._appends) + sum(1 + len(each.layers) for each in self._scores.values())

    def capture(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Capture every bucket, of each kind the largest first, so that others reuse its memory. Writes to no page.

        Raises RuntimeError where a replay of scores does not fetch what was laid out for it, or where that cannot be
        laid out for want of memory to pin.
        """
        began, device = time.perf_counter(), self._pages.device
        before = torch.cuda.mem_get_info(device)[0]
        self._pool = torch.cuda.graph_pool_handle()
        family = self._model.config.family
        scores, appends = score_buckets(family), append_buckets(family)
        of = len(scores) + len(appends)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for bucket in reversed(scores):
                self._scores[bucket] = self._capture_score(bucket)
                self._check(bucket)
                progress(len(self._scores), of)
            for bucket in reversed(appends):
                self._appends[bucket] = self._capture_append(bucket)
                progress(len(self._scores) + len(self._appends), of)
            for rows in _UNCAPTURED:
                self._compile(rows)
        self.seconds = time.perf_counter() - began
        self.bytes = max(before - torch.cuda.mem_get_info(device)[0], 0)

    def _compile(self, rows: int) -> None:
        """Compile what runs without being captured: a launch of a new kind must not wait for that later."""
        lengths = (self._longest * PAGE,)
        new = self._inputs(Bucket(1, rows), None)
        self._model.append(
            AppendBatch(new.tokens, Ragged((rows,), lengths, new.starts, new.cached, new.table)), self._pages
        )
        scored = self._inputs(Bucket(1, rows), self._features)
        batch = Ragged((rows,), lengths, scored.starts, scored.cached, scored.table)
        self._model.score(ScoreBatch(scored.items, scored.positions, scored.dense, batch), self._pages)
        self._stream.synchronize()

    def _check(self, bucket: Bucket) -> None:
        """Replay scores of random rows, whole and by layers, and see what was fetched: it might be wrong unseen."""
        rows, config = self._random_rows(bucket), self._model.config
        out = self._pinned(bucket.total * config.tasks)
        inputs, there = self._scores[bucket].inputs, torch.cuda.Event()  # type: ignore[no-untyped-call]
        there.record(self._stream)
        for some, arrivals in ((rows, ()), (rows[: -(-len(rows) // 2)], ([there] * config.layers,))):
            expected = Packed.empty(bucket.shape(self._longest, self._features))
            total = ScoreBatch.fill(expected, config, some)
            trays = [row.laid.tray.address for row in some if row.laid is not None]
            if len(trays) < len(some):
                raise RuntimeError("no memory can be pinned for what is to be scored")
            inputs.words.fill_(1)  # as if an earlier replay had left it
            posted = self.score(bucket, trays, [len(row.candidates) for row in some], out.data_ptr(), arrivals)
            self._stream.synchronize()
            posted.over()
            for part in ("starts", "cached", "positions", "table", "items", "dense"):
                fetched, laid = getattr(inputs, part), getattr(expected, part)
                until = {"table": len(some), "items": total, "dense": total}.get(part)
                if laid is not None and not torch.equal(fetched[:until].cpu(), laid[:until]):
                    raise RuntimeError(f"a captured launch of {bucket} does not fetch the {part} laid out for it")

    def _random_rows(self, bucket: Bucket) -> list[ScoreRow]:
        """A bucket full, one of them with all the pages there may be."""
        config, draw, rows = self._model.config, np.random.default_rng(bucket), []
        for user in range(bucket.users):
            count = int(draw.integers(1, bucket.rows + 1))
            tokens = int(draw.integers(1, 2 * PAGE)) if user else self._longest * PAGE
            pages = draw.integers(0, len(self._pages), -(-tokens // PAGE))
            features = draw.normal(size=(count, config.candidate_features))
            request = draw.normal(size=config.request_features).astype(np.float32)
            candidates = Candidates(draw.integers(0, config.items, count), features)
            rows.append(self._trays.now(ScoreRow(candidates, request, tokens, tokens, pages)))
        return rows

    def append(self, bucket: Bucket, staged: Packed) -> Posted:
        """Launch what was staged for this bucket on the current stream."""
        captured = self._appends[bucket]
        posted = self._room(captured.box).post(staged.address)
        captured.graph.replay()
        return posted

    def score(
        self,
        bucket: Bucket,
        trays: Sequence[int],
        rows: Sequence[int],
        out: int,
        arrivals: Sequence[Sequence[torch.cuda.Event]] = (),
    ) -> Posted:
        """Launch what was laid on these trays, so many rows on each, on the current stream; the scores go to `out`, in
        pinned memory.

        `arrivals`: of each reload that is under way, the events behind its layers.
        """
        captured = self._scores[bucket]
        posted = self._room(captured.box).post_scores(trays, rows, out)
        if not arrivals:
            captured.graph.replay()
            return posted
        stream = torch.cuda.current_stream(self._pages.device)
        for layer, graph in enumerate(captured.layers):
            for events in arrivals:
                stream.wait_event(events[layer])
            graph.replay()
        return posted

    def forget(self) -> None:
        """A replay may have been posted and not launched. Everything launched on the current stream has ended."""
        for captured in (*self._appends.values(), *self._scores.values()):
            captured.box.forget()
        torch.cuda.current_stream(self._pages.device).synchronize()  # not the device: another model may be captured

    def _room(self, box: Mailbox) -> Mailbox:
        """The box, with room for a letter."""
        if box.full:
            torch.cuda.current_stream(self._pages.device).synchronize()
            box.settle()
        return box

    def _capture_score(self, bucket: Bucket) -> CapturedScore:
        inputs, box = self._inputs(bucket, self._features), Mailbox(self._pages.device, bucket.users)
        batch = ScoreBatch(inputs.items, inputs.positions, inputs.dense, _bound(bucket, inputs))
        where = Inputs(inputs.starts, inputs.cached, inputs.positions, inputs.table, inputs.items, inputs.dense)

        def launches(cut: BeforeLayer | None) -> None:
            collect(box.mail, where)
            self._model.score(batch, self._pages, cut, box.mail)

        def post() -> Posted:
            return box.post_scores((), (), nobody.data_ptr())

        nobody = self._pinned(1)
        (graph,) = self._capture(post, lambda _: launches(None))
        return CapturedScore(inputs, box, graph, self._capture(post, launches))

    def _capture_append(self, bucket: Bucket) -> CapturedAppend:
        inputs, box = self._inputs(bucket, None), Mailbox(self._pages.device)
        batch = AppendBatch(inputs.tokens, _bound(bucket, inputs))

        def launches(_: BeforeLayer) -> None:
            fetch(box.mail, inputs.words)
            self._model.append(batch, self._pages)

        nobody = self._pinned(len(inputs.words))
        (graph,) = self._capture(lambda: box.post(nobody.data_ptr()), launches)
        return CapturedAppend(inputs, box, graph)

    def _inputs(self, bucket: Bucket, features: int | None) -> Packed:
        """Of nobody: all lengths and rows are zero."""
        inputs = Packed.empty(bucket.shape(self._longest, features), device=self._pages.device)
        inputs.words.zero_()
        return inputs

    def _pinned(self, words: int) -> torch.Tensor:
        """int32, zeros."""
        return torch.zeros(words, dtype=torch.int32, pin_memory=self._pages.is_cuda)

    def _capture(
        self, post: Callable[[], Posted], launches: Callable[[BeforeLayer], None]
    ) -> list[torch.cuda.CUDAGraph]:
        """The launches as one graph, or as several where they ask to be cut. `post` posts a letter of nobody's."""
        posted = post()
        launches(lambda layer: None)  # compiles; with nobody in the batch it writes nothing
        self._stream.synchronize()
        posted.over()
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut(layer: int) -> None:
            if layer:
                graphs[-1].capture_end()
                begin()

        begin()
        try:
            launches(cut)
        finally:
            graphs[-1].capture_end()
        return graphs


def _let_go(
    appends: dict[Bucket, CapturedAppend], scores: dict[Bucket, CapturedScore], stream: torch.cuda.Stream
) -> None:
    """Give the stream back once nothing that was captured on it is left: with each, torch may free its workspace."""
    appends.clear()
    scores.clear()
    free_stream(stream)


def _bound(bucket: Bucket, inputs: Packed) -> Ragged:
    """The bucket's batch, as launches are planned from it."""
    lengths = (inputs.shape.pages * PAGE,) * bucket.users
    rows = (bucket.rows,) * bucket.users
    return Ragged(rows, lengths, inputs.starts, inputs.cached, inputs.table, bounded=True)
