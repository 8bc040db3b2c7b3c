"""A device that runs what a GPU would, late and in any order that streams and events leave open, on the CPU.

Everything between the engine and the driver is real: staging, trays, letters, what is launched on which stream and
waits for which event, and the kernels that read letters, which Triton interprets; the rest of a model is the
definition, of what its batch holds by then. Streams are queues; a captured launch is run again when its stream comes to
it, with what its letter says. The device goes on by a random step of any stream whenever somebody asks after an event,
so what no event orders may happen the other way round. Import it in any test as `pretended_cuda`.
"""

import contextlib
import copy
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from relaygr.config import EngineConfig
from relaygr.engine import buckets, cuda_runner, graphs, staging
from relaygr.engine.buckets import Bucket
from relaygr.engine.cuda_runner import CudaRunner
from relaygr.engine.graphs import Graphs
from relaygr.engine.limits import longest_pages, max_history
from relaygr.engine.mailbox import Posted
from relaygr.engine.staging import Staged
from relaygr.engine.step import Capacity, Direction, Model, PageCopy, Served, Step
from relaygr.engine.torch_executor import TorchExecutor
from relaygr.kernels import Ragged, ends
from relaygr.kernels.attention import Weighting
from relaygr.kernels.mail import Mail
from relaygr.kernels.reference import ReferenceAttention
from relaygr.model import AppendBatch, RankingModel, ScoreBatch, embedding
from relaygr.model.stack import BeforeLayer

__all__ = ["Device", "PretendedCuda", "pretend"]

SCORE_BUCKETS = tuple(Bucket(users, 16) for users in (1, 2, 4))
APPEND_BUCKETS = (Bucket(1, 32), Bucket(2, 32), Bucket(1, 128))


