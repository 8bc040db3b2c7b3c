"""A step's inputs, laid out in pinned memory before anything of it is launched."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from relaygr.engine.buckets import APPEND_BUCKETS, SCORE_BUCKETS, Bucket, Group, grouped
from relaygr.engine.graphs import Graphs
from relaygr.engine.step import Step
from relaygr.model import AppendBatch, RankingModel, ScoreBatch
from relaygr.model.batch import AppendRow, ScoreRow
from relaygr.model.packed import BatchShape, Packed

__all__ = ["Staged", "Staging"]


class Staging:
    """Pinned buffers, used again when the step they were taken for has ended."""

    def __init__(self) -> None:
        self._inputs: dict[BatchShape, list[Packed]] = {}
        self._outputs: list[torch.Tensor] = []

    def take(self, shape: BatchShape) -> Packed:
        free = self._inputs.get(shape)
        return free.pop() if free else Packed.empty(shape, pinned=torch.cuda.is_available())

    def give(self, packed: Packed) -> None:
        self._inputs.setdefault(packed.shape, []).append(packed)

    def take_out(self, rows: int, tasks: int) -> torch.Tensor:
        """float32 [at least rows, tasks]."""
        if self._outputs and len(self._outputs[-1]) >= rows and self._outputs[-1].shape[1] == tasks:
            return self._outputs.pop()
        rows = max(1024, 1 << (rows - 1).bit_length())
        return torch.empty((rows, tasks), dtype=torch.float32, pin_memory=torch.cuda.is_available())

    def give_out(self, out: torch.Tensor) -> None:
        self._outputs = [out] if self._outputs and len(self._outputs[-1]) < len(out) else [*self._outputs, out]


@dataclass(frozen=True)
class StagedGroup:
    """Rows that run together, and their inputs."""

    members: list[int]
    bucket: Bucket | None
    total: int
    packed: Packed


@dataclass(frozen=True)
class StagedAppends(StagedGroup):
    rows: list[AppendRow]


@dataclass(frozen=True)
class StagedScores(StagedGroup):
    rows: list[ScoreRow]


class Staged:
    """All of a step. Nothing here touches the device.

    Groups of rows that a captured launch takes lie in buffers of its bucket; others in buffers of their own.
    """

    def __init__(self, step: Step, graphs: Graphs | None, longest: int, staging: Staging) -> None:
        model = step.served.model
        assert isinstance(model, RankingModel)
        self._staging = staging
        self._out: torch.Tensor | None = None
        captured = graphs is not None
        self.appends: list[StagedAppends] = []
        self.scores: list[StagedScores] = []
        new = [row.high - row.low for row in step.appends]
        for members, bucket in _groups(APPEND_BUCKETS, new, captured):
            appends = [step.appends[index] for index in members]
            packed = self._take(bucket, AppendBatch.shape(appends), longest)
            AppendBatch.fill(packed, model.config, appends)
            self.appends.append(StagedAppends(members, bucket, sum(new[index] for index in members), packed, appends))
        self._counts = counts = [len(row.candidates) for row in step.scores]
        for members, bucket in _groups(SCORE_BUCKETS, counts, captured):
            scores = [step.scores[index] for index in members]
            packed = self._take(bucket, ScoreBatch.shape(model.config, scores), longest)
            ScoreBatch.fill(packed, model.config, scores)
            self.scores.append(StagedScores(members, bucket, sum(counts[index] for index in members), packed, scores))

    @property
    def replayed(self) -> bool:
        """Whether all of it is captured, and ends with scores."""
        return bool(self.scores) and all(group.bucket is not None for group in (*self.appends, *self.scores))

    def ids(self) -> npt.NDArray[np.int32]:
        """Rows of the table that the step reads."""
        groups: list[StagedGroup] = [*self.appends, *self.scores]
        return np.concatenate([group.packed.tokens.numpy()[: group.total, 0] for group in groups])

    def take_out(self, tasks: int) -> torch.Tensor:
        """Where the scores of all groups go, one behind the other."""
        self._out = self._staging.take_out(sum(self._counts), tasks)
        return self._out

    def scores_of(self, out: torch.Tensor) -> list[npt.NDArray[np.float32]]:
        """Each score row's part of what came out, in the order of the step."""
        values: npt.NDArray[np.float32] = out.numpy()[: sum(self._counts)].copy()
        parts: list[npt.NDArray[np.float32]] = [values] * len(self._counts)
        begin = 0
        for group in self.scores:
            for member in group.members:
                parts[member] = values[begin : begin + self._counts[member]]
                begin += self._counts[member]
        return parts

    def release(self) -> None:
        """The step has ended, and its scores were read: the buffers may be used again."""
        groups: list[StagedGroup] = [*self.appends, *self.scores]
        for group in groups:
            if group.bucket is not None:
                self._staging.give(group.packed)
        if self._out is not None:
            self._staging.give_out(self._out)
            self._out = None

    def _take(self, bucket: Bucket | None, exact: BatchShape, longest: int) -> Packed:
        if bucket is None:
            return Packed.empty(exact, pinned=torch.cuda.is_available())
        return self._staging.take(bucket.shape(longest, exact.features))


def _groups(buckets: tuple[Bucket, ...], rows: Sequence[int], captured: bool) -> list[Group]:
    """All in one where nothing is captured."""
    if not rows:
        return []
    return grouped(buckets, rows) if captured else [Group(list(range(len(rows))), None)]
