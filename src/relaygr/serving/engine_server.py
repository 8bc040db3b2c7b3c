"""The engine process: one engine behind a local socket, ended by its parent.

It is started as `python -m relaygr.serving.engine_server` with its settings as JSON on standard input, prints one line
when it is ready, and ends when standard input does: a parent that dies takes it along.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from relaygr.config import EngineConfig
from relaygr.engine import Engine
from relaygr.errors import RelayError
from relaygr.model import Candidates, checkpoint
from relaygr.serving import link
from relaygr.serving.engine_process import READY, EngineSettings

__all__ = ["serve_engine"]

_log = logging.getLogger(__name__)


async def serve_engine(engine: Engine, path: str, ready: Callable[[], None], until: asyncio.Event) -> None:
    """Answer calls on the socket until told to end; what was taken is answered first."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (frame := await link.read_frame(reader)) is not None:
            task = asyncio.create_task(_answer(engine, link.decode_call(frame), writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        writer.close()

    server = await asyncio.start_unix_server(connected, path, limit=2**20)
    async with server:
        ready()
        await until.wait()
        server.close()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(engine: Engine, call: link.Call, writer: asyncio.StreamWriter) -> None:
    try:
        value = await _run(engine, call.what)
        answer = link.Answer(call.number, value)
    except RelayError as error:
        answer = link.error_answer(call.number, error)
    except Exception:
        _log.exception("a call failed unexpectedly")
        answer = link.error_answer(call.number, RelayError("something failed here that should not; the log says what"))
    with contextlib.suppress(ConnectionError):
        link.write_frame(writer, answer)
        await writer.drain()


async def _run(engine: Engine, what: link.Signal | link.Rank | link.Evict | link.Status) -> Any:
    match what:
        case link.Status():
            return {"status": asdict(engine.status()), "counts": asdict(engine.counts())}
        case link.Evict():
            return await engine.evict(what.user)
    now = engine.clock.now()
    deadline = None if what.deadline_ms is None else now + what.deadline_ms / 1e3
    history = link.unpack_history(what.history)
    context = np.frombuffer(what.context, np.int64)
    if isinstance(what, link.Signal):
        decision = engine.signal(what.user, history, context=context, deadline=deadline)
        return [decision.value, *engine.pulse()]
    items = np.frombuffer(what.candidates, np.int64)
    features = None
    if what.features is not None:
        features = np.frombuffer(what.features, np.float32).reshape(len(items), -1)
    request = None if what.request is None else np.frombuffer(what.request, np.float32)
    ranked = await engine.rank(
        what.user, history, Candidates(items, features), context=context, request=request, deadline=deadline
    )
    timings = [ranked.timings.total, ranked.timings.prefix, ranked.timings.score]
    scores = ranked.scores
    return [scores.tobytes(), scores.shape[1], ranked.path.value, ranked.used, ranked.epoch, timings, *engine.pulse()]


def _say_ready() -> None:
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()


@contextlib.asynccontextmanager
async def _alone() -> AsyncIterator[None]:
    """While no other engine of this user opens on this machine: an engine measures then what work costs."""
    path = Path(tempfile.gettempdir()) / f"relaygr-{os.getuid()}.lock"
    with path.open("w") as file:
        await asyncio.to_thread(fcntl.flock, file, fcntl.LOCK_EX)
        yield


async def _main(settings: EngineSettings) -> None:
    model = checkpoint.load(settings.model)
    torch.set_num_threads(settings.threads or max(1, len(os.sched_getaffinity(0)) - 1))
    until = asyncio.Event()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def wait_for_parent() -> None:
        await reader.read()
        until.set()

    watcher = asyncio.create_task(wait_for_parent())
    async with contextlib.AsyncExitStack() as stack:
        async with _alone():
            engine = await stack.enter_async_context(Engine(model, EngineConfig(**settings.config)))
        await serve_engine(engine, settings.socket, _say_ready, until)
    await watcher


if __name__ == "__main__":
    told = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSettings)
    try:
        asyncio.run(_main(told))
    except RelayError as problem:
        sys.exit(f"engine process: {problem}")
