"""Steps and copies on a GPU: launched from the event loop and left to run, and asked after until they are done.

    compute   ─[append graph]─[score graph]─●─[score graph]─●─ …                      ● an event, asked after
    copy in   ─[layers 0-3]●─[4, 5]●─[6]●─[7]●    a score that reads these pages waits for its layer, not for all
                                                  (whole pages at once where none waits)
    copy out  ─[pages]──────────────────────●

Launching takes the CPU a fraction of what the GPU needs: the loop plans and stages the next step while this one runs.
Pages are let go of only when the event loop has seen their step or copy end, so nothing that is launched later can find
them in use; what is launched earlier is ordered by streams and by the events of layers.

While a step or a load is in flight the event loop never sleeps: waking up would cost more than a rank.
"""

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from relaygr.engine.canary import Canary
from relaygr.engine.driver import OnStream, free_stream, own_stream
from relaygr.engine.graphs import Graphs
from relaygr.engine.hot_rows import HotRowCache
from relaygr.engine.mailbox import Posted
from relaygr.engine.mover import PageMover, layer_cuts
from relaygr.engine.pinned import PinnedPages
from relaygr.engine.staging import Staged, Staging
from relaygr.engine.step import Direction, PageCopy, PageSpoiled, Progress, Served, Step, StepResult
from relaygr.engine.trays import Trays
from relaygr.kernels.select import replayable
from relaygr.model import AppendBatch, RankingModel, ScoreBatch

__all__ = ["CudaRunner"]

_OUTWARD_POLL_S: Final = 1e-3
"""Nobody waits for a write-back."""


