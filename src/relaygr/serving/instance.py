"""An instance's frontend: HTTP in front of the engine process."""

import asyncio
import time
from typing import Any, Final

import msgspec
import numpy as np

from relaygr.errors import HistoryNeeded, InvalidInput
from relaygr.history import History, HistoryStore, KnownHistory
from relaygr.serving import link
from relaygr.serving.http import (
    App,
    Conflict,
    Reply,
    Request,
)
from relaygr.serving.wire import (
    Encoding,
    PreInferBody,
    PreInferReply,
    RankBody,
    RankReply,
    decode,
    encode,
    floats,
    integers,
)

__all__ = ["MAX_BODY", "InstanceApp"]

MAX_BODY: Final = 16 * 2**20
"""Bytes of a body that are read; a history of 500,000 behaviours fits."""


class InstanceApp(App):
    """The calls of an instance."""

    paths = frozenset({"/v1/rank", "/v1/pre-infer", "/v1/status", "/healthz", "/readyz"})

    def __init__(self, engine: link.EngineLink, store: HistoryStore | None, slot: str) -> None:
        super().__init__(MAX_BODY)
        self._engine = engine
        self._store = store
        self._slot = slot
        self._slot_header = ((b"x-relaygr-slot", slot.encode()),)
        self._started = time.monotonic()

    async def route(self, request: Request, encoding: Encoding) -> Reply | None:
        match request.method, request.path:
            case "POST", "/v1/rank":
                return await self._rank(request, encoding)
            case "POST", "/v1/pre-infer":
                return await self._pre_infer(request, encoding)
            case "GET", "/v1/status":
                return Reply(200, msgspec.json.encode(await self._status()))
            case "GET", "/healthz":
                return Reply(200, b'{"alive": true}')
            case "GET", "/readyz":
                ready = self._engine.alive and not self.draining
                return Reply(200 if ready else 503, msgspec.json.encode({"ready": ready}))
        return None

    async def _pre_infer(self, request: Request, encoding: Encoding) -> Reply:
        body = decode(encoding, request.body, PreInferBody)
        deadline = request.deadline_ms()
        context = integers("context", body.context, np.int64).tobytes()

        async def signal(history: History | KnownHistory) -> Any:
            return await self._engine.call(link.Signal(body.user, link.pack_history(history), context, deadline))

        decision, wait_ms, version = await self._with_history(body, signal)
        reply = PreInferReply(decision=decision, slot=self._slot, wait_ms=wait_ms, cost_version=version)
        return Reply(202, encode(encoding, reply), encoding, self._slot_header)

    async def _rank(self, request: Request, encoding: Encoding) -> Reply:
        body = decode(encoding, request.body, RankBody)
        deadline = request.deadline_ms()
        context = integers("context", body.context, np.int64).tobytes()
        candidates = body.to_candidates()
        features = None if candidates.features is None else candidates.features.tobytes()
        numbers = None if body.request is None else floats("request", body.request).tobytes()

        async def rank(history: History | KnownHistory) -> Any:
            packed = link.pack_history(history)
            items = candidates.items.tobytes()
            return await self._engine.call(link.Rank(body.user, packed, context, deadline, items, features, numbers))

        scores, tasks, path, used, epoch, timings, wait_ms, version = await self._with_history(body, rank)
        reply = RankReply(
            scores=scores,
            tasks=tasks,
            path=path,
            used=used,
            epoch=epoch,
            slot=self._slot,
            timings_ms=dict(zip(("total", "prefix", "score"), timings, strict=True)),
            wait_ms=wait_ms,
            cost_version=version,
        )
        if encoding is Encoding.JSON:
            reply.scores = reply.to_array().tolist()
        headers = (*self._slot_header, (b"x-relaygr-path", path.encode()))
        return Reply(200, encode(encoding, reply), encoding, headers)

    async def _with_history(self, body: PreInferBody, call: Any) -> Any:
        """Make the call by digest where one is given, and with the behaviours where the engine wants them."""
        self.refuse_if_draining()
        if not body.user:
            raise InvalidInput("user", "must be a non-empty string")
        known = body.known()
        carried = body.carried()
        if known is not None:
            try:
                return await call(known)
            except HistoryNeeded:
                pass
        history = await self._whole(body, carried)
        if known is not None and history.digest() != known.digest():
            raise Conflict("digest: it is not that of the behaviours known here; send the whole history")
        return await call(history)

    async def _whole(self, body: PreInferBody, carried: History) -> History:
        """The window's behaviours: those carried, behind those that the store has before them."""
        missing = 0 if body.length is None else body.length - len(carried)
        if not missing:
            return carried
        if self._store is None:
            raise Conflict("length: this instance has no store; send the whole history")
        store = self._store
        stored = await asyncio.get_running_loop().run_in_executor(None, lambda: store.read(body.user, start=body.start))
        if len(stored) < missing:
            raise Conflict(f"length: {missing} behaviours are wanted from the store, which has {len(stored)}")
        return stored[:missing].append(carried.items, carried.actions, carried.timestamps)

    async def _status(self) -> dict[str, Any]:
        status = await self._engine.call(link.Status())
        up = time.monotonic() - self._started
        return {"slot": self._slot, "draining": self.draining, "up_s": round(up, 1), "engine": status}
