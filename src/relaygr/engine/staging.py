"""A step's inputs, in pinned memory before anything of it is launched, and where its scores come out."""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from relaygr.engine.buckets import APPEND_BUCKETS, Bucket, Group, ScoreGroups, append_groups, score_groups
from relaygr.engine.step import Step
from relaygr.engine.trays import Trays
from relaygr.history import PAGE
from relaygr.model import AppendBatch, RankingModel, ScoreBatch
from relaygr.model.batch import AppendRow, ScoreRow
from relaygr.model.config import ModelConfig
from relaygr.model.packed import BatchShape, Packed

__all__ = ["Out", "Staged", "Staging"]

_LONGEST: Final = max(bucket.rows for bucket in APPEND_BUCKETS)
"""Tokens of one append that a captured launch takes."""
_CRUMBS: Final = (1 / 16, 0.6)
"""Of a grain, more than what and how much is worth a launch of its own, by what 512 to 8,192 tokens behind 0 to 36,864
take on an H200."""
_KEYS: Final = 4
"""Grains that it must stand behind."""
_LENT: Final = 8
"""Steps whose scores may be held by those who asked for them: those of further ones are copied."""


class Out:
    """Room for the scores of a step: float32 [rows, tasks], pinned.

    What came out is lent to whoever asked for it, rather than copied: to read what a device has written takes long.
    """

    def __init__(self, rows: int, tasks: int, *, lent: bool = True) -> None:
        """`lent`: whether what comes out is, else it is copied."""
        self.rows = rows
        self.tasks = tasks
        self.lent = lent
        self.scores = torch.empty((rows, tasks), dtype=torch.float32, pin_memory=torch.cuda.is_available())
        self.values: npt.NDArray[np.float32] = self.scores.numpy()
        self._memory = self.values.reshape(-1).data
        self._address = self.scores.data_ptr()
        self._reader: Callable[[], object] = lambda: None

    @property
    def free(self) -> bool:
        """Whether nobody holds a part of what came out the last time."""
        return self._reader() is None

    def address(self, row: int) -> int:
        return self._address + row * self.tasks * 4

    def lend(self, rows: int) -> npt.NDArray[np.float32] | None:
        """Where the first so many rows come out, for whoever asks for them; None where they are to be copied."""
        if not self.lent:
            return None
        whole = np.frombuffer(self._memory, np.float32, rows * self.tasks)
        values: npt.NDArray[np.float32] = whole.reshape(rows, self.tasks)
        if values.base is not whole:  # which never was: parts would hold something else, unseen
            return None
        self._reader = weakref.ref(whole)  # which every part of the values holds
        return values


class Staging:
    """Pinned buffers for appends, used again when the step they were taken for has ended; room for scores, when nobody
    holds any of them, too."""

    def __init__(self, longest: int) -> None:
        """`longest`: pages of a user at most."""
        self._longest = longest
        self._appends: dict[Bucket, list[Packed]] = {}
        self._outputs: deque[Out] = deque()

    def take(self, bucket: Bucket) -> Packed:
        """For appends."""
        free = self._appends.get(bucket)
        if free:
            return free.pop()
        return Packed.empty(bucket.shape(self._longest, None), pinned=torch.cuda.is_available())

    def give(self, bucket: Bucket, packed: Packed) -> None:
        self._appends.setdefault(bucket, []).append(packed)

    def take_out(self, rows: int, tasks: int) -> Out:
        """At least so many rows. Of those that are there, what is too small is let go of."""
        for _ in range(len(self._outputs)):
            out = self._outputs.popleft()
            if not out.free:
                self._outputs.append(out)
            elif out.rows >= rows and out.tasks == tasks:
                return out
        return Out(max(1024, 1 << (rows - 1).bit_length()), tasks, lent=len(self._outputs) < _LENT)

    def give_out(self, out: Out) -> None:
        if out.lent:
            self._outputs.append(out)


class StagedAppends(NamedTuple):
    """Appends that run together, and their inputs."""

    bucket: Bucket | None
    total: int
    packed: Packed
    rows: list[AppendRow]


class StagedScores(NamedTuple):
    """Scores that run together: replayed where they have a bucket, and then laid out each by itself, else packed."""

    bucket: Bucket | None
    total: int
    packed: Packed | None
    rows: Sequence[ScoreRow]
    counts: Sequence[int]
    """Candidates of each row."""
    trays: list[int]
    """Addresses of what each is laid on."""


