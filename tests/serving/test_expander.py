"""A user who comes back, over HTTP: header, body and metrics say the same of where the prefix came from."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from held import HeldExecutor
from relaygr import Engine, EngineConfig, build_model
from relaygr.cascade import Catalogue, FaissRetrieval, FeaturePreProcessing, Pipeline, PipelineConfig
from relaygr.clock import RealClock
from relaygr.history import LmdbStore
from relaygr.relay import Membership, Router, Trigger, TriggerConfig, TriggerMode
from relaygr.serving.engine_server import serve_engine
from relaygr.serving.gateway import GatewayApp
from relaygr.serving.instance import InstanceApp
from relaygr.serving.link import EngineLink
from relaygr.serving.ranking import RelayRanking
from relaygr.serving.run import bind, listening

MODEL = build_model("hstu", layers=2, dim=64, heads=2, items=100, seed=0)
LENGTH = 1500  # so long that copying is quicker than computing, whatever else the machine does
PAGES = 12
"""Of such a history."""


class System:
    """A gateway and an instance, each with a client."""

    def __init__(
        self, gateway: httpx.AsyncClient, instance: httpx.AsyncClient, engine: Engine, executor: HeldExecutor
    ) -> None:
        self._gateway, self._instance, self._engine, self.executor = gateway, instance, engine, executor

    async def recommend(self, user: str) -> str:
        """The path, which header, body and the metrics of both must agree on."""
        before = await self._counted()
        reply = await self._gateway.post("/v1/recommend", json={"user": user, "k": 3})
        assert reply.status_code == 200, reply.text
        path: str = reply.json()["path"]
        assert reply.headers["x-relaygr-path"] == path
        assert reply.headers["x-relaygr-decision"] == reply.json()["decision"]
        assert reply.headers["x-relaygr-slot"] == reply.json()["instance"] == "slot-0"
        after = await self._counted()
        assert after["ranks", path] == before.get(("ranks", path), 0) + 1
        assert after["recommendations", path] == before.get(("recommendations", path), 0) + 1
        return path

    async def _counted(self) -> dict[tuple[str, str], float]:
        found: dict[tuple[str, str], float] = {}
        for client, name in ((self._instance, "ranks"), (self._gateway, "recommendations")):
            text = (await client.get("/metrics")).text
            for path, value in re.findall(rf'relaygr_{name}_total{{.*?path="(\w+)".*?}} (\S+)', text):
                found[name, path] = found.get((name, path), 0) + float(value)
        return found

    async def metric(self, name: str) -> float:
        text = (await self._instance.get("/metrics")).text
        return sum(map(float, re.findall(rf"^{name}(?:{{.*?}})? (\S+)$", text, re.MULTILINE)))

    async def behave(self, user: str, count: int) -> None:
        new = [{"item": number, "action": 1, "timestamp": 10**9} for number in range(count)]
        assert (await self._gateway.post("/v1/behaviours", json={"user": user, "behaviours": new})).status_code == 200

    async def settled(self) -> None:
        """Until nothing runs and everything is written back."""

        def at_rest() -> bool:
            status = self._engine.status()
            return not (status.copies_in_flight or status.write_back_waiting or status.builds_under_way)

        await self.until(at_rest)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():  # noqa: ASYNC110  (what is waited for is another side's state)
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def system(folder: Path, mode: TriggerMode, device_pages: int) -> AsyncIterator[System]:
    page = MODEL.layout.bytes
    config = EngineConfig(
        device_cache=f"{device_pages * page}B", host_cache=f"{200 * page}B", max_history=1600, lease_share=1.0
    )
    ready, until, clock = asyncio.Event(), asyncio.Event(), RealClock()
    draw = np.random.default_rng(0)
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(LmdbStore(folder / "store"))
        for number in range(8):
            store.append(f"u{number}", draw.integers(0, 100, LENGTH), draw.integers(0, 16, LENGTH), np.arange(LENGTH))
        executor = HeldExecutor()
        engine = await stack.enter_async_context(Engine(MODEL, config, executor=executor))
        serving = asyncio.create_task(serve_engine(engine, str(folder / "engine"), ready.set, until))
        await ready.wait()
        link = await EngineLink.connect(str(folder / "engine"))
        instance = InstanceApp(link, store, "slot-0")
        port = await stack.enter_async_context(listening(instance, bind("127.0.0.1", 0)))
        membership = Membership()
        membership.add("slot-0", f"http://127.0.0.1:{port}")
        trigger = Trigger(TriggerConfig(mode=mode))
        ranking = await stack.enter_async_context(RelayRanking(membership, Router(membership), trigger, clock))
        budgets = PipelineConfig(pipeline_ms=60_000, ranking_ms=50_000, candidates=16, retrieve=200)
        retrieval = FaissRetrieval(Catalogue.random(2000, 8, seed=0))
        pipeline = Pipeline(store, retrieval, FeaturePreProcessing(), ranking, ranking, budgets, clock=clock)
        app = GatewayApp(await stack.enter_async_context(pipeline), store, ranking)
        port = await stack.enter_async_context(listening(app, bind("127.0.0.1", 0)))
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60, trust_env=False))
            for url in (f"http://127.0.0.1:{port}", membership.address("slot-0"))
        ]
        yield System(clients[0], clients[1], engine, executor)
        executor.go.set()
        await link.close()
        until.set()
        await serving


def run(
    folder: Path, test: Callable[[System], Coroutine[Any, Any, None]], mode: TriggerMode, device_pages: int = 64
) -> None:
    async def main() -> None:
        async with system(folder, mode, device_pages) as served:
            await test(served)

    asyncio.run(main())


def test_a_second_request_is_served_from_device_memory(tmp_path: Path) -> None:
    async def test(served: System) -> None:
        assert await served.recommend("u1") == "FULL"
        assert await served.recommend("u1") == "RESIDENT"
        assert await served.metric("relaygr_ranks_resident_left_by_earlier_total") == 1

    run(tmp_path, test, TriggerMode.NEVER)


def test_a_second_request_is_served_from_host_memory_after_eviction(tmp_path: Path) -> None:
    async def test(served: System) -> None:
        assert await served.recommend("u1") == "FULL"
        await served.settled()
        for other in range(2, 8):
            await served.recommend(f"u{other}")
            await served.settled()
        assert await served.metric("relaygr_evictions_total") > 0
        assert await served.recommend("u1") == "RELOADED"
        assert await served.metric("relaygr_reloads_total") == 1

    run(tmp_path, test, TriggerMode.NEVER, device_pages=3 * PAGES)


def test_a_second_request_extends_by_the_behaviours_that_arrived_in_between(tmp_path: Path) -> None:
    async def test(served: System) -> None:
        assert await served.recommend("u1") == "FULL"
        await served.behave("u1", 5)
        assert await served.recommend("u1") == "EXTENDED"
        assert await served.recommend("u1") == "RESIDENT"

    run(tmp_path, test, TriggerMode.NEVER)


def test_a_signal_makes_the_prefix_and_the_rank_finds_or_awaits_it(tmp_path: Path) -> None:
    async def test(served: System) -> None:
        assert await served.recommend("u1") in ("RESIDENT", "WAITED")
        await served.behave("u1", 5)
        assert await served.recommend("u1") in ("RESIDENT", "WAITED")
        told = await served.metric("relaygr_pre_infer_outcomes_total")
        assert told == 2

    run(tmp_path, test, TriggerMode.ALWAYS)


def test_ten_recommendations_of_one_user_at_once_cost_one_compute(tmp_path: Path) -> None:
    async def test(served: System) -> None:
        replies = await asyncio.gather(
            *(served._gateway.post("/v1/recommend", json={"user": "u1", "k": 3}) for _ in range(10))
        )
        assert {reply.status_code for reply in replies} == {200}
        assert len({str(reply.json()["items"]) for reply in replies}) == 1
        sources = served._engine.counts().sources
        assert sources["NOTHING"] == 1

    run(tmp_path, test, TriggerMode.ALWAYS)


def test_a_client_that_leaves_the_gateway_takes_its_rank_off_the_instance(tmp_path: Path) -> None:
    async def test(served: System) -> None:
        served.executor.go.clear()
        asked = asyncio.create_task(served._gateway.post("/v1/recommend", json={"user": "u1", "k": 3}))
        await served.until(lambda: served._engine.status().ranks_under_way == 1)
        asked.cancel()
        await served.until(lambda: served._engine.status().ranks_under_way == 0)
        served.executor.go.set()
        assert await served.recommend("u2") == "FULL"

    run(tmp_path, test, TriggerMode.NEVER)
