"""The engine process: one engine behind a local socket, ended by its parent.

It is started as `python -m relaygr.serving.engine_server` with its settings as JSON on standard input, prints one line
when it is ready, and ends when standard input does: a parent that dies takes it along. An engine that fails ends it,
too, with a status that is not 0: what restarts instances begins it anew.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import uvloop

from relaygr.config import EngineConfig
from relaygr.engine import Engine, Ranked
from relaygr.engine.simulated import H200, SimulatedExecutor, SimulatedModel
from relaygr.errors import RelayError, Unavailable
from relaygr.model import Candidates, checkpoint
from relaygr.serving import link
from relaygr.serving.engine_process import READY, SIMULATED, EngineSettings
from relaygr.serving.garbage import settle
from relaygr.serving.preparing import Preparing

__all__ = ["begin", "serve_engine", "told"]

_log = logging.getLogger(__name__)

Pulse = Callable[[], tuple[float, int]]


async def serve_engine(engine: Engine, path: str, ready: Callable[[], None], until: asyncio.Event) -> None:
    """Answer calls on the socket until told to end; what was taken is answered first, as far as the engine does."""
    connections: set[EngineConnection] = set()
    server = await asyncio.get_running_loop().create_unix_server(lambda: EngineConnection(engine, connections), path)
    async with server:
        ready()
        await until.wait()
        server.close()
        finished = asyncio.gather(*(connection.finished() for connection in connections))
        failed = asyncio.ensure_future(engine.failed())
        await asyncio.wait((finished, failed), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)  # an engine that fails answers at once whom it can: not who swaps its model
        finished.cancel()
        failed.cancel()
        for connection in list(connections):
            connection.end()


class EngineConnection(link.Frames):
    """The engine's side of a link. No call has a task of its own: answers go out when their futures are done."""

    def __init__(self, engine: Engine, connections: "set[EngineConnection]") -> None:
        super().__init__()
        self._engine = engine
        self._connections = connections
        self._running: dict[int, asyncio.Future[Any]] = {}
        self._pulse: tuple[float, int] | None = None
        """Of the engine, for all answers that leave together."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The frontend is gone: nobody waits for its calls."""
        self._connections.discard(self)
        for future in list(self._running.values()):
            future.cancel()

    async def finished(self) -> None:
        """Wait until what was taken is answered."""
        if self._running:
            await asyncio.wait(self._running.values())
            await asyncio.sleep(0)  # their answers are sent by callbacks of the same futures

    def frame(self, body: memoryview) -> None:
        call = link.decode_call(body)
        number = call.number
        if isinstance(call.what, link.Cancel):
            if number in self._running:
                self._running[number].cancel()
            return
        try:
            value = begin(self._engine, call.what, self.pulse)
        except Exception as error:
            self.send(_failure(number, error))
            return
        if not isinstance(value, asyncio.Future):
            self.send(link.Answer(number, value))
            return
        self._running[number] = value
        value.add_done_callback(lambda future: self._done(number, future))

    def _done(self, number: int, future: "asyncio.Future[Any]") -> None:
        del self._running[number]
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self.send(_failure(number, error))
        else:
            self.send(link.Answer(number, told(future.result(), self.pulse)), alone=not self._running)

    def pulse(self) -> tuple[float, int]:
        if self._pulse is None:
            try:
                self._pulse = self._engine.pulse()
            except Unavailable:  # it has failed since: what it had answered before goes out all the same
                self._pulse = 0.0, 0
        return self._pulse

    def _flush(self) -> None:
        super()._flush()
        self._pulse = None


def begin(
    engine: Engine, what: link.Signal | link.Rank | link.Status | link.Evict | link.Swap, pulse: Pulse | None = None
) -> Any:
    """What a call is answered in plain values, or the future of it, for `told`. `pulse` is the engine's, or as good."""
    if isinstance(what, link.Status):
        return {"status": asdict(engine.status()), "counts": asdict(engine.counts())}
    if isinstance(what, link.Evict):
        return asyncio.ensure_future(engine.evict(what.user))
    if isinstance(what, link.Swap):
        return asyncio.ensure_future(_swap(engine, what.model))
    deadline = None if what.deadline_ms is None else engine.clock.now() + what.deadline_ms / 1e3
    history = link.unpack_history(what.history)
    context = np.frombuffer(what.context, np.int64) if what.context else None
    if isinstance(what, link.Signal):
        decision = engine.signal(what.user, history, context=context, deadline=deadline)
        return [decision.value, *(pulse or engine.pulse)()]
    items = np.frombuffer(what.candidates, np.int64)
    features = None
    if what.features is not None:
        features = np.frombuffer(what.features, np.float32).reshape(len(items), -1)
    request = None if what.request is None else np.frombuffer(what.request, np.float32)
    return engine.begin_rank(
        what.user, history, Candidates(items, features), context=context, request=request, deadline=deadline
    )


async def _swap(engine: Engine, path: str) -> list[Any]:
    await engine.swap_model(await asyncio.to_thread(checkpoint.load, path))
    status = engine.status()
    return [status.version, status.epoch]


def told(ranked: Any, pulse: Pulse) -> Any:
    """An answer in plain values."""
    if not isinstance(ranked, Ranked):
        return ranked
    timings = [ranked.timings.total, ranked.timings.prefix, ranked.timings.score]
    scores, path = ranked.scores, ranked.path.value
    return [scores.tobytes(), scores.shape[1], path, ranked.used, ranked.epoch, timings, *pulse()]


def _failure(number: int, error: BaseException) -> link.Answer:
    if isinstance(error, RelayError):
        return link.error_answer(number, error)
    if isinstance(error, MemoryError):
        return link.error_answer(number, Unavailable("the engine process has no memory for the call now"))
    _log.error("a call failed unexpectedly", exc_info=error)
    return link.error_answer(number, RelayError("something failed here that should not; the log says what"))


def _say_ready() -> None:
    settle()
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()


@contextlib.asynccontextmanager
async def _alone(settings: EngineSettings) -> AsyncIterator[None]:
    """While no other engine of this user opens on this machine's CPU: an engine measures then what work costs."""
    with contextlib.ExitStack() as stack:
        if EngineConfig(**settings.config).device == "cpu":
            with contextlib.suppress(OSError):  # then they measure at once, and learn better from what they serve
                path = Path(tempfile.gettempdir()) / f"relaygr-{os.getuid()}.lock"
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, lock)
                await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        yield


def _engine(settings: EngineSettings) -> Engine:
    config = EngineConfig(**settings.config)
    if config.device == SIMULATED:
        return Engine(SimulatedModel(), config, executor=SimulatedExecutor(H200, remember=False))
    assert settings.model is not None
    return Engine(checkpoint.load(settings.model), config, progress=Preparing())


async def _main(settings: EngineSettings) -> None:
    torch.set_num_threads(settings.threads or max(1, len(os.sched_getaffinity(0)) - 1))
    until = asyncio.Event()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def ends_with(wait: Awaitable[Any]) -> None:
        await wait
        until.set()

    parent = asyncio.create_task(ends_with(reader.read()))
    async with contextlib.AsyncExitStack() as stack:
        async with _alone(settings):
            engine = await stack.enter_async_context(_engine(settings))
        failure = asyncio.create_task(ends_with(engine.failed()))
        await serve_engine(engine, settings.socket, _say_ready, until)
    failure.cancel()
    parent.cancel()


if __name__ == "__main__":
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSettings)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_main(settings))
    except RelayError as problem:
        sys.exit(f"engine process: {problem}")