class CudaRunner:
    """Streams of one device. Everything but `serve` is called from the event loop."""

    depth = 2

    def __init__(self, pages: torch.Tensor, host: PinnedPages, longest: int, *, canary: bool = False) -> None:
        """`longest`: pages of a user at most."""
        self.pages = pages
        self.host_pages = host.pages
        self._longest = longest
        self._device = pages.device
        self._compute = own_stream(self._device, urgent=True)
        self._on_compute = OnStream(self._compute)
        self._inward, self._outward = (own_stream(self._device) for _ in range(2))
        self._mover = PageMover(pages, host.pages, host.together)
        self._prepared: WeakKeyDictionary[Served, _Prepared] = WeakKeyDictionary()
        self._lock = threading.Lock()
        """Of `_prepared`: to add to it, in the thread that prepares a model, and to go through it."""
        self._staging = Staging(longest)
        self._steps: deque[_Flight] = deque()
        self._loads: deque[_Flight] = deque()
        self._writes: deque[_Flight] = deque()
        self._arrivals: dict[PageCopy, list[torch.cuda.Event]] = {}
        """Of each load in flight, the events of its layers."""
        self._events: list[torch.cuda.Event] = []
        """Those that have passed and nobody asks for any more: to make one takes longer than to record it."""
        self._polling = False
        self._dozing: asyncio.TimerHandle | None = None
        """The next poll, where it is not due at once."""
        self._canary = Canary(pages, len(host.pages)) if canary else None

    def trays(self, model: RankingModel) -> Trays | None:
        return Trays(model.config, self._longest) if replayable(model.stack.attention) else None

    def serve(self, served: Served, hot: HotRowCache | None, progress: Progress) -> None:
        model = served.model
        assert isinstance(model, RankingModel)
        graphs = None
        if served.trays is not None:
            with torch.cuda.device(self._device):
                graphs = Graphs(model, self.pages, self._longest, served.trays)
                graphs.capture(lambda done, of: progress("launches captured", done, of))
        with self._lock:
            self._prepared[served] = _Prepared(graphs, hot)

    def facts(self) -> dict[str, float]:
        with self._lock:
            graphs = [each.graphs for each in self._prepared.values() if each.graphs is not None]
        return {
            "graphs": sum(len(each) for each in graphs),
            "graph_bytes": sum(each.bytes for each in graphs),
            "capture_s": sum(each.seconds for each in graphs),
        }

    def launch(self, step: Step) -> "asyncio.Future[StepResult]":
        graphs, hot = self._prepared[step.served]
        staged = Staged(step, self._staging)
        posted: list[Posted] = []
        # What is replayed notes its own times; events would count the launch too, where the device has nothing to do.
        noted = staged.replayed and not step.page_copies and hot is None and self._canary is None
        spoiled, began = None, None
        with self._on_compute:
            try:
                if hot is not None:
                    hot.observe(staged.ids())
                if not noted:
                    began = self._mark(self._compute)
                if self._canary is not None:
                    spoiled = self._check(self._canary, step)
                self._run(step, staged, graphs, posted)
                if self._canary is not None:
                    self._canary.wrote(step)
                ended = self._mark(self._compute)
                staged.launched()
            except BaseException:
                self._compute.synchronize()  # what was launched must not go on writing to pages that are let go of
                if graphs is not None:
                    graphs.forget()
                staged.release()
                raise

        def result() -> StepResult:
            if spoiled is not None and spoiled.item():
                raise PageSpoiled("a page does not hold what was written to it")
            if began is None:
                seconds = max(posted[-1].times[1] - posted[0].times[0], 0) / 1e9
            else:
                seconds = began.elapsed_time(ended) / 1e3
            return StepResult(staged.results(), seconds)

        def over() -> None:
            for letter in posted:
                letter.over()
            staged.release()
            self._events += [ended] if began is None else [began, ended]

        return self._fly(self._steps, ended, result, over)

    def copy(self, copy: PageCopy) -> "asyncio.Future[float]":
        inward = copy.direction is Direction.IN
        stream, layers = self._inward if inward else self._outward, self._mover.layers
        nearly = copy.nearly if inward and copy.nearly_at < 1 else None
        events: list[torch.cuda.Event] = []
        with torch.cuda.device(self._device):
            began = self._mark(stream)
            try:
                # In parts only where something will read behind it: whole pages that lie side by side are one copy.
                for first, last in layer_cuts(layers) if nearly is not None else ((0, layers),):
                    self._mover.move(copy, first, last, stream)
                    events += [self._mark(stream)] * (last - first)
                if self._canary is not None:
                    with self._on_compute:
                        self._canary.moved(copy)
            except BaseException:
                stream.synchronize()
                raise
        if inward:
            self._arrivals[copy] = events

        def result() -> float:
            return float(began.elapsed_time(events[-1])) / 1e3

        def over() -> None:
            self._arrivals.pop(copy, None)
            self._events += {began, *events}

        future = self._fly(self._loads if inward else self._writes, events[-1], result, over)
        if nearly is not None:
            self._loads[-1].nearly = events[int(copy.nearly_at * layers)], nearly
        return future

    def close(self) -> None:
        streams = self._compute, self._inward, self._outward
        for stream in streams:
            stream.synchronize()  # not the device: another engine may be capturing, which that would spoil
        self._prepared.clear()
        for stream in streams:
            free_stream(stream, urgent=stream is self._compute)

    def _run(self, step: Step, staged: Staged, graphs: Graphs | None, posted: list[Posted]) -> None:
        """Launch a step on the current stream."""
        model = step.served.model
        assert isinstance(model, RankingModel)
        for old, new in step.page_copies:
            self.pages[new].copy_(self.pages[old])
        for appends in staged.appends:
            if appends.bucket is not None and graphs is not None:
                posted.append(graphs.append(appends.bucket, appends.packed))
            else:
                model.append(AppendBatch.of(appends.packed.to(self._device), appends.rows), self.pages)
        if not staged.scores:
            return
        arrivals = [self._arrivals[copy] for copy in step.reloads if copy in self._arrivals]
        out = staged.take_out(model.config.tasks)
        begin = 0
        for group in staged.scores:
            if group.bucket is not None and graphs is not None:
                posted.append(graphs.score(group.bucket, group.trays, group.counts, out.address(begin), arrivals))
            else:
                assert group.packed is not None
                batch = ScoreBatch.of(group.packed.to(self._device), group.rows)
                scores = model.score(batch, self.pages, lambda layer: self._await(arrivals, layer))
                out.scores[begin : begin + group.total].copy_(scores[: group.total], non_blocking=True)
            begin += group.total

    def _check(self, canary: Canary, step: Step) -> torch.Tensor:
        """Whether the step reads a spoiled page, known when it has run."""
        for copy in step.reloads:
            if copy in self._arrivals:
                self._compute.wait_event(self._arrivals[copy][-1])
        return canary.check(step)

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event behind what was launched on the stream by now."""
        event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _await(self, arrivals: Sequence[Sequence[torch.cuda.Event]], layer: int) -> None:
        for events in arrivals:
            self._compute.wait_event(events[layer])

    def _fly(
        self,
        flights: "deque[_Flight]",
        ended: torch.cuda.Event,
        result: Callable[[], Any],
        over: Callable[[], None] = lambda: None,
    ) -> "asyncio.Future[Any]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        flights.append(_Flight(ended, result, over, future))
        if self._dozing is not None and flights is not self._writes:
            self._dozing.cancel()
            self._dozing, self._polling = None, False
        if not self._polling:
            self._polling = True
            loop.call_soon(self._poll)
        return future

    def _poll(self) -> None:
        """Deliver what has ended, each stream's in order, and come back while anything is in flight."""
        self._dozing = None
        for load in self._loads:
            load.announce()
        # Steps are asked first and told of last: one that ran behind a load has landed after it.
        landed = sum(1 for _ in itertools.takewhile(_Flight.landed, self._steps))
        for flights in (self._loads, self._writes):
            while flights and flights[0].landed():
                flights.popleft().deliver()
        for _ in range(landed):
            self._steps.popleft().deliver()
        loop = asyncio.get_running_loop()
        if self._steps or self._loads:
            loop.call_soon(self._poll)
        elif self._writes:
            self._dozing = loop.call_later(_OUTWARD_POLL_S, self._poll)
        else:
            self._polling = False


