"""An instance over its real link: the calls people and machines make, and what they get when something is wrong."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from oracle import assert_scores, oracle_scores
from relaygr import Engine, EngineConfig, History, build_model
from relaygr.engine.faults import Faults, FaultyExecutor
from relaygr.engine.torch_executor import TorchExecutor
from relaygr.errors import Overloaded
from relaygr.history import LmdbStore
from relaygr.serving.engine_server import serve_engine
from relaygr.serving.instance import MAX_BODY, InstanceApp
from relaygr.serving.link import EngineLink
from relaygr.serving.wire import Behaviours, Encoding, PreInferReply, RankBody, RankReply, encode

MODEL = build_model("hstu", layers=1, dim=16, heads=2, items=100, seed=0, request_features=2, candidate_features=1)
DRAW = np.random.default_rng(0)
HISTORY = History(DRAW.integers(0, 100, 400), DRAW.integers(0, 16, 400), np.arange(400) * 60)
ITEMS = np.array([5, 6, 7])


class Instance:
    """A served instance and a client for it."""

    def __init__(self, app: InstanceApp, client: httpx.AsyncClient, engine: Engine, executor: FaultyExecutor) -> None:
        self.app, self.client, self.engine, self.executor = app, client, engine, executor

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json=body, headers=named)


@contextlib.asynccontextmanager
async def instance(folder: Path, *, stored: int = 0) -> AsyncIterator[Instance]:
    config = EngineConfig(device_cache="8MiB", host_cache="0")
    executor = FaultyExecutor(TorchExecutor(), Faults(fail=1.0), seed=0)
    executor.active = False
    ready, until = asyncio.Event(), asyncio.Event()
    with LmdbStore(folder / "store") as store:
        if stored:
            store.append("u", HISTORY.items[:stored], HISTORY.actions[:stored], HISTORY.timestamps[:stored])
        async with Engine(MODEL, config, executor=executor) as engine:
            serving = asyncio.create_task(serve_engine(engine, str(folder / "engine"), ready.set, until))
            await ready.wait()
            link = await EngineLink.connect(str(folder / "engine"))
            app = InstanceApp(link, store, "slot-3")
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://instance") as client:
                yield Instance(app, client, engine, executor)
            await link.close()
            until.set()
            await serving


def run(folder: Path, test: Callable[[Instance], Coroutine[Any, Any, None]], *, stored: int = 0) -> None:
    async def main() -> None:
        async with instance(folder, stored=stored) as served:
            await test(served)

    asyncio.run(main())


def behaviours(history: History) -> dict[str, list[int]]:
    return {
        "items": history.items.tolist(),
        "actions": history.actions.tolist(),
        "timestamps": history.timestamps.tolist(),
    }


def by_digest(carried: int) -> dict[str, Any]:
    """HISTORY as its newest behaviours, its length and its digest."""
    digest = base64.b64encode(HISTORY.digest()).decode()
    newest = behaviours(HISTORY[len(HISTORY) - carried :])
    return {"user": "u", "length": len(HISTORY), "digest": digest, "behaviours": newest}


def test_people_rank_a_whole_history_in_json(tmp_path: Path) -> None:
    async def test(served: Instance) -> None:
        body = {"user": "u", "behaviours": behaviours(HISTORY), "candidates": ITEMS.tolist(), "request": [0.5, 1.0]}
        reply = await served.post("/v1/rank", body)
        assert reply.status_code == 200
        assert reply.headers["x-relaygr-slot"] == "slot-3"
        assert reply.headers["x-relaygr-path"] == "FULL"
        right = oracle_scores(MODEL, HISTORY, ITEMS, request=np.array([0.5, 1.0], np.float32))
        assert_scores(np.array(reply.json()["scores"]), right)
        assert reply.json()["used"] == 400

    run(tmp_path, test)


def test_machines_rank_in_msgpack_with_raw_arrays(tmp_path: Path) -> None:
    async def test(served: Instance) -> None:
        features = np.array([[0.1], [0.2], [0.3]], np.float32)
        body = RankBody(
            user="u",
            behaviours=Behaviours(HISTORY.items.tobytes(), HISTORY.actions.tobytes(), HISTORY.timestamps.tobytes()),
            context=np.array([3, 4]).tobytes(),
            candidates=ITEMS.tobytes(),
            features=features.tobytes(),
        )
        headers = {"content-type": Encoding.MSGPACK}
        reply = await served.client.post("/v1/rank", content=encode(Encoding.MSGPACK, body), headers=headers)
        assert reply.headers["content-type"] == Encoding.MSGPACK
        decoded = msgspec.msgpack.decode(reply.content, type=RankReply)
        from relaygr import Candidates

        right = oracle_scores(MODEL, HISTORY, Candidates(ITEMS, features), context=np.array([3, 4]))
        assert_scores(decoded.to_array(), right)

    run(tmp_path, test)


def test_a_signal_answers_at_admission_and_its_rank_needs_no_behaviours(tmp_path: Path) -> None:
    async def test(served: Instance) -> None:
        signal = await served.post("/v1/pre-infer", by_digest(10))
        assert signal.status_code == 202
        assert msgspec.json.decode(signal.content, type=PreInferReply).decision == "ADMIT"
        reply = await served.post("/v1/rank", {**by_digest(0), "candidates": ITEMS.tolist()})
        assert reply.status_code == 200
        assert reply.json()["path"] in ("WAITED", "RESIDENT")
        assert_scores(np.array(reply.json()["scores"]), oracle_scores(MODEL, HISTORY, ITEMS))
        again = await served.post("/v1/pre-infer", by_digest(0))
        assert again.json()["decision"] == "RESIDENT"

    run(tmp_path, test, stored=390)


@pytest.mark.parametrize(("stored", "carried"), [(390, 10), (400, 10), (395, 30), (400, 0), (0, 400)])
def test_a_store_that_is_longer_is_cut_and_a_shorter_one_extended(tmp_path: Path, stored: int, carried: int) -> None:
    async def test(served: Instance) -> None:
        reply = await served.post("/v1/rank", {**by_digest(carried), "candidates": ITEMS.tolist()})
        assert reply.status_code == 200, reply.text
        assert_scores(np.array(reply.json()["scores"]), oracle_scores(MODEL, HISTORY, ITEMS))

    run(tmp_path, test, stored=stored)


def test_digests_that_disagree_are_a_conflict_and_the_whole_history_settles_it(tmp_path: Path) -> None:
    async def test(served: Instance) -> None:
        wrong = {**by_digest(10), "digest": base64.b64encode(bytes(16)).decode(), "candidates": ITEMS.tolist()}
        reply = await served.post("/v1/rank", wrong)
        assert (reply.status_code, reply.json()["field"]) == (409, "digest")
        assert "whole history" in reply.json()["message"]
        short = await served.post("/v1/rank", {**by_digest(5), "candidates": ITEMS.tolist()})
        assert short.status_code == 409
        whole = await served.post("/v1/rank", {**by_digest(400), "candidates": ITEMS.tolist()})
        assert whole.status_code == 200
        other = await served.post("/v1/rank", {**by_digest(400), "digest": wrong["digest"], "candidates": [1]})
        assert (other.status_code, other.json()["field"]) == (409, "digest")

    run(tmp_path, test, stored=390)


@pytest.mark.parametrize("path", ["/v1/rank", "/v1/pre-infer"])
def test_a_history_that_is_not_told_is_refused_and_an_empty_one_is_not(tmp_path: Path, path: str) -> None:
    async def test(served: Instance) -> None:
        body = {"user": "u", "candidates": [1]} if path == "/v1/rank" else {"user": "u"}
        reply = await served.post(path, body)
        assert (reply.status_code, reply.json()["field"]) == (400, "behaviours")
        none = behaviours(History.empty())
        empties: list[dict[str, Any]] = [{"length": 0}, {"behaviours": {}}, {"behaviours": none}]
        for empty in empties:
            reply = await served.post(path, {**body, **empty})
            assert reply.status_code in (200, 202), reply.text
            assert reply.json().get("used", 0) == 0
        if path == "/v1/rank":
            reply = await served.post(path, {**body, "length": 390})
            assert reply.json()["used"] == 390

    run(tmp_path, test, stored=390)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"user": ""}, "user"),
        ({"candidates": []}, "candidates"),
        ({"candidates": [-1]}, "candidates"),
        ({"candidates": [2**63]}, "candidates"),
        ({"behaviours": {"items": [1], "actions": [1], "timestamps": []}}, "behaviours.timestamps"),
        ({"behaviours": {"items": [1, 2], "actions": [1, 1], "timestamps": [5, 4]}}, "behaviours.timestamps"),
        ({"behaviours": {"items": [1], "actions": [99], "timestamps": [1]}}, "behaviours.actions"),
        ({"length": -1}, "length"),
        ({"start": -1}, "start"),
        ({"start": 100}, "start"),
        ({"behaviours": None}, "behaviours"),
        ({"behaviours": None, "digest": "A" * 22 + "=="}, "length"),
        ({"digest": "A" * 22 + "=="}, "length"),
        ({"length": 3, "digest": "AAAA"}, "digest"),
        ({"features": [[1.0, 2.0]]}, "features"),
        ({"request": [1.0]}, "request"),
        ({"context": [-3]}, "context"),
        ({"behaviours": {"items": [1], "actions": [1], "timestamps": ["now"]}}, "behaviours.timestamps"),
        ({"behaviours": {"item": [1]}}, "behaviours.item"),
        ({"unknown": 1}, "unknown"),
        ({"content-type": 1}, "body"),
        ({"candidates": "nonsense!"}, "candidates"),
        ({"user": None}, "user"),
    ],
)
def test_bad_input_gets_a_4xx_that_names_the_field(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    async def test(served: Instance) -> None:
        reply = await served.post("/v1/rank", {"user": "u", "behaviours": {}, "candidates": [1], **change})
        assert reply.status_code == 400, reply.text
        assert reply.json()["field"] == field

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"candidates": [1, 2, -3]}, "candidates: must not be negative; entry 2 is -3"),
        ({"candidates": [1, 2**63]}, f"candidates: must fit int64; entry 1 is {2**63}"),
        ({"context": [0, -3]}, "context: must not be negative; entry 1 is -3"),
        (
            {"behaviours": {"items": [1, -2], "actions": [1, 1], "timestamps": [1, 1]}},
            "behaviours.items: must not be negative; entry 1 is -2",
        ),
        (
            {"behaviours": {"items": [1, 2], "actions": [1, 2**31], "timestamps": [1, 1]}},
            f"behaviours.actions: must fit int32; entry 1 is {2**31}",
        ),
        (
            {"behaviours": {"items": [1, 2], "actions": [1, 99], "timestamps": [1, 1]}},
            "behaviours.actions: must be below 16, this model's number of actions; entry 1 is 99",
        ),
    ],
)
def test_the_sentence_says_which_entry_is_wrong(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    async def test(served: Instance) -> None:
        reply = await served.post("/v1/rank", {"user": "u", "behaviours": {}, "candidates": [1], **change})
        assert (reply.status_code, reply.json()["message"]) == (400, sentence)

    run(tmp_path, test)


@pytest.mark.parametrize("told", ["1e9", "-4", "inf", "nan"])
def test_a_deadline_that_cannot_be_is_refused_with_those_that_can(tmp_path: Path, told: str) -> None:
    async def test(served: Instance) -> None:
        body = {"user": "u", "length": 0, "candidates": [1]}
        reply = await served.post("/v1/rank", body, x_relaygr_deadline_ms=told)
        assert (reply.status_code, reply.json()["field"]) == (400, "x-relaygr-deadline-ms")
        assert "at least 0 and below 1e9" in reply.json()["message"]

    run(tmp_path, test)


def test_a_compressed_body_is_refused_by_the_header_that_says_so(tmp_path: Path) -> None:
    async def test(served: Instance) -> None:
        body = {"user": "u", "length": 0, "candidates": [1]}
        reply = await served.post("/v1/rank", body, content_encoding="gzip")
        assert (reply.status_code, reply.json()["field"]) == (415, "content-encoding")
        assert (await served.post("/v1/rank", body, content_encoding="identity")).status_code == 200

    run(tmp_path, test)


def test_other_paths_methods_types_and_sizes_are_refused_as_documented(tmp_path: Path) -> None:
    async def test(served: Instance) -> None:
        assert (await served.client.get("/nothing")).status_code == 404
        assert (await served.client.get("/v1/rank")).status_code == 405
        plain = await served.client.post("/v1/rank", content=b"x", headers={"content-type": "text/plain"})
        assert plain.status_code == 415
        large = await served.client.post(
            "/v1/rank", content=bytes(MAX_BODY + 1), headers={"content-type": Encoding.JSON}
        )
        assert (large.status_code, large.json()["field"]) == (413, "body")
        assert (
            await served.post("/v1/rank", {"user": "u", "length": 0, "candidates": [1]}, x_relaygr_deadline_ms="soon")
        ).status_code == 400
        assert (
            await served.post("/v1/rank", {"user": "u", "length": 0, "candidates": [1]}, x_relaygr_deadline_ms="0")
        ).status_code == 504

    run(tmp_path, test)


def test_draining_refuses_new_work_and_says_so(tmp_path: Path) -> None:
    async def test(served: Instance) -> None:
        assert (await served.client.get("/readyz")).status_code == 200
        served.app.draining = True
        reply = await served.post("/v1/rank", {"user": "u", "length": 0, "candidates": [1]})
        assert reply.status_code == 503
        assert reply.headers["retry-after"]
        assert (await served.client.get("/readyz")).status_code == 503
        assert (await served.client.get("/healthz")).status_code == 200

    run(tmp_path, test)


def test_a_device_that_keeps_failing_is_unavailable_not_wrong(tmp_path: Path) -> None:
    async def test(served: Instance) -> None:
        served.executor.active = True
        reply = await served.post("/v1/rank", {"user": "u", "behaviours": behaviours(HISTORY), "candidates": [1]})
        assert reply.status_code == 503
        served.executor.active = False
        assert (await served.post("/v1/rank", {"user": "u", "length": 0, "candidates": [1]})).status_code == 200

    run(tmp_path, test)


def test_many_at_once_get_their_own_answers(tmp_path: Path) -> None:
    async def test(served: Instance) -> None:
        async def one(user: int) -> None:
            history = HISTORY[: 20 * user + 1]
            items = [user, user + 1]
            body = {"user": f"u{user % 5}", "behaviours": behaviours(history), "candidates": items}
            reply = await served.post("/v1/rank", body)
            assert_scores(np.array(reply.json()["scores"]), oracle_scores(MODEL, history, np.array(items)))

        await asyncio.gather(*(one(user) for user in range(20)))
        assert served.engine.status().ranks_under_way == 0

    run(tmp_path, test)


def test_a_store_that_is_gone_asks_for_the_whole_history_and_what_is_cached_does_not_need_it(tmp_path: Path) -> None:
    async def test(served: Instance) -> None:
        body = {**by_digest(20), "candidates": ITEMS.tolist(), "request": [0.5, 1.0]}
        assert served.app._store is not None
        served.app._store.close()
        asked = await served.post("/v1/rank", body)
        assert asked.status_code == 409
        assert "closed" in asked.json()["message"]
        assert "send the whole history" in asked.json()["message"]
        whole = {"user": "u", "behaviours": behaviours(HISTORY), "candidates": ITEMS.tolist(), "request": [0.5, 1.0]}
        assert (await served.post("/v1/rank", whole)).status_code == 200
        cached = await served.post("/v1/rank", body)
        assert (cached.status_code, cached.json()["path"]) == (200, "RESIDENT")
        right = oracle_scores(MODEL, HISTORY, ITEMS, request=np.array([0.5, 1.0], np.float32))
        assert_scores(np.array(cached.json()["scores"]), right)

    run(tmp_path, test, stored=380)


def test_a_store_that_is_too_busy_asks_for_the_whole_history_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(served: Instance) -> None:
        def busy(user: str, *, start: int = 0) -> History:
            raise Overloaded("it has as many readers as it takes")

        monkeypatch.setattr(served.app._store, "read", busy)
        asked = await served.post("/v1/rank", {**by_digest(20), "candidates": ITEMS.tolist(), "request": [0.5, 1.0]})
        assert asked.status_code == 409
        assert "send the whole history" in asked.json()["message"]

    run(tmp_path, test, stored=380)
