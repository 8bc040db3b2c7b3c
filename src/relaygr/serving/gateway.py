"""The gateway: the whole cascade behind one call, and the behaviours that come in."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, Final

import msgspec
import numpy as np

from relaygr.cascade.pipeline import Pipeline, Recommendation, RecommendRequest
from relaygr.errors import DeadlineExceeded, InvalidInput, Overloaded
from relaygr.history import History, HistoryStore
from relaygr.relay import Health
from relaygr.serving import gateway_metrics, metrics, openapi, operations
from relaygr.serving.gateway_metrics import GatewayCounts
from relaygr.serving.http import App, Reply, Request
from relaygr.serving.ranking import RelayRanking
from relaygr.serving.wire import (
    Alive,
    BehavioursBody,
    BehavioursReply,
    Encoding,
    GatewayStatus,
    Ready,
    RecommendBody,
    RecommendedItem,
    RecommendReply,
    SlotStatus,
    decode,
    encode,
    integers,
)

__all__ = ["MAX_BODY", "GatewayApp"]

MAX_BODY: Final = 4 * 2**20
"""Bytes of a body that are read."""
MAX_K: Final = 1_000
WRITERS: Final = 2
"""Threads that write to the store."""
MAX_WRITES: Final = 256
"""Appends that may wait for it; one more is refused."""
_IN_BODY: Final = {
    "items": "behaviours.item",
    "actions": "behaviours.action",
    "timestamps": "behaviours.timestamp",
}
"""What is called otherwise in a body than where it is checked."""
MILLISECONDS: Final = 10**11
"""From here on a timestamp is no count of seconds: it would be the year 5138."""


class GatewayApp(App):
    """The calls of a gateway."""

    calls: ClassVar = {operation.path: operation.method for operation in operations.GATEWAY}

    def __init__(
        self, pipeline: Pipeline, store: HistoryStore, ranking: RelayRanking, titles: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(MAX_BODY)
        self._titles = titles or {}
        self.served: Counter[str] = Counter()
        """Recommendations by path."""
        self._pipeline = pipeline
        self._store = store
        self._ranking = ranking
        self._started = time.monotonic()
        self._writes = ThreadPoolExecutor(WRITERS, "relaygr-writes")
        self._writing = 0
        self._counts = GatewayCounts()
        self.metrics.tell(gateway_metrics.CASCADE, lambda: self._counts)
        self.metrics.tell(gateway_metrics.RELAY, lambda: self._ranking)

    async def route(self, request: Request, encoding: Encoding) -> Reply | None:
        match request.method, request.path:
            case "POST", "/v1/recommend":
                return await self._recommend(request, encoding)
            case "POST", "/v1/behaviours":
                return await self._append(request, encoding)
            case "GET", "/v1/status":
                return Reply(200, msgspec.json.encode(self._status()))
            case "GET", "/healthz":
                return Reply(200, msgspec.json.encode(Alive()))
            case "GET", "/readyz":
                ready = not self.draining and bool(self._ranking.membership.placeable)
                return Reply(200 if ready else 503, msgspec.json.encode(Ready(ready)))
            case "GET", "/metrics":
                return Reply(200, self.metrics.text(), metrics.CONTENT_TYPE)
            case "GET", "/openapi.json":
                return Reply(200, openapi.gateway_document())
        return None

    async def _recommend(self, request: Request, encoding: Encoding) -> Reply:
        self.refuse_if_draining()
        body = decode(encoding, request.body, RecommendBody)
        if not 1 <= body.k <= MAX_K:
            raise InvalidInput("k", f"must be from 1 to {MAX_K}")
        context = integers("context", body.context, np.int64) if body.context else None
        found = await self._found(RecommendRequest(body.user, body.k, context), request.deadline_ms())
        asyncio.get_running_loop().call_soon(self._count, found)  # in the next turn, when the answer is out
        reply = RecommendReply(
            items=[RecommendedItem(chosen.item, chosen.score, self._titles.get(chosen.item)) for chosen in found.items],
            path=found.path,
            decision=found.decision,
            instance=found.instance,
            used=found.used,
            epoch=found.epoch,
            engine_ms=found.engine_ms,
            stages_ms=dict(found.stages_ms),  # type: ignore[arg-type]  # a TypedDict of floats
            stale=found.stale,
        )
        headers = tuple(
            (name, value.encode())
            for name, value in (
                (b"x-relaygr-slot", found.instance),
                (b"x-relaygr-path", found.path),
                (b"x-relaygr-decision", found.decision),
            )
            if value is not None
        )
        return Reply(200, encode(encoding, reply), encoding, headers)

    async def _found(self, wanted: RecommendRequest, deadline_ms: float | None) -> Recommendation:
        """What the pipeline finds within its budgets, or the caller's time where that is less."""
        if deadline_ms is None:
            return await self._pipeline.run(wanted)
        async with _within(deadline_ms):
            return await self._pipeline.run(wanted)

    def _count(self, found: Recommendation) -> None:
        if found.path is not None:
            self.served[found.path] += 1
        path = "NONE" if found.path is None else found.path.value
        self._counts.recommendations[path, found.decision.value] += 1
        self._counts.stale += found.stale
        self._counts.ranking_seconds[path,].observe(found.stages_ms["ranking"] / 1e3)
        for stage, ms in found.stages_ms.items():
            self._counts.stage_seconds[stage,].observe(ms / 1e3)  # type: ignore[operator]  # a TypedDict of floats

    async def _append(self, request: Request, encoding: Encoding) -> Reply:
        self.refuse_if_draining()
        body = decode(encoding, request.body, BehavioursBody)
        if not body.behaviours:
            raise InvalidInput("behaviours", "must not be empty")
        try:
            length = await self._appended(body, request.deadline_ms())
        except InvalidInput as error:
            raise InvalidInput(_IN_BODY.get(error.field, error.field), error.problem) from error
        return Reply(200, encode(encoding, BehavioursReply(body.user, length)), encoding)

    async def _appended(self, body: BehavioursBody, deadline_ms: float | None) -> int:
        """The user's length with these behaviours."""
        items = integers("items", [behaviour.item for behaviour in body.behaviours], np.int64)
        actions = integers("actions", [behaviour.action for behaviour in body.behaviours], np.int64)
        times = integers("timestamps", [behaviour.timestamp for behaviour in body.behaviours], np.int64)
        if times[at := int(times.argmax())] >= MILLISECONDS:
            raise InvalidInput("timestamps", f"must be seconds; entry {at}, {times[at]}, looks like milliseconds")
        self._ranking.check_actions(actions)
        async with _within(deadline_ms):
            return await asyncio.shield(self._write(body.user, History(items, actions, times)))

    def _write(self, user: str, new: History) -> asyncio.Future[int]:
        """Write to the store, in threads of its own: writes that wait must not keep reads and searches waiting.

        What was begun is stored and known here, whether its caller still waits for it or not.
        """
        if self._writing >= MAX_WRITES:
            raise Overloaded(f"{self._writing} appends wait for the store already")
        self._writing += 1
        append = partial(self._store.append, user, new.items, new.actions, new.timestamps)
        written = asyncio.get_running_loop().run_in_executor(self._writes, append)
        written.add_done_callback(partial(self._written, user, new))
        return written

    def _written(self, user: str, new: History, written: asyncio.Future[int]) -> None:
        self._writing -= 1
        if not written.cancelled() and written.exception() is None:
            self._pipeline.appended(user, new, written.result())
            self._counts.behaviours += len(new)

    async def give_up(self) -> None:
        """Close the store: what still waits for it is answered Unavailable."""
        await asyncio.to_thread(self._store.close)

    def _status(self) -> GatewayStatus:
        ranking = self._ranking
        members = ranking.membership.members()
        loads = ranking.router.loads()
        return GatewayStatus(
            up_s=round(time.monotonic() - self._started, 1),
            draining=self.draining,
            slots={
                m.slot: SlotStatus(address=m.address, health=m.health, load_tokens=loads.get(m.slot, 0))
                for m in members
            },
            ready_slots=sum(m.health is Health.UP for m in members),
            decisions=_plain(ranking.trigger.decisions),
            placements=_plain(ranking.router.placements),
            transitions=_plain(ranking.membership.transitions),
            retries=ranking.retries,
            trigger_margin=ranking.trigger.margin,
            paths=self.served,
            requests={f"{path} {status}": count for (path, status), count in self.requests.items()},
        )


@contextlib.asynccontextmanager
async def _within(deadline_ms: float | None) -> AsyncIterator[None]:
    """The time that the caller gives; DeadlineExceeded when it has passed, and before anything where there is none."""
    if deadline_ms == 0:
        raise DeadlineExceeded("the deadline had passed already")
    try:
        async with asyncio.timeout(None if deadline_ms is None else deadline_ms / 1e3) as timeout:
            yield
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise DeadlineExceeded(f"the caller's {deadline_ms:g} ms have passed") from error


def _plain(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(name): count for name, count in counts.items()}
