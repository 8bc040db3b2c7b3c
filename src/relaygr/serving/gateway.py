"""The gateway: the whole cascade behind one call, and the behaviours that come in."""

import asyncio
import time
from collections import Counter
from typing import Any

import msgspec
import numpy as np

from relaygr.cascade.pipeline import Pipeline, RecommendRequest
from relaygr.errors import InvalidInput
from relaygr.history import HistoryStore
from relaygr.relay import Health
from relaygr.serving.http import App, Reply, Request
from relaygr.serving.ranking import RelayRanking
from relaygr.serving.wire import Encoding, decode, encode

__all__ = ["MAX_BODY", "GatewayApp"]

MAX_BODY = 4 * 2**20
MAX_K = 1_000


class RecommendBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Who to recommend to."""

    user: str
    k: int = 10
    context: list[int] = []


class RecommendedItem(msgspec.Struct):
    item: int
    score: float


class RecommendReply(msgspec.Struct, kw_only=True):
    items: list[RecommendedItem]
    path: str | None
    decision: str
    instance: str | None
    used: int
    epoch: int | None
    stages_ms: dict[str, float]


class Behaviour(msgspec.Struct, forbid_unknown_fields=True):
    item: int
    action: int
    timestamp: int


class BehavioursBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the user did since."""

    user: str
    behaviours: list[Behaviour]


class BehavioursReply(msgspec.Struct):
    user: str
    length: int


class GatewayApp(App):
    """The calls of a gateway."""

    paths = frozenset({"/v1/recommend", "/v1/behaviours", "/v1/status", "/healthz", "/readyz"})

    def __init__(self, pipeline: Pipeline, store: HistoryStore, ranking: RelayRanking) -> None:
        super().__init__(MAX_BODY)
        self.served: Counter[str] = Counter()
        """Recommendations by path."""
        self._pipeline = pipeline
        self._store = store
        self._ranking = ranking
        self._started = time.monotonic()

    async def route(self, request: Request, encoding: Encoding) -> Reply | None:
        match request.method, request.path:
            case "POST", "/v1/recommend":
                return await self._recommend(request, encoding)
            case "POST", "/v1/behaviours":
                return await self._append(request, encoding)
            case "GET", "/v1/status":
                return Reply(200, msgspec.json.encode(self._status()))
            case "GET", "/healthz":
                return Reply(200, b'{"alive": true}')
            case "GET", "/readyz":
                ready = not self.draining and bool(self._ranking.membership.placeable)
                return Reply(200 if ready else 503, msgspec.json.encode({"ready": ready}))
        return None

    async def _recommend(self, request: Request, encoding: Encoding) -> Reply:
        self.refuse_if_draining()
        body = decode(encoding, request.body, RecommendBody)
        if not 1 <= body.k <= MAX_K:
            raise InvalidInput("k", f"must be from 1 to {MAX_K}")
        context = np.array(body.context, np.int64) if body.context else None
        found = await self._pipeline.run(RecommendRequest(body.user, body.k, context))
        if found.path is not None:
            self.served[found.path] += 1
        reply = RecommendReply(
            items=[RecommendedItem(chosen.item, chosen.score) for chosen in found.items],
            path=found.path,
            decision=found.decision,
            instance=found.instance,
            used=found.used,
            epoch=found.epoch,
            stages_ms=dict(found.stages_ms),  # type: ignore[arg-type]  # a TypedDict of floats
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

    async def _append(self, request: Request, encoding: Encoding) -> Reply:
        self.refuse_if_draining()
        body = decode(encoding, request.body, BehavioursBody)
        if not body.behaviours:
            raise InvalidInput("behaviours", "must not be empty")
        columns = [[getattr(b, name) for b in body.behaviours] for name in ("item", "action", "timestamp")]
        try:
            items, actions, times = (np.array(column, np.int64) for column in columns)
        except OverflowError as error:
            raise InvalidInput("behaviours", "has numbers that do not fit 64 bits") from error
        length = await asyncio.to_thread(self._store.append, body.user, items, actions, times)
        return Reply(200, encode(encoding, BehavioursReply(body.user, length)), encoding)

    def _status(self) -> dict[str, Any]:
        ranking = self._ranking
        members = ranking.membership.members()
        loads = ranking.router.loads()
        return {
            "up_s": round(time.monotonic() - self._started, 1),
            "draining": self.draining,
            "slots": {
                m.slot: {"address": m.address, "health": m.health, "load_tokens": loads.get(m.slot, 0)} for m in members
            },
            "ready_slots": sum(m.health is Health.UP for m in members),
            "decisions": ranking.trigger.decisions,
            "placements": ranking.router.placements,
            "transitions": ranking.membership.transitions,
            "retries": ranking.retries,
            "trigger_margin": ranking.trigger.margin,
            "paths": self.served,
            "requests": {f"{path} {status}": count for (path, status), count in self.requests.items()},
        }
