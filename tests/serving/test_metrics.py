"""What is scraped is what happened; what is documented is what is scraped."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from engines import PAGE_BYTES, WatchedDevice
from relaygr import Engine, EngineConfig, History
from relaygr.cascade import Catalogue, FaissRetrieval, FeaturePreProcessing, Pipeline, PipelineConfig
from relaygr.clock import RealClock
from relaygr.engine.simulated import SimulatedModel
from relaygr.engine.step import PageCopy
from relaygr.history import PAGE, LmdbStore
from relaygr.relay import Membership, Router, RouterConfig, Trigger, TriggerConfig, TriggerMode
from relaygr.serving import metrics
from relaygr.serving.engine_server import serve_engine
from relaygr.serving.gateway import GatewayApp
from relaygr.serving.gateway_metrics import GATEWAY
from relaygr.serving.instance import InstanceApp
from relaygr.serving.instance_metrics import ENGINE, INSTANCE
from relaygr.serving.link import EngineLink
from relaygr.serving.metrics import BUCKETS, Histogram, Kind, Metric
from relaygr.serving.metrics_page import markdown
from relaygr.serving.ranking import RelayRanking
from relaygr.serving.run import bind, listening

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
DRAW = np.random.default_rng(0)
HISTORY = History(DRAW.integers(0, 40, 400), DRAW.integers(0, 16, 400), np.arange(400) * 60)


class Scrape:
    """The samples of a scrape, by name and labels."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self._samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """One sample; 0 where it has not been counted yet."""
        return self._samples.get((name, tuple(sorted(labels.items()))), 0.0)

    def total(self, name: str) -> float:
        return sum(value for (own, _), value in self._samples.items() if own == name)


class Relay:
    """A gateway, and the one instance it has."""

    def __init__(
        self,
        gateway: httpx.AsyncClient,
        instance: httpx.AsyncClient,
        engine: Engine,
        device: WatchedDevice,
        link: EngineLink,
    ) -> None:
        self.gateway, self.instance, self.engine, self.device, self.link = gateway, instance, engine, device, link

    async def scrape(self, client: httpx.AsyncClient) -> Scrape:
        reply = await client.get("/metrics")
        assert reply.status_code == 200
        assert reply.headers["content-type"] == metrics.CONTENT_TYPE
        return Scrape(reply.text)

    async def rank(self, user: str, history: History) -> Any:
        body = {"user": user, "behaviours": behaviours(history), "candidates": [5, 6, 7]}
        reply = await self.instance.post("/v1/rank", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()


def behaviours(history: History) -> dict[str, list[int]]:
    return {name: getattr(history, name).tolist() for name in ("items", "actions", "timestamps")}


@contextlib.asynccontextmanager
async def relay(folder: Path, device_cache: str) -> AsyncIterator[Relay]:
    clock = RealClock()
    membership = Membership()
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(LmdbStore(folder / "store"))
        store.append("user-7", HISTORY.items, HISTORY.actions, HISTORY.timestamps)
        config = EngineConfig(device_cache=device_cache, host_cache="64KiB", max_history=400)
        device = WatchedDevice()
        engine = await stack.enter_async_context(Engine(SimulatedModel(), config, executor=device))
        ready, until = asyncio.Event(), asyncio.Event()
        serving = asyncio.create_task(serve_engine(engine, str(folder / "engine"), ready.set, until))
        await ready.wait()
        link = await EngineLink.connect(str(folder / "engine"))

        async def stop() -> None:
            await link.close()
            until.set()
            await serving

        stack.push_async_callback(stop)
        instance = InstanceApp(link, store, "slot-0")
        port = await stack.enter_async_context(listening(instance, bind("127.0.0.1", 0)))
        membership.add("slot-0", f"http://127.0.0.1:{port}")
        router, trigger = Router(membership, RouterConfig()), Trigger(TriggerConfig(mode=TriggerMode.ALWAYS))
        ranking = await stack.enter_async_context(RelayRanking(membership, router, trigger, clock))
        retrieval = FaissRetrieval(Catalogue.random(100, 8, seed=0))
        features = FeaturePreProcessing(request_features=0, candidate_features=0)
        budgets = PipelineConfig(
            pipeline_ms=40_000, ranking_ms=20_000, signal_grace_ms=10_000, retrieve=90, candidates=20
        )
        pipeline = await stack.enter_async_context(
            Pipeline(store, retrieval, features, ranking, ranking, budgets, clock=clock)
        )
        gateway = GatewayApp(pipeline, store, ranking)
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://relay")
            )
            for app in (gateway, instance)
        ]
        yield Relay(clients[0], clients[1], engine, device, link)


def run(folder: Path, test: Callable[[Relay], Coroutine[Any, Any, None]], device_cache: str = "64KiB") -> None:
    async def main() -> None:
        async with relay(folder, device_cache) as served:
            await test(served)

    asyncio.run(main())


def scraped_name(family: Any) -> str:
    return f"{family.name}_total" if family.type == "counter" else str(family.name)


def test_the_document_has_the_tables_of_the_code() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert markdown() in text, "run: python -m relaygr.serving.metrics_page"
    named = set(re.findall(r"\brelaygr_[a-z_]+\b", text))
    known = {metric.name for metric in (*INSTANCE, *GATEWAY)}
    parts = {f"{name}_{part}" for name in known for part in ("bucket", "sum", "count")}
    assert known <= named <= known | parts


def test_metrics_are_named_as_prometheus_wants_them() -> None:
    for table in (INSTANCE, GATEWAY):
        names = [metric.name for metric in table]
        assert len(names) == len(set(names))
        for metric in table:
            assert metric.name.startswith("relaygr_")
            assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
            assert (metric.kind is Kind.HISTOGRAM) <= metric.name.endswith("_seconds")
            assert metric.help.endswith(".")


def test_everything_in_the_tables_is_scraped_and_nothing_else(tmp_path: Path) -> None:
    async def test(served: Relay) -> None:
        for client, table in ((served.instance, INSTANCE), (served.gateway, GATEWAY)):
            scrape = await served.scrape(client)
            assert [scraped_name(family) for family in scrape.families] == [metric.name for metric in table]
            assert [family.type for family in scrape.families] == [metric.kind for metric in table]

    run(tmp_path, test)


def test_a_recommendation_is_told_of_from_the_trigger_to_the_device(tmp_path: Path) -> None:
    async def test(served: Relay) -> None:
        answer = (await served.gateway.post("/v1/recommend", json={"user": "user-7", "k": 3})).json()
        again = (await served.gateway.post("/v1/recommend", json={"user": "user-7", "k": 3})).json()
        assert (answer["decision"], again["decision"], again["path"]) == ("ADMIT", "RESIDENT", "RESIDENT")
        await served.gateway.post("/v1/recommend", json={"user": "user-7", "k": 0})
        await served.gateway.post(
            "/v1/behaviours", json={"user": "user-7", "behaviours": [{"item": 1, "action": 1, "timestamp": 10**9}] * 2}
        )

        told = await served.scrape(served.gateway)
        assert told("relaygr_http_requests_total", call="/v1/recommend", status="200") == 2
        assert told("relaygr_http_requests_total", call="/v1/recommend", status="400") == 1
        assert told("relaygr_http_request_seconds_count", call="/v1/recommend") == 3
        assert told("relaygr_recommendations_total", path="RESIDENT", decision="RESIDENT") == 1
        assert told.total("relaygr_recommendations_total") == 2
        assert told("relaygr_trigger_decisions_total", decision="ADMIT") == 2
        for stage in answer["stages_ms"]:
            assert told("relaygr_stage_seconds_count", stage=stage) == 2
            summed = (answer["stages_ms"][stage] + again["stages_ms"][stage]) / 1e3
            assert abs(told("relaygr_stage_seconds_sum", stage=stage) - summed) < 1e-9
        assert told.total("relaygr_ranking_seconds_count") == 2
        assert told("relaygr_placements_total", placement="FOLLOWED") == 2
        assert told("relaygr_slot_health", slot="slot-0", health="UP") == 1
        assert told.total("relaygr_slot_health") == 1
        assert told("relaygr_behaviours_total") == 2
        assert told("relaygr_trigger_margin") > 1
        assert told("relaygr_http_requests_under_way") == 1  # this scrape

        told = await served.scrape(served.instance)
        assert told("relaygr_admission_decisions_total", decision="ADMIT") == 1
        assert told("relaygr_admission_decisions_total", decision="RESIDENT") == 1
        assert told("relaygr_pre_infer_outcomes_total", outcome="COMPUTED") == 1
        assert told.total("relaygr_ranks_total") == 2
        assert told("relaygr_rank_seconds_count", path="RESIDENT", part="total") >= 1
        assert told("relaygr_histories_total", how="store") == 1
        assert told("relaygr_histories_total", how="digest") == 3
        assert told("relaygr_prefixes_had_total", source="NOTHING") == 1
        assert told("relaygr_prefixes_had_total", source="RESIDENT") >= 2
        status = served.engine.status()
        for state in ("free", "used", "pinned"):
            pages = told("relaygr_tier_pages", tier="device", state=state)
            assert told("relaygr_tier_bytes", tier="device", state=state) == pages * status.page_bytes
        assert told.total("relaygr_tier_pages") == status.device_pages + status.host_pages
        assert told("relaygr_tier_pages", tier="device", state="used") > 0
        assert status.page_bytes == PAGE_BYTES
        pre_infer = told("relaygr_device_busy_seconds_total", work="pre_infer")
        assert 0 < pre_infer < told.total("relaygr_device_busy_seconds_total") == status.device_busy_s
        assert told("relaygr_engine_up", slot="slot-0") == 1

    run(tmp_path, test)


def test_evictions_write_backs_and_reloads_are_told_of(tmp_path: Path) -> None:
    async def test(served: Relay) -> None:
        for _ in range(3):
            for user in range(5):
                await served.rank(f"user-{user}", HISTORY)
        told = await served.scrape(served.instance)
        assert told("relaygr_evictions_total", tier="device") > 0
        assert told("relaygr_write_backs_total", outcome="written") > 0
        assert told("relaygr_reloads_total") == told("relaygr_prefixes_had_total", source="HOST") > 0
        assert told("relaygr_ranks_total", path="RELOADED") > 0
        assert told("relaygr_tier_prefixes", tier="host") > 0
        assert told("relaygr_device_busy_seconds_total", work="pre_infer") == 0

    run(tmp_path, test, device_cache=str(3 * PAGE_BYTES * -(-len(HISTORY) // PAGE)))


def test_faults_are_told_of(tmp_path: Path) -> None:
    async def test(served: Relay) -> None:
        failed = iter((True,))
        served.device.fails = lambda work: not isinstance(work, PageCopy) and next(failed, False)
        await served.rank("user-7", HISTORY)
        told = await served.scrape(served.instance)
        assert told("relaygr_faults_total", kind="step") == 1

    run(tmp_path, test)


def test_without_its_engine_an_instance_still_tells_the_rest(tmp_path: Path) -> None:
    async def test(served: Relay) -> None:
        await served.link.close()
        told = await served.scrape(served.instance)
        assert told("relaygr_engine_up", slot="slot-0") == 0
        own = [metric.name for metric in INSTANCE[: -len(ENGINE)]]
        assert [scraped_name(family) for family in told.families] == own
        assert (await served.instance.get("/v1/status")).status_code == 503

    run(tmp_path, test)


def test_apps_in_one_process_share_nothing(tmp_path: Path) -> None:
    async def test(served: Relay) -> None:
        await served.gateway.get("/nothing")
        gateway, instance = [await served.scrape(client) for client in (served.gateway, served.instance)]
        assert gateway("relaygr_http_requests_total", call="other", status="404") == 1
        assert instance("relaygr_http_requests_total", call="other", status="404") == 0
        assert not [name for name in REGISTRY._names_to_collectors if name.startswith("relaygr")]

    run(tmp_path, test)


def test_a_p99_between_1_and_200_ms_is_known_to_within_a_half() -> None:
    fit = [bound for bound in BUCKETS if 0.001 <= bound <= 0.2]
    assert (fit[0], fit[-1]) == (0.001, 0.2)
    assert all(high / low <= 1.5 for low, high in pairwise(fit))
    assert {0.05, 0.135} <= set(fit)


@given(st.lists(st.floats(0, 10)))
def test_a_histogram_counts_each_value_once_and_up_to_its_bound(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    for bound, count in histogram.cumulative():
        assert count == sum(value <= float(bound) for value in values)
    assert histogram.sum == sum(values)
    assert histogram.cumulative()[-1] == ("+Inf", len(values))


def test_a_metric_is_read_when_it_is_scraped() -> None:
    now = {"value": 1.0}
    told = metrics.Metrics()
    told.tell([Metric[dict[str, float]]("relaygr_x", Kind.GAUGE, "X.", (), lambda it: {(): it["value"]})], lambda: now)
    assert b"relaygr_x 1.0\n" in told.text()
    now["value"] = 2.0
    assert b"relaygr_x 2.0\n" in told.text()
