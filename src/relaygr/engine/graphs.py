"""A model's launches captured as CUDA graphs, one for each bucket of batches."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from relaygr.engine.buckets import APPEND_BUCKETS, SCORE_BUCKETS, Bucket
from relaygr.history import PAGE
from relaygr.kernels import Ragged
from relaygr.model import AppendBatch, RankingModel, ScoreBatch
from relaygr.model.packed import Packed
from relaygr.model.stack import BeforeLayer

__all__ = ["Graphs"]

_UNCAPTURED = (256, 1024, 4096, 16384)
"""Rows of a launch: one for each choice of tiles that depends on them."""


@dataclass(frozen=True)
class CapturedAppend:
    """One bucket: where its inputs are read from, and the launches."""

    inputs: Packed
    graph: torch.cuda.CUDAGraph


@dataclass(frozen=True)
class CapturedScore:
    """The same, with where scores come out; and once more, cut before every layer, for prefixes still arriving."""

    inputs: Packed
    graph: torch.cuda.CUDAGraph
    scores: torch.Tensor
    layers: Sequence[torch.cuda.CUDAGraph]
    layered_scores: torch.Tensor


class Graphs:
    """Replays of one model's scores and appends. Inputs are padded to their bucket; kernels skip what is padding.

        pinned words ──one copy──▶ the bucket's inputs ──replay──▶ pages, or scores

    All buckets share one pool of memory: replays run one after the other, on one stream, and what comes out of one must
    be read on that stream before the next.
    """

    def __init__(self, model: RankingModel, pages: torch.Tensor, longest: int) -> None:
        """`longest`: pages of a user at most."""
        self.seconds = 0.0
        self.bytes = 0
        self._model = model
        self._pages = pages
        self._longest = longest
        self._features = model.config.request_features + model.config.candidate_features
        self._pool: Any = None
        self._appends: dict[Bucket, CapturedAppend] = {}
        self._scores: dict[Bucket, CapturedScore] = {}

    def __len__(self) -> int:
        return len(self._appends) + sum(1 + len(each.layers) for each in self._scores.values())

    def capture(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Capture every bucket, the largest first, so that the smaller ones reuse its memory. Writes to no page."""
        began, device = time.perf_counter(), self._pages.device
        before = torch.cuda.mem_get_info(device)[0]
        self._pool = torch.cuda.graph_pool_handle()
        of = len(SCORE_BUCKETS) + len(APPEND_BUCKETS)
        for bucket in reversed(SCORE_BUCKETS):
            self._scores[bucket] = self._capture_score(bucket)
            progress(len(self._scores), of)
        for bucket in reversed(APPEND_BUCKETS):
            self._appends[bucket] = self._capture_append(bucket)
            progress(len(self._scores) + len(self._appends), of)
        for rows in _UNCAPTURED:
            self._compile(rows)
        self.seconds = time.perf_counter() - began
        self.bytes = max(before - torch.cuda.mem_get_info(device)[0], 0)

    def _compile(self, rows: int) -> None:
        """Compile what runs without being captured: a launch of a new kind must not wait for that later."""
        inputs = self._inputs(Bucket(1, rows), self._features)
        batch = Ragged((rows,), (self._longest * PAGE,), inputs.starts, inputs.cached, inputs.table)
        self._model.append(AppendBatch(inputs.tokens, batch), self._pages)
        self._model.score(ScoreBatch(inputs.tokens, inputs.dense, batch), self._pages)
        torch.cuda.current_stream(self._pages.device).synchronize()

    def append(self, bucket: Bucket, staged: Packed) -> None:
        """Launch what was staged for this bucket on the current stream."""
        captured = self._appends[bucket]
        captured.inputs.words.copy_(staged.words, non_blocking=True)
        captured.graph.replay()

    def score(
        self, bucket: Bucket, staged: Packed, arrivals: Sequence[Sequence[torch.cuda.Event]] = ()
    ) -> torch.Tensor:
        """Launch what was staged for this bucket on the current stream; the scores, to be read there at once.

        `arrivals`: of each reload that is under way, the events behind its layers.
        """
        captured = self._scores[bucket]
        captured.inputs.words.copy_(staged.words, non_blocking=True)
        if not arrivals:
            captured.graph.replay()
            return captured.scores
        stream = torch.cuda.current_stream(self._pages.device)
        for layer, graph in enumerate(captured.layers):
            for events in arrivals:
                stream.wait_event(events[layer])
            graph.replay()
        return captured.layered_scores

    def _capture_score(self, bucket: Bucket) -> CapturedScore:
        inputs = self._inputs(bucket, self._features)
        batch = ScoreBatch(inputs.tokens, inputs.dense, _bound(bucket, inputs))
        (graph,), scores = self._capture(lambda _: self._model.score(batch, self._pages))
        layers, layered = self._capture(lambda cut: self._model.score(batch, self._pages, cut))
        assert scores is not None
        assert layered is not None
        return CapturedScore(inputs, graph, scores, layers, layered)

    def _capture_append(self, bucket: Bucket) -> CapturedAppend:
        inputs = self._inputs(bucket, 0)
        batch = AppendBatch(inputs.tokens, _bound(bucket, inputs))
        (graph,), _ = self._capture(lambda _: self._model.append(batch, self._pages))
        return CapturedAppend(inputs, graph)

    def _inputs(self, bucket: Bucket, features: int) -> Packed:
        """Of nobody: all lengths and rows are zero."""
        inputs = Packed.empty(bucket.shape(self._longest, features), device=self._pages.device)
        inputs.words.zero_()
        return inputs

    def _capture(
        self, launches: Callable[[BeforeLayer], torch.Tensor | None]
    ) -> tuple[list[torch.cuda.CUDAGraph], torch.Tensor | None]:
        """The launches as one graph, or as several where they ask to be cut, and what comes out of the last."""
        stream = torch.cuda.Stream(self._pages.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._pages.device))
        with torch.cuda.stream(stream):
            launches(lambda layer: None)  # compiles; with nobody in the batch it writes nothing
            stream.synchronize()
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
                out = launches(cut)
            finally:
                graphs[-1].capture_end()
        return graphs, out


def _bound(bucket: Bucket, inputs: Packed) -> Ragged:
    """The bucket's batch, as launches are planned from it."""
    lengths = (inputs.shape.pages * PAGE,) * bucket.users
    rows = (bucket.rows,) * bucket.users
    return Ragged(rows, lengths, inputs.starts, inputs.cached, inputs.table, bounded=True)
