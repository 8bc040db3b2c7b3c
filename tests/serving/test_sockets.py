"""An instance over real sockets: clients that go, clients that come together, and replies that do not wait for ACKs."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from held import HeldExecutor
from relaygr import Engine, EngineConfig, History, build_model
from relaygr.serving.client import HttpClient
from relaygr.serving.engine_server import serve_engine
from relaygr.serving.instance import InstanceApp
from relaygr.serving.link import EngineLink
from relaygr.serving.run import bind, listening

MODEL = build_model("hstu", layers=1, dim=16, heads=2, items=100, seed=0)
DRAW = np.random.default_rng(0)
HISTORY = History(DRAW.integers(0, 100, 400), DRAW.integers(0, 16, 400), np.arange(400) * 60)


class Served:
    def __init__(self, app: InstanceApp, engine: Engine, executor: HeldExecutor, client: HttpClient) -> None:
        self.app, self.engine, self.executor, self.client = app, engine, executor, client

    def rank(self, user: str) -> "asyncio.Task[Any]":
        body = {
            "user": user,
            "behaviours": {
                "items": HISTORY.items.tolist(),
                "actions": HISTORY.actions.tolist(),
                "timestamps": HISTORY.timestamps.tolist(),
            },
            "candidates": [5, 6, 7],
        }
        headers = {"content-type": "application/json"}
        return asyncio.create_task(self.client.request("POST", "/v1/rank", msgspec.json.encode(body), headers))

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():  # noqa: ASYNC110  (what is waited for is another side's state)
                await asyncio.sleep(0.001)


def run(folder: Path, test: Callable[[Served], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        ready, until = asyncio.Event(), asyncio.Event()
        executor = HeldExecutor()
        async with Engine(MODEL, EngineConfig(device_cache="8MiB", host_cache="0"), executor=executor) as engine:
            executor.tokens = 0
            serving = asyncio.create_task(serve_engine(engine, str(folder / "engine"), ready.set, until))
            await ready.wait()
            link = await EngineLink.connect(str(folder / "engine"))
            app = InstanceApp(link, None, "slot-0")
            async with listening(app, bind("127.0.0.1", 0)) as port:
                client = HttpClient("127.0.0.1", port)
                try:
                    await test(Served(app, engine, executor, client))
                finally:
                    executor.go.set()
                    client.close()
            await link.close()
            until.set()
            await serving

    asyncio.run(main())


def test_ten_ranks_of_one_user_at_once_cost_one_compute(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        served.executor.go.clear()
        ranks = [served.rank("u1") for _ in range(10)]
        await served.until(lambda: served.engine.status().ranks_under_way == 10)
        served.executor.go.set()
        paths = [msgspec.json.decode((await rank).body)["path"] for rank in ranks]
        assert sorted(paths) == ["FULL"] + ["WAITED"] * 9
        assert served.executor.tokens == 400
        assert served.engine.counts().sources == {"NOTHING": 1, "IN_FLIGHT": 9}

    run(tmp_path, test)


def test_a_client_that_goes_cancels_what_nobody_else_wants(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        served.executor.go.clear()
        other = served.rank("u2")
        await served.until(lambda: served.engine.status().steps_in_flight == 1)
        rank = served.rank("u1")
        await served.until(lambda: served.engine.status().ranks_under_way == 2)
        rank.cancel()
        await served.until(lambda: served.engine.status().ranks_under_way == 1)
        await served.until(lambda: served.app.busy == 1)
        assert served.app.requests["/v1/rank", 499] == 1
        served.executor.go.set()
        assert (await other).status == 200
        await served.until(lambda: served.engine.status().builds_under_way == 0)
        assert served.engine.status().device_prefixes == 1  # of u2 alone
        assert served.executor.tokens == 400

    run(tmp_path, test)


def test_a_client_that_goes_leaves_what_another_wants(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        served.executor.go.clear()
        first, second = served.rank("u1"), served.rank("u1")
        await served.until(lambda: served.engine.status().ranks_under_way == 2)
        first.cancel()
        await served.until(lambda: served.engine.status().ranks_under_way == 1)
        served.executor.go.set()
        assert (await second).status == 200
        assert served.executor.tokens == 400

    run(tmp_path, test)


def test_connections_do_not_wait_for_acknowledgements() -> None:
    with bind("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP  # asyncio sets TCP_NODELAY on connections of such sockets alone
