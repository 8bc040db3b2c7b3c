"""Operators' calls: a token or nothing, and what they do to the servers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from oracle import assert_scores, oracle_scores
from relaygr import Engine, EngineConfig, History, build_model
from relaygr.errors import InvalidInput, Unavailable
from relaygr.history import LmdbStore
from relaygr.model import checkpoint
from relaygr.relay import Membership
from relaygr.serving import admin_operations, openapi
from relaygr.serving.admin import (
    AdminApp,
    AdminSettings,
    Beside,
    evict_at_instance,
    evict_everywhere,
    swap_at_instance,
)
from relaygr.serving.engine_server import serve_engine
from relaygr.serving.instance import InstanceApp
from relaygr.serving.link import EngineLink
from relaygr.serving.run import bind, listening

MODEL = build_model("hstu", layers=1, dim=16, heads=2, items=100, seed=0)
OTHER = build_model("hstu", layers=1, dim=16, heads=2, items=100, seed=1)
DRAW = np.random.default_rng(0)
HISTORY = History(DRAW.integers(0, 100, 300), DRAW.integers(0, 16, 300), np.arange(300) * 60)
TOKEN = b"0123456789abcdef"
BEARER = {"authorization": f"Bearer {TOKEN.decode()}"}
BODY = {
    "user": "u1",
    "behaviours": {
        "items": HISTORY.items.tolist(),
        "actions": HISTORY.actions.tolist(),
        "timestamps": HISTORY.timestamps.tolist(),
    },
    "candidates": [5, 6, 7],
}


class Instance:
    def __init__(self, client: httpx.AsyncClient, app: InstanceApp, engine: Engine, address: str) -> None:
        self.client, self.app, self.engine, self.address = client, app, engine, address

    async def admin(self, call: str, body: Any = None, headers: Any = BEARER) -> httpx.Response:
        return await self.client.post(f"/v1/admin/{call}", json=body or {}, headers=headers)


@contextlib.asynccontextmanager
async def instance(folder: Path, token: bytes | None, slot: str = "slot-0") -> AsyncIterator[Instance]:
    ready, until = asyncio.Event(), asyncio.Event()
    async with Engine(MODEL, EngineConfig(device_cache="8MiB", host_cache="8MiB")) as engine:
        serving = asyncio.create_task(serve_engine(engine, str(folder / slot), ready.set, until))
        await ready.wait()
        link = await EngineLink.connect(str(folder / slot))
        app = InstanceApp(link, None, slot)
        admin = AdminApp(app, token, evict_at_instance(link, slot), swap_at_instance(link))
        async with listening(Beside(app, admin), bind("127.0.0.1", 0)) as port:
            address = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=address, timeout=60) as client:
                yield Instance(client, app, engine, address)
        await link.close()
        until.set()
        await serving


def run(folder: Path, test: Callable[[Instance], Coroutine[Any, Any, None]], token: bytes | None = TOKEN) -> None:
    async def main() -> None:
        async with instance(folder, token) as served:
            await test(served)

    asyncio.run(main())


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": TOKEN.decode()},
        {"authorization": f"Basic {TOKEN.decode()}"},
        {"authorization": f"Bearer {TOKEN.decode()}x"},
        {"authorization": f"Bearer {TOKEN.decode()[:-1]}"},
        [("authorization", f"Bearer {TOKEN.decode()}"), ("authorization", "Bearer x")],
    ],
)
def test_without_the_token_nothing_is_done_and_nothing_is_read(tmp_path: Path, headers: Any) -> None:
    async def test(served: Instance) -> None:
        await served.client.post("/v1/rank", json=BODY)
        for call, body in (("drain", {}), ("evict", {"user": "u1"}), ("swap", {"model": "/x"}), ("nothing", {})):
            reply = await served.admin(call, body, headers)
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
        large = await served.client.post("/v1/admin/evict", content=bytes(2**20), headers=headers)
        assert large.status_code == 401
        assert not served.app.draining
        assert served.engine.status().device_prefixes == 1

    run(tmp_path, test)


def test_where_no_token_is_set_there_are_no_such_calls(tmp_path: Path) -> None:
    async def test(served: Instance) -> None:
        for headers in ({}, BEARER, {"authorization": "Bearer"}, {"authorization": "Bearer None"}):
            reply = await served.admin("drain", headers=headers)
            assert reply.status_code == 403
            assert "token_file" in reply.json()["message"]
        assert not served.app.draining

    run(tmp_path, test, token=None)


def test_a_drain_refuses_new_work_until_it_is_ended(tmp_path: Path) -> None:
    async def test(served: Instance) -> None:
        assert (await served.admin("drain")).json() == {"draining": True}
        assert (await served.client.post("/v1/rank", json=BODY)).status_code == 503
        assert (await served.client.get("/readyz")).status_code == 503
        assert (await served.admin("drain", {"draining": False})).json() == {"draining": False}
        assert (await served.client.post("/v1/rank", json=BODY)).status_code == 200

    run(tmp_path, test)


def test_a_swapped_model_is_served_and_one_that_cannot_be_is_refused(tmp_path: Path) -> None:
    checkpoint.save(OTHER, tmp_path / "other.safetensors")
    (tmp_path / "not a model").write_text("no")

    async def test(served: Instance) -> None:
        before = served.engine.status().version
        for bad in ("/nowhere", str(tmp_path / "not a model"), ""):
            assert (await served.admin("swap", {"model": bad})).status_code in (400, 503), bad
        assert served.engine.status().version == before
        swapped = await served.admin("swap", {"model": str(tmp_path / "other.safetensors")})
        assert swapped.json() == {"version": served.engine.status().version, "epoch": 0}
        assert swapped.json()["version"] != before
        scores = (await served.client.post("/v1/rank", json=BODY)).json()["scores"]
        assert_scores(np.array(scores), oracle_scores(OTHER, HISTORY, [5, 6, 7]))

    run(tmp_path, test)


def test_whatever_is_wrong_with_a_body_is_told(tmp_path: Path) -> None:
    async def test(served: Instance) -> None:
        for call, body in (
            ("drain", {"draining": "yes"}),
            ("drain", {"other": 1}),
            ("evict", {}),
            ("evict", {"user": ""}),
            ("evict", {"user": "x" * 600}),
            ("swap", {}),
        ):
            assert (await served.admin(call, body)).status_code == 400, (call, body)
        assert (await served.admin("nothing")).status_code == 404
        assert (await served.client.get("/v1/admin/drain", headers=BEARER)).status_code == 405
        too_large = await served.client.post("/v1/admin/evict", content=bytes(2**20), headers=BEARER)
        assert too_large.status_code == 413

    run(tmp_path, test)


def test_evicting_everywhere_leaves_nothing_in_the_store_the_gateway_and_every_instance(tmp_path: Path) -> None:
    async def main() -> None:
        forgotten: list[str] = []
        with LmdbStore(tmp_path / "store", durable=False) as store:
            for user in ("u1", "u2"):
                store.append(user, HISTORY.items, HISTORY.actions, HISTORY.timestamps)
            async with instance(tmp_path, TOKEN, "slot-0") as one, instance(tmp_path, TOKEN, "slot-1") as two:
                membership = Membership()
                membership.add("slot-0", one.address)
                membership.add("slot-1", two.address)
                for served in (one, two):
                    for user in ("u1", "u2"):
                        assert (await served.client.post("/v1/rank", json={**BODY, "user": user})).status_code == 200
                evict = evict_everywhere(store, forgotten.append, membership, TOKEN)
                told = await evict("u1")
                assert told.stored is True
                assert set(told.prefixes) == {"slot-0", "slot-1"}
                assert all(told.prefixes.values())
                assert store.read("u1") == History.empty()
                assert store.read("u2") == HISTORY
                assert set(forgotten) == {"u1"}
                for served in (one, two):
                    assert served.engine.status().device_prefixes == 1
                    path = (await served.client.post("/v1/rank", json=BODY)).json()["path"]
                    assert path == "FULL"
                again = await evict("nobody")
                assert (again.stored, sum(again.prefixes.values())) == (False, 0)
                membership.add("slot-2", "http://127.0.0.1:1")
                with pytest.raises(Unavailable, match="slot-2"):
                    await evict("u2")
                membership.add("slot-2", two.address)  # a message that was carried elsewhere
                with pytest.raises(Unavailable, match=r"slot-2 \(slot-1 answered instead\)"):
                    await evict("u2")
                assert store.read("u2") == History.empty()
            refusing = evict_everywhere(store, forgotten.append, Membership(), b"")
            assert (await refusing("u2")).prefixes == {}

    asyncio.run(main())


def test_an_instance_that_does_not_take_the_token_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        with LmdbStore(tmp_path / "store", durable=False) as store:
            async with instance(tmp_path, TOKEN) as served:
                membership = Membership()
                membership.add("slot-0", served.address)
                with pytest.raises(Unavailable, match=r"slot-0 \(answered 401\)"):
                    await evict_everywhere(store, lambda user: None, membership, b"another token here")("u1")

    asyncio.run(main())


def test_a_token_comes_from_a_file_that_others_cannot_read(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert AdminSettings().token() is None
    with pytest.raises(InvalidInput, match=r"^admin.token_file: .*cannot be read"):
        AdminSettings(str(file)).token()
    file.write_bytes(TOKEN + b"\n")
    file.chmod(0o644)
    with pytest.raises(InvalidInput, match="chmod 600"):
        AdminSettings(str(file)).token()
    file.chmod(0o600)
    assert AdminSettings(str(file)).token() == TOKEN
    for bad in (b"", b"short", b"with a space in it", "nïcht in ASCII, aber lang".encode()):
        file.write_bytes(bad)
        with pytest.raises(InvalidInput, match="16 visible characters"):
            AdminSettings(str(file)).token()


def test_operators_calls_answer_what_the_document_says(tmp_path: Path) -> None:
    paths = json.loads(openapi.instance_document())["paths"]
    checkpoint.save(OTHER, tmp_path / "other")

    async def send(client: httpx.AsyncClient, path: str, **request: Any) -> int:
        reply = await client.post(path, **request)
        documented = paths[path]["post"]["responses"][str(reply.status_code)]
        assert reply.headers["content-type"] in documented["content"]
        own = {name for name in reply.headers if name in ("retry-after", "allow", "www-authenticate")}
        assert own == set(documented["headers"])
        return reply.status_code

    async def main() -> None:
        async with instance(tmp_path, TOKEN) as served, instance(tmp_path, None, "slot-1") as without:
            for operation in admin_operations.INSTANCE:
                assert paths[operation.path]["post"]["security"] == [{"token": []}]
                for body in operation.examples.values():
                    given = {"model": str(tmp_path / "other")} if "model" in body else body
                    assert await send(served.client, operation.path, json=given, headers=BEARER) == 200
                assert await send(served.client, operation.path, json={"x": 1}, headers=BEARER) == 400
                assert await send(served.client, operation.path, json={}) == 401
                assert await send(without.client, operation.path, json={}, headers=BEARER) == 403
                large = {"content": b"x" * 70_000, "headers": BEARER}
                assert await send(served.client, operation.path, **large) == 413
                odd = {"content": b"x", "headers": {**BEARER, "content-type": "text/plain"}}
                assert await send(served.client, operation.path, **odd) == 415

    asyncio.run(main())
