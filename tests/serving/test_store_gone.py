"""A gateway and an instance over Redis while it is killed, frozen and comes back: what was read before is served."""

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from optional import require
from redis_server import RedisServer, redis_server
from simulated_servers import servers, started

require("redis", "pip install 'relaygr[redis]'")


def kill(server: RedisServer) -> Callable[[], None]:
    server.kill()
    return server.start


def freeze(server: RedisServer) -> Callable[[], None]:
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    return lambda: server.process.send_signal(signal.SIGCONT) if server.process else None


@pytest.mark.parametrize("fault", [kill, freeze])
def test_while_the_store_is_gone_those_who_were_here_are_served_and_told_so(
    tmp_path: Path, fault: Callable[[RedisServer], Callable[[], None]]
) -> None:
    kept = ("--appendonly", "yes", "--appendfsync", "always")
    with (
        redis_server(tmp_path / "redis", *kept) as store,
        servers(tmp_path, store.url) as running,
        httpx.Client(base_url=running["gateway"].address, timeout=60) as client,
    ):

        def recommend(user: str) -> Any:
            return client.post("/v1/recommend", json={"user": user, "k": 3})

        def append(user: str) -> Any:
            body = {"user": user, "behaviours": [{"item": 3, "action": 1, "timestamp": 2**33}]}
            return client.post("/v1/behaviours", json=body)

        assert append("user-1").json()["length"] == 501
        before = recommend("user-1").json()
        assert (before["stale"], before["used"]) == (False, 501)
        back = fault(store)
        for _ in range(20):
            reply = recommend("user-1")
            assert reply.status_code == 200, reply.text
            assert (reply.json()["stale"], reply.json()["used"]) == (True, 501)
            assert reply.json()["items"] == before["items"]
        for refused in (recommend("user-2"), append("user-1")):
            assert refused.status_code == 503, refused.text
            assert refused.headers["retry-after"]
        assert "relaygr_stale_recommendations_total 20.0" in client.get("/metrics").text
        with contextlib.ExitStack() as stack:  # a server that starts meanwhile waits for the store with the rest
            again = started("instance", tmp_path / "relaygr.toml", stack)
            assert httpx.get(f"{again.address}/readyz").status_code == 200
        back()
        while (found := recommend("user-1").json())["stale"]:
            assert found["items"] == before["items"]
        assert found["used"] in (501, 502), "an append that was not answered may have been stored"
        while (stored := append("user-1")).status_code == 503:
            pass
        assert stored.json()["length"] == found["used"] + 1