class Staged:
    """All of a step. Nothing here touches the device.

    Appends that a captured launch takes lie in buffers of its bucket, scores on trays, most since their ranks came, and
    other groups in buffers of their own. They run in their order: what is cut from a long append runs in rounds, one
    piece of each append in a round, the last pieces of all appends, and those that were not cut, in the last.
    """

    def __init__(self, step: Step, staging: Staging) -> None:
        """Groups have buckets where the model's launches are captured and some bucket takes them."""
        model, trays = step.served.model, step.served.trays
        assert isinstance(model, RankingModel)
        config, captured = model.config, trays is not None
        self._staging = staging
        self._taken: list[tuple[Bucket, Packed]] = []
        self._out: Out | None = None
        self._lent: list[npt.NDArray[np.float32]] | None = None
        self.appends: list[StagedAppends] = []
        self.scores: list[StagedScores] = []
        self.replayed = bool(step.scores)
        """Whether all of it is captured, and ends with scores."""
        for rows in _rounds(step.appends, step.served.grain) if captured else [step.appends]:
            new = tuple([row.high - row.low for row in rows])
            for members, bucket, each in append_groups(config.family, new) if captured else _all_of(new):
                appends = [rows[index] for index in members]
                packed = self._room(bucket, appends)
                AppendBatch.fill(packed, config, appends)
                self.appends.append(StagedAppends(bucket, sum(each), packed, appends))
        counts = tuple([len(row.candidates.kept) for row in step.scores])
        found = score_groups(config.family, counts) if captured else ScoreGroups.of(_all_of(counts), counts)
        groups, self._places, self._total = found
        for members, bucket, each in groups:
            scores = step.scores if each == counts else [step.scores[index] for index in members]
            laid = None if bucket is None or trays is None else _laid(trays, bucket, scores, each)
            self.scores.append(laid or self._packed(config, scores, each))

    def _packed(self, config: ModelConfig, rows: Sequence[ScoreRow], counts: Sequence[int]) -> StagedScores:
        self.replayed = False
        packed = _own(ScoreBatch.shape(config, rows))
        ScoreBatch.fill(packed, config, rows)
        return StagedScores(None, sum(counts), packed, rows, counts, [])

    def _room(self, bucket: Bucket | None, rows: list[AppendRow]) -> Packed:
        """A buffer that captured launches read, if it is for one."""
        if bucket is None:
            self.replayed = False
            return _own(AppendBatch.shape(rows))
        packed = self._staging.take(bucket)
        self._taken.append((bucket, packed))
        return packed

    def ids(self) -> npt.NDArray[np.int32]:
        """Rows of the table that the step reads."""
        ids = [group.packed.tokens[: group.total, 0].numpy() for group in self.appends]
        for group in self.scores:
            if group.packed is not None:
                ids.append(group.packed.items[: group.total].numpy())
            else:
                laid = zip(group.rows, group.counts, strict=True)
                ids += [row.laid.tray.items[:count] for row, count in laid if row.laid is not None]
        return np.concatenate(ids)

    def take_out(self, tasks: int) -> Out:
        """Where the scores of all groups go, one behind the other."""
        self._out = out = self._staging.take_out(self._total, tasks)
        return out

    def launched(self) -> None:
        """The device is busy with it: what can be known of its results by now, where each lies, is found meanwhile."""
        if self._out is not None:
            values = self._out.lend(self._total)
            if values is not None:
                self._lent = [values[place] for place in self._places]

    def results(self) -> list[npt.NDArray[np.float32]]:
        """Each score row's part of what came out, in the order of the step, once that has ended."""
        if self._out is None:
            return []
        if self._lent is None:
            values = self._out.values[: self._total].copy()
            return [values[place] for place in self._places]
        return self._lent

    def release(self) -> None:
        """The step has ended, and its scores were read: buffers may be used again, room for scores once it is free."""
        for bucket, packed in self._taken:
            self._staging.give(bucket, packed)
        self._taken.clear()
        self._lent = None  # or it would be held from here
        if self._out is not None:
            self._staging.give_out(self._out)
            self._out = None


def _laid(trays: Trays, bucket: Bucket, rows: Sequence[ScoreRow], counts: Sequence[int]) -> StagedScores | None:
    """Rows as they were laid out, or are now; None where there is no room for some of them."""
    places = [row.laid.tray.address for row in rows if row.laid is not None]
    if len(places) < len(rows):
        rows = [trays.now(row) if row.laid is None else row for row in rows]
        places = [row.laid.tray.address for row in rows if row.laid is not None]
        if len(places) < len(rows):
            return None
    return StagedScores(bucket, sum(counts), None, rows, counts, places)


def _rounds(rows: Sequence[AppendRow], grain: int) -> list[list[AppendRow]]:
    """What is to run one after the other."""
    if not rows:
        return []
    pieces: list[list[AppendRow]] = []
    for row in rows:
        last = pieces[-1][-1] if pieces else row
        if row.pages is last.pages and row.low >= last.high:  # a head, and what is new
            pieces[-1] += _pieces(row, grain)
        else:
            pieces.append(list(_pieces(row, grain)))
    rounds: list[list[AppendRow]] = [[] for _ in range(max(map(len, pieces)))]
    for each in pieces:
        for number, piece in enumerate(each, len(rounds) - len(each)):
            rounds[number].append(piece)
    return rounds


def _pieces(row: AppendRow, grain: int) -> Iterator[AppendRow]:
    """A long append as several, each as long as a captured launch takes; they run one after the other.

    A little more than whole grains takes as long as one grain more, where there are many keys to go through: it is cut
    off, since it takes less in a launch of its own.
    """
    while row.high - row.low > _LONGEST:
        yield row._replace(high=row.low + _LONGEST)
        row = row._replace(low=row.low + _LONGEST)
    crumbs = (row.high - row.low // PAGE * PAGE) % grain if grain > PAGE else 0
    cut, (few, many) = row.high - crumbs, _CRUMBS
    if few * grain < crumbs <= many * grain and cut > row.low >= _KEYS * grain:
        yield row._replace(high=cut)
        row = row._replace(low=cut)
    yield row


def _own(shape: BatchShape) -> Packed:
    """Pinned where that can be had: a copy from other memory is as right, and holds up whoever launches it."""
    with contextlib.suppress(RuntimeError):
        return Packed.empty(shape, pinned=torch.cuda.is_available())
    return Packed.empty(shape)


def _all_of(rows: Sequence[int]) -> Sequence[Group]:
    """In one group, where nothing is captured."""
    return (Group(range(len(rows)), None, tuple(rows)),) if rows else ()