class _Prepared(NamedTuple):
    """What a model has here beside its weights."""

    graphs: Graphs | None
    hot: HotRowCache | None


class _Flight:
    """Something launched, the event behind it, and who is to hear of it."""

    __slots__ = ("_ended", "_error", "_future", "_over", "_result", "nearly")

    def __init__(
        self,
        ended: torch.cuda.Event,
        result: Callable[[], Any],
        over: Callable[[], None],
        future: "asyncio.Future[Any]",
    ) -> None:
        self._ended = ended
        self._result = result
        self._over = over
        self._future = future
        self._error: BaseException | None = None
        self.nearly: tuple[torch.cuda.Event, Callable[[], None]] | None = None

    def announce(self) -> None:
        """Say that it is nearly done, once it is."""
        there = False
        with contextlib.suppress(Exception):  # a device that is lost is noticed when the flight lands
            there = self.nearly is not None and _passed(self.nearly[0])
        if there and self.nearly is not None:
            call, self.nearly = self.nearly[1], None
            call()

    def landed(self) -> bool:
        try:
            return _passed(self._ended)
        except Exception as error:  # the device is lost: everything in flight is
            self._error = error
            return True

    def deliver(self) -> None:
        try:
            if self._error is not None:
                raise self._error
            result = self._result()
            if not self._future.cancelled():
                self._future.set_result(result)
        except Exception as error:
            if not self._future.cancelled():
                self._future.set_exception(error)
        finally:
            self._over()
            # An error holds the frames it went through, and they this: nothing here may hold it in turn, or what its
            # step holds would stay.
            self._error = None
            del self._future, self


def _passed(event: torch.cuda.Event) -> bool:
    """Raises if the device is lost."""
    return bool(event.query())  # type: ignore[no-untyped-call]
