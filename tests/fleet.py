"""A gateway's pipeline over several instances in virtual time: all of the real code but sockets and the device.

    pipeline ── RelayRanking ── InstanceApp ── Engine ── simulated device

Import it in any test as `fleet`.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from relaygr import Decision, Engine, EngineConfig, History, Path
from relaygr.cascade import (
    FeaturePreProcessing,
    FixedRetrieval,
    Pipeline,
    PipelineConfig,
    Recommendation,
    RecommendRequest,
    inline,
)
from relaygr.clock import VirtualClock, VirtualTimeLoop
from relaygr.engine.simulated import SimulatedCosts, SimulatedExecutor, SimulatedModel
from relaygr.errors import DeadlineExceeded, Overloaded
from relaygr.history import LmdbStore
from relaygr.relay import Evidence, Membership, Router, RouterConfig, Trigger, TriggerConfig
from relaygr.serving.client import Response
from relaygr.serving.engine_server import begin, told
from relaygr.serving.instance import InstanceApp
from relaygr.serving.ranking import RelayRanking

__all__ = ["BUDGETS", "COSTS", "Fleet", "fleet"]

COSTS = SimulatedCosts(step=100e-6, token=10e-6, pair=0.0, candidate=5e-6, candidate_pair=0.0, copy=50e-6, page=20e-6)
"""A behaviour takes 10 µs: 4,000 of them 40 ms, and their rank on a prefix half a millisecond."""
BUDGETS = PipelineConfig(pipeline_ms=200.0, ranking_ms=30.0, candidates=64, retrieve=64)
PAGE_BYTES = 1024


class DirectLink:
    """An engine in this process, as frontends call one."""

    alive = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def call(self, what: Any, *, late_at: float | None = None) -> Any:
        value = begin(self._engine, what)
        return told(await value, self._engine.pulse) if isinstance(value, asyncio.Future) else value


class AppClient:
    """Requests to an app in this process."""

    def __init__(self, app: InstanceApp) -> None:
        self._app = app

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Response:
        sent: list[Any] = []
        scope = {"type": "http", "method": method, "path": path}
        scope["headers"] = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]  # type: ignore[assignment]
        incoming = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            return incoming.pop() if incoming else await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        named = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Response(sent[0]["status"], named, sent[1]["body"])

    def close(self) -> None:
        pass


@dataclass
class Fleet:
    """What runs, and what became of the requests so far."""

    engines: dict[str, Engine]
    router: Router
    trigger: Trigger
    store: LmdbStore
    pipeline: Pipeline
    answers: list[tuple[float, Recommendation]] = field(default_factory=list)
    """When each request came, and its answer."""
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def recommend(self, user: str) -> Recommendation | None:
        at = self.now
        try:
            answer = await self.pipeline.run(RecommendRequest(user))
        except (Overloaded, DeadlineExceeded) as error:
            self.refused[type(error).__name__] += 1
            return None
        self.answers.append((at, answer))
        return answer

    async def arrive(self, users: Sequence[str], rate: float, seed: int = 0) -> None:
        """Requests of these users, one after the other at exponential gaps; returns when all are answered."""
        draw = np.random.default_rng(seed)
        tasks = []
        for user in users:
            await asyncio.sleep(draw.exponential(1 / rate))
            tasks.append(asyncio.create_task(self.recommend(user)))
        await asyncio.gather(*tasks)

    def paths(self, since: float = 0.0, until: float = 1e9) -> Counter[Path | None]:
        return Counter(answer.path for at, answer in self.answers if since <= at < until)

    def decisions(self) -> Counter[Decision]:
        return Counter(answer.decision for _, answer in self.answers)

    def ranking_ms(self, since: float = 0.0) -> list[float]:
        return sorted(answer.stages_ms["ranking"] for at, answer in self.answers if at >= since)

    def store_history(self, user: str, history: History) -> None:
        self.store.append(user, history.items, history.actions, history.timestamps)


@contextlib.asynccontextmanager
async def fleet(
    folder: FilePath,
    *,
    instances: int = 2,
    retrieval_s: float = 0.1,
    pages: int = 2000,
    router: RouterConfig | None = None,
    wall_time: Callable[[], float] = lambda: 1.8e9,
    **config: Any,
) -> AsyncIterator[Fleet]:
    """Instances of `pages` device pages each, without host memory, behind a pipeline of `BUDGETS`; a step takes a tenth
    of the ranking budget."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    clock = VirtualClock(loop)
    membership, apps, engines = Membership(), dict[str, InstanceApp](), dict[str, Engine]()
    settings = {"max_history": 8192, "on_miss": "truncate", "host_cache": "0", "step_ms": 3.0, **config}
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(LmdbStore(folder / "store"))
        for number in range(instances):
            slot = f"slot-{number}"
            device = SimulatedExecutor(COSTS, page_bytes=PAGE_BYTES)
            engine = Engine(
                SimulatedModel(),
                EngineConfig(device_cache=f"{pages * PAGE_BYTES}B", **settings),
                clock=clock,
                executor=device,
            )
            engines[slot] = await stack.enter_async_context(engine)
            apps[slot] = InstanceApp(DirectLink(engine), None, slot)
            membership.add(slot, slot)
            membership.observe(slot, Evidence.READY)
        trigger = Trigger(TriggerConfig(ranking_budget_ms=BUDGETS.ranking_ms))
        placed = Router(membership, router)
        ranking = RelayRanking(membership, placed, trigger, clock, connect=lambda address: AppClient(apps[address]))
        await stack.enter_async_context(ranking)
        retrieval = FixedRetrieval(range(10**9, 10**9 + 64), after_s=retrieval_s)
        pipeline = Pipeline(
            store,
            retrieval,
            FeaturePreProcessing(),
            ranking,
            ranking,
            BUDGETS,
            clock=clock,
            offload=inline,
            wall_time=wall_time,
        )
        await stack.enter_async_context(pipeline)
        yield Fleet(engines, placed, trigger, store, pipeline)
