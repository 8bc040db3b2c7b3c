"""An instance's frontend: HTTP in front of the engine process."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import msgspec
import numpy as np

from relaygr.errors import HistoryNeeded, InvalidInput, Overloaded, RelayError, Unavailable
from relaygr.history import History, HistoryStore, KnownHistory, StoreError
from relaygr.serving import instance_metrics, link, metrics, openapi, operations
from relaygr.serving.http import App, Conflict, Reply, Request
from relaygr.serving.instance_metrics import EngineTold, InstanceCounts
from relaygr.serving.until import Until
from relaygr.serving.wire import (
    Alive,
    Behaviours,
    Encoding,
    InstanceStatus,
    PreInferBody,
    PreInferReply,
    RankBody,
    RankReply,
    Ready,
    decode,
    encode,
    raw_floats,
    raw_integers,
)

__all__ = ["MAX_BODY", "InstanceApp"]

MAX_BODY: Final = 16 * 2**20
"""Bytes of a body that are read; a history of 500,000 behaviours fits."""
SCRAPE_S: Final = 2.0
"""How long a scrape waits for the engine; then it tells the rest."""
PARTS: Final = ("total", "prefix", "score")
_IN_BODY: Final = {"history": "behaviours"} | {name: f"behaviours.{name}" for name in Behaviours.__struct_fields__}
"""What is called otherwise in a body than where it is checked."""


class InstanceApp(App):
    """The calls of an instance."""

    calls: ClassVar = {operation.path: operation.method for operation in operations.INSTANCE}

    def __init__(self, engine: link.EngineCalls, store: HistoryStore | None, slot: str) -> None:
        super().__init__(MAX_BODY)
        self._engine = engine
        self._store = store
        self._slot = slot
        self._slot_header = ((b"x-relaygr-slot", slot.encode()),)
        self._started = time.monotonic()
        self._counts = InstanceCounts(slot)
        self._told: EngineTold | None = None
        self.metrics.tell(instance_metrics.FRONTEND, lambda: self._counts)
        self.metrics.tell(instance_metrics.ENGINE, lambda: self._told)

    async def route(self, request: Request, encoding: Encoding) -> Reply | None:
        match request.method, request.path:
            case "POST", "/v1/rank":
                return await self._rank(request, encoding)
            case "POST", "/v1/pre-infer":
                return await self._pre_infer(request, encoding)
            case "GET", "/v1/status":
                return Reply(200, msgspec.json.encode(await self._status()))
            case "GET", "/healthz":
                return Reply(200, msgspec.json.encode(Alive()))
            case "GET", "/readyz":
                ready = self._engine.alive and not self.draining
                return Reply(200 if ready else 503, msgspec.json.encode(Ready(ready)))
            case "GET", "/metrics":
                return Reply(200, await self._scrape(), metrics.CONTENT_TYPE)
            case "GET", "/openapi.json":
                return Reply(200, openapi.instance_document())
        return None

    async def _pre_infer(self, request: Request, encoding: Encoding) -> Reply:
        body = decode(encoding, request.body, PreInferBody)
        until = Until(request.deadline_ms())
        context = raw_integers("context", body.context, np.int64)

        def signal(history: History | KnownHistory) -> link.Signal:
            return link.Signal(body.user, link.pack_history(history), context, until.left_ms())

        decision, wait_ms, version = await self._with_history(body, signal, until)
        self._counts.decisions[decision] += 1
        reply = PreInferReply(decision=decision, slot=self._slot, wait_ms=wait_ms, cost_version=version)
        headers = (*self._slot_header, (b"x-relaygr-decision", decision.encode()))
        return Reply(202, encode(encoding, reply), encoding, headers)

    async def _rank(self, request: Request, encoding: Encoding) -> Reply:
        body = decode(encoding, request.body, RankBody)
        until = Until(request.deadline_ms())
        context = raw_integers("context", body.context, np.int64)
        items, features = body.raw_candidates()
        numbers = None if body.request is None else raw_floats("request", body.request)

        def rank(history: History | KnownHistory) -> link.Rank:
            packed, left = link.pack_history(history), until.left_ms()
            return link.Rank(body.user, packed, context, left, items, features, numbers)

        scores, tasks, path, used, epoch, timings, wait_ms, version = await self._with_history(body, rank, until)
        asyncio.get_running_loop().call_soon(self._count, path, timings)  # in the next turn, when the answer is out
        reply = RankReply(
            scores=scores,
            tasks=tasks,
            path=path,
            used=used,
            epoch=epoch,
            slot=self._slot,
            timings_ms=dict(zip(PARTS, timings, strict=True)),
            wait_ms=wait_ms,
            cost_version=version,
        )
        if encoding is Encoding.JSON:
            reply.scores = reply.to_array().tolist()
        headers = (*self._slot_header, (b"x-relaygr-path", path.encode()))
        return Reply(200, encode(encoding, reply), encoding, headers)

    def _count(self, path: str, timings: Sequence[float]) -> None:
        for part, ms in zip(PARTS, timings, strict=True):
            self._counts.rank_seconds[path, part].observe(ms / 1e3)

    async def _with_history(
        self,
        body: PreInferBody,
        call: Callable[[History | KnownHistory], link.Signal | link.Rank],
        until: Until,
    ) -> Any:
        """Make the call by digest where one is given, and with the behaviours where the engine wants them.

        What is wrong with them is called as in the body.
        """
        try:
            return await self._called(body, call, until)
        except InvalidInput as error:
            raise InvalidInput(_IN_BODY.get(error.field, error.field), error.problem) from error

    async def _called(
        self,
        body: PreInferBody,
        call: Callable[[History | KnownHistory], link.Signal | link.Rank],
        until: Until,
    ) -> Any:
        self.refuse_if_draining()
        if not body.user:
            raise InvalidInput("user", "must be a non-empty string")
        known = body.known()
        if known is not None:
            try:
                answer = await self._engine.call(call(known), late_at=until.late_at)
                self._counts.histories["digest"] += 1
                return answer
            except HistoryNeeded:
                pass
        try:
            carried = body.carried()
            history = await until.bound(self._whole(body, carried))
            if known is not None and history.digest() != known.digest():
                raise Conflict("digest", "it is not that of the behaviours known here; send the whole history")
        except Conflict:
            self._counts.histories["conflict"] += 1
            raise
        self._counts.histories["carried" if len(history) == len(carried) else "store"] += 1
        return await self._engine.call(call(history), late_at=until.late_at)

    async def _whole(self, body: PreInferBody, carried: History) -> History:
        """The window's behaviours: those carried, behind those that the store has before them."""
        missing = 0 if body.length is None else body.length - len(carried)
        if not missing:
            return carried
        if self._store is None:
            raise Conflict("length", "this instance has no store; send the whole history")
        store = self._store
        try:
            stored = await asyncio.to_thread(store.read, body.user, start=body.start)
        except (Unavailable, Overloaded, StoreError) as error:
            raise Conflict(
                "length", f"the store cannot say what is missing ({error}); send the whole history"
            ) from error
        if len(stored) < missing:
            raise Conflict("length", f"{missing} behaviours are wanted from the store, which has {len(stored)}")
        try:
            return stored[:missing].append(carried.items, carried.actions, carried.timestamps)
        except InvalidInput as error:
            problem = f"what is carried does not follow the store ({error}); send the whole history"
            raise Conflict("digest", problem) from error

    async def _scrape(self) -> bytes:
        """The text of /metrics; without the engine's part where it does not answer."""
        try:
            async with asyncio.timeout(SCRAPE_S):
                self._told = await self._ask()
        except (RelayError, TimeoutError):
            self._told = None
        self._counts.engine_up = self._told is not None
        return self.metrics.text()

    async def _ask(self) -> EngineTold:
        told = await self._engine.call(link.Status())
        return msgspec.convert(told, EngineTold)

    async def _status(self) -> InstanceStatus:
        told = await self._ask()
        up = round(time.monotonic() - self._started, 1)
        return InstanceStatus(slot=self._slot, draining=self.draining, up_s=up, engine=told.status, counts=told.counts)