class Device:
    """All streams, and who goes on next."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.current: list[Stream] = []
        self.replaying = False
        """Whether what runs now was captured: its ends are the kernels, which know of letters."""
        self.refuses = 0.0
        """How likely a replay is not launched: after its letter was posted."""

    def go_on(self) -> None:
        """Some stream runs something, or none can."""
        able = [stream for stream in self.streams if stream.able]
        if able:
            self.random.choice(able).run()


class Mark:
    """One recording of an event."""

    passed = False


class Stream:
    def __init__(self, device: Device) -> None:
        self.cuda_stream = 0
        self._device = device
        self._queue: deque[Callable[[], None] | Mark] = deque()
        """What is to be run, and marks of other streams to wait for."""
        device.streams.append(self)

    def add(self, work: Callable[[], None]) -> None:
        self._queue.append(work)

    @property
    def able(self) -> bool:
        while self._queue and isinstance(self._queue[0], Mark) and self._queue[0].passed:
            self._queue.popleft()
        return bool(self._queue) and not isinstance(self._queue[0], Mark)

    def run(self) -> None:
        work = self._queue.popleft()
        assert not isinstance(work, Mark)
        work()

    def wait_event(self, event: "Event") -> None:
        self._queue.append(event.mark)

    def wait_stream(self, other: Any) -> None:
        other.synchronize()

    def synchronize(self) -> None:
        while self._queue:
            self._device.go_on()


class Event:
    device: Device

    def __init__(self, enable_timing: bool = False) -> None:
        self.mark = Mark()

    def record(self, stream: Stream) -> None:
        self.mark = mark = Mark()

        def passed() -> None:
            mark.passed = True

        stream.add(passed)

    def query(self) -> bool:
        if self.device.random.random() < 0.7:
            self.device.go_on()
        return self.mark.passed

    def elapsed_time(self, other: "Event") -> float:
        assert self.mark.passed
        assert other.mark.passed
        return 0.1


class Piece:
    """A part of what was captured: from one cut to the next."""

    def __init__(self, capture: "Capture", number: int) -> None:
        self._capture = capture
        self._number = number

    def replay(self) -> None:
        if self._number == 0 and self._capture.device.random.random() < self._capture.device.refuses:
            raise RuntimeError("the device refuses a replay")
        self._capture.device.current[-1].add(lambda: self._capture.run(self._number))


class Capture:
    """Launches that are made anew with every replay, piece by piece: in a thread that waits at each cut."""

    def __init__(self, device: Device, launches: Callable[[BeforeLayer], None], pieces: int) -> None:
        self.device = device
        self._launches = launches
        self._pieces = pieces
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: Exception | None = None

    def run(self, number: int) -> None:
        self.device.replaying = True
        if self._pieces == 1:
            self._launches(lambda layer: None)
        else:
            if number == 0:
                threading.Thread(target=self._all, daemon=True).start()
            self._go.release()
            self._done.acquire()
            if self._error is not None:
                raise self._error
        self.device.replaying = False

    def _all(self) -> None:
        def cut(layer: int) -> None:
            if layer:
                self._done.release()
                self._go.acquire()

        self._go.acquire()
        try:
            self._launches(cut)
        except Exception as error:
            self._error = error
        self._done.release()


class LateAttention:
    """The definition, of the rows that there are when it runs."""

    def __init__(self) -> None:
        self._defined = ReferenceAttention()

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, layer: int, batch: Ragged) -> None:
        there = _there(batch)
        self._defined.write(k[: there.total], v[: there.total], pages, layer, there)

    def append(
        self, weighting: Weighting, q: torch.Tensor, pages: torch.Tensor, layer: int, batch: Ragged
    ) -> torch.Tensor:
        there, out = _there(batch), torch.zeros_like(q)
        out[: there.total] = self._defined.append(weighting, q[: there.total], pages, layer, there)
        return out

    def score(
        self,
        weighting: Weighting,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: torch.Tensor,
        layer: int,
        batch: Ragged,
    ) -> torch.Tensor:
        there, out = _there(batch), torch.zeros_like(q)
        rows = slice(there.total)
        out[rows] = self._defined.score(weighting, q[rows], k[rows], v[rows], pages, layer, there)
        return out


def _there(batch: Ragged) -> Ragged:
    """The same batch without what is padding."""
    rows = batch.starts.diff()
    users = rows.nonzero()[:, 0]
    starts = torch.cat((batch.starts[:1], batch.starts[1:][users]))
    cached = batch.cached[users]
    return Ragged(tuple(rows[users].tolist()), tuple(cached.tolist()), starts, cached, batch.table[users])


class PretendedGraphs(Graphs):
    device: Device

    def _compile(self, rows: int) -> None:
        pass  # nothing is compiled

    def _capture(self, post: Callable[[], Posted], launches: Callable[[BeforeLayer], None]) -> list[Any]:
        posted, cuts = post(), [0]
        self.device.replaying = True
        launches(lambda layer: cuts.append(layer))
        self.device.replaying = False
        posted.over()
        capture = Capture(self.device, launches, len(set(cuts)))
        return [Piece(capture, number) for number in range(len(set(cuts)))]


class PretendedMover:
    def __init__(self, pages: torch.Tensor, host_pages: torch.Tensor, pinned: int) -> None:
        self.layers = pages.shape[1]
        self._pages, self._host_pages = pages, host_pages

    def move(self, copy: PageCopy, first: int, last: int, stream: Stream) -> None:
        inward = copy.direction is Direction.IN
        source, target = (self._host_pages, self._pages) if inward else (self._pages, self._host_pages)
        for old, new in zip(copy.source.tolist(), copy.target.tolist(), strict=True):

            def move(old: int = old, new: int = new) -> None:
                target[new, first:last] = source[old, first:last]

            stream.add(move)


class PretendedRunner(CudaRunner):
    def _run(self, step: Step, staged: Staged, graphs: Graphs | None, posted: list[Posted]) -> None:
        if step.page_copies:  # as below
            self._compute.synchronize()
        super()._run(step, staged, graphs, posted)


class PretendedModel(RankingModel):
    """What is not captured runs at once here, so what is in front of it has to have run."""

    runs_on: Device

    def append(self, batch: AppendBatch, pages: torch.Tensor) -> None:
        self._wait()
        super().append(batch, pages)

    def score(
        self, batch: ScoreBatch, pages: torch.Tensor, before: BeforeLayer | None = None, mail: Mail | None = None
    ) -> torch.Tensor:
        def waited(layer: int) -> None:
            if before is not None:
                before(layer)
            self._wait()

        return super().score(batch, pages, waited, mail)

    def _wait(self) -> None:
        if not self.runs_on.replaying and self.runs_on.current:
            self.runs_on.current[-1].synchronize()


class PretendedCuda(TorchExecutor):
    """The executor of a GPU on the CPU, in float32. Use it inside `pretend`."""

    def open(self, model: Model, config: EngineConfig) -> Capacity:
        capacity = super().open(model, config)
        cpu: Any = self._runner
        cpu.close()
        cpu.pages.fill_(float("nan"))
        host: Any = SimpleNamespace(pages=cpu.host_pages.fill_(float("nan")), together=1)
        longest = longest_pages(max_history(config, capacity))
        self._runner = PretendedRunner(cpu.pages, host, longest, canary=config.canary)
        return capacity

    async def prepare(self, model: Model) -> Served:
        """In this thread: the interpreter is none for two."""
        served, _ = self._prepare(model)
        return served

    def _prepare_alone(self, model: RankingModel) -> tuple[Served, bytes]:
        model = copy.deepcopy(model)
        model.__class__ = PretendedModel
        model.stack.attention = LateAttention()
        return super()._prepare_alone(model)


@contextlib.contextmanager
def pretend(seed: int) -> Iterator[Device]:
    """Inside, `PretendedCuda` has a device: this one."""
    device = Device(seed)
    Event.device = PretendedGraphs.device = PretendedModel.runs_on = device

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        device.current.append(stream)
        try:
            yield
        finally:
            device.current.pop()

    class OnStream:
        def __init__(self, stream: Stream) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            device.current.append(self._stream)

        def __exit__(self, *_: object) -> None:
            device.current.pop()

    with pytest.MonkeyPatch.context() as patch:
        for module in (cuda_runner, graphs):
            patch.setattr(module, "own_stream", lambda device_, urgent=False: Stream(device))
        patch.setattr(cuda_runner, "free_stream", lambda stream, urgent=False: None)
        patch.setattr(graphs, "_let_go", lambda *captured: None)
        patch.setattr(cuda_runner, "OnStream", OnStream)
        patch.setattr(cuda_runner, "Graphs", PretendedGraphs)
        patch.setattr(cuda_runner, "PageMover", PretendedMover)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "device", lambda device_: contextlib.nullcontext())
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch.cuda, "current_stream", lambda device_=None: (device.current or [Stream(device)])[-1])
        patch.setattr(torch.cuda, "mem_get_info", lambda device_: (0, 0))
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(ends, "_fused", lambda *_: device.replaying)
        patch.setattr(embedding, "embed", ends.embed_plain)
        patch.setattr(embedding, "embed_candidates", ends.embed_candidates_plain)
        patch.setattr(buckets, "SCORE_BUCKETS", SCORE_BUCKETS)
        patch.setattr(buckets, "APPEND_BUCKETS", APPEND_BUCKETS)
        patch.setattr(staging, "_LONGEST", max(bucket.rows for bucket in APPEND_BUCKETS))
        for groups in (buckets.score_groups, buckets.append_groups):
            groups.cache_clear()
        try:
            yield device
        finally:
            for groups in (buckets.score_groups, buckets.append_groups):
                groups.cache_clear()
