"""A model's launches captured as CUDA graphs, one for each bucket of batches."""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from relaygr.engine.buckets import Bucket, append_buckets, score_buckets
from relaygr.engine.driver import free_stream, own_stream
from relaygr.engine.mailbox import Mailbox, Posted
from relaygr.history import PAGE
from relaygr.kernels import Ragged
from relaygr.kernels.mail import fetch
from relaygr.model import AppendBatch, RankingModel, ScoreBatch
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

        pinned words ──fetched──▶ the bucket's inputs ──▶ pages, or scores ──delivered──▶ pinned words

    All of that is captured, so a replay is one call. All buckets share one pool of memory: replays run one after the
    other, on one stream. Each model is captured on a stream of its own: cuBLAS gives a stream one workspace, captured
    products keep writing to it when they are replayed, and the next model is captured while this one serves.
    """

    def __init__(self, model: RankingModel, pages: torch.Tensor, longest: int) -> None:
        """`longest`: pages of a user at most."""
        self.seconds = 0.0
        self.bytes = 0
        self._model = model
        self._pages = pages
        self._longest = longest
        self._stream = own_stream(pages.device)
        self._features = model.config.request_features + model.config.candidate_features
        self._pool: Any = None
        self._appends: dict[Bucket, CapturedAppend] = {}
        self._scores: dict[Bucket, CapturedScore] = {}
        weakref.finalize(self, _let_go, self._appends, self._scores, self._stream)

    def __len__(self) -> int:
        return len(self._appends) + sum(1 + len(each.layers) for each in self._scores.values())

    def capture(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Capture every bucket, of each kind the largest first, so that others reuse its memory. Writes to no page."""
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

    def append(self, bucket: Bucket, staged: Packed) -> Posted:
        """Launch what was staged for this bucket on the current stream."""
        captured = self._appends[bucket]
        posted = self._post(captured.box, staged.address)
        captured.graph.replay()
        return posted

    def score(
        self,
        bucket: Bucket,
        staged: Packed,
        out: int,
        arrivals: Sequence[Sequence[torch.cuda.Event]] = (),
    ) -> Posted:
        """Launch what was staged for this bucket on the current stream; its scores go to `out`, in pinned memory.

        `arrivals`: of each reload that is under way, the events behind its layers.
        """
        captured = self._scores[bucket]
        posted = self._post(captured.box, staged.address, out)
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

    def _post(self, box: Mailbox, inputs: int, scores: int = 0) -> Posted:
        if box.full:
            torch.cuda.current_stream(self._pages.device).synchronize()
            box.settle()
        return box.post(inputs, scores)

    def _capture_score(self, bucket: Bucket) -> CapturedScore:
        inputs, box = self._inputs(bucket, self._features), Mailbox(self._pages.device)
        batch = ScoreBatch(inputs.items, inputs.positions, inputs.dense, _bound(bucket, inputs))

        def launches(cut: BeforeLayer | None) -> None:
            fetch(box.mail, inputs.words)
            self._model.score(batch, self._pages, cut, box.mail)

        (graph,) = self._capture(box, inputs, lambda _: launches(None))
        return CapturedScore(inputs, box, graph, self._capture(box, inputs, launches))

    def _capture_append(self, bucket: Bucket) -> CapturedAppend:
        inputs, box = self._inputs(bucket, None), Mailbox(self._pages.device)
        batch = AppendBatch(inputs.tokens, _bound(bucket, inputs))

        def launches(_: BeforeLayer) -> None:
            fetch(box.mail, inputs.words)
            self._model.append(batch, self._pages)

        (graph,) = self._capture(box, inputs, launches)
        return CapturedAppend(inputs, box, graph)

    def _inputs(self, bucket: Bucket, features: int | None) -> Packed:
        """Of nobody: all lengths and rows are zero."""
        inputs = Packed.empty(bucket.shape(self._longest, features), device=self._pages.device)
        inputs.words.zero_()
        return inputs

    def _capture(
        self, box: Mailbox, inputs: Packed, launches: Callable[[BeforeLayer], None]
    ) -> list[torch.cuda.CUDAGraph]:
        """The launches as one graph, or as several where they ask to be cut."""
        nobody = torch.zeros(len(inputs.words), dtype=torch.int32).pin_memory()
        posted = box.post(nobody.data_ptr(), nobody.data_ptr())
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
