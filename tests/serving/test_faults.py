"""What machines do to servers: a gateway is restarted, disks and memory run out, clocks jump.

Right answers, or a clear refusal; and all is well again when the machine is.
"""

import contextlib
import random
import re
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from engines import in_virtual_time
from fleet import fleet
from relaygr import History
from relaygr.engine.simulated import SimulatedModel, simulated_scores
from relaygr.history import LmdbStore
from simulated_servers import Server, servers, started

SOURCE = Path(__file__).parents[2] / "src" / "relaygr"


def behaviours(first: int, count: int = 1) -> list[dict[str, int]]:
    return [{"item": 3, "action": 1, "timestamp": 2**33 + first + number} for number in range(count)]


def assert_right(answer: dict[str, Any], history: History) -> None:
    """Its scores are those of all of this history, computed at once."""
    assert answer["used"] == len(history)
    items = np.array([item["item"] for item in answer["items"]])
    scores = np.array([item["score"] for item in answer["items"]], np.float32)
    np.testing.assert_array_equal(simulated_scores(SimulatedModel(), history, items)[:, 0], scores)


@contextlib.contextmanager
def limited(server: Server, what: int, limit: int) -> Iterator[None]:
    """A process that may have no more than this of something, for a while."""
    before = resource.prlimit(server.process.pid, what)
    resource.prlimit(server.process.pid, what, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(server.process.pid, what, before)


def test_a_gateway_killed_at_seeded_moments_loses_nothing_acknowledged_and_answers_right_again(tmp_path: Path) -> None:
    draw, stored = random.Random(0), 500
    with servers(tmp_path) as running, contextlib.ExitStack() as stack:
        gateway = running["gateway"]
        for _ in range(2):
            with httpx.Client(base_url=gateway.address, timeout=60) as client:
                for _ in range(draw.randrange(1, 10)):
                    body = {"user": "user-1", "behaviours": behaviours(stored)}
                    assert client.post("/v1/behaviours", json=body).json()["length"] == stored + 1
                    stored += 1
                gateway.process.send_signal(signal.SIGKILL)
                gateway.process.wait()
                with contextlib.suppress(httpx.TransportError):
                    refused = client.post("/v1/recommend", json={"user": "user-1"})
                    assert refused.status_code == 503
            gateway = started("gateway", tmp_path / "relaygr.toml", stack)
            with LmdbStore(tmp_path / "store", readonly=True) as store:
                history = store.read("user-1")
            assert len(history) == stored
            answer = httpx.post(f"{gateway.address}/v1/recommend", json={"user": "user-1", "k": 5}, timeout=60).json()
            assert_right(answer, history)
            assert answer["path"] in ("RESIDENT", "EXTENDED", "FULL", "WAITED")


def test_while_the_disk_is_full_appends_are_refused_and_everything_else_goes_on(tmp_path: Path) -> None:
    with servers(tmp_path) as running, httpx.Client(base_url=running["gateway"].address, timeout=60) as client:

        def append(count: int, first: int) -> httpx.Response:
            body = {"user": "user-1", "behaviours": behaviours(first, count)}
            return client.post("/v1/behaviours", json=body)

        size = (tmp_path / "store" / "data.mdb").stat().st_size
        full, stored = 0, 500
        with limited(running["gateway"], resource.RLIMIT_FSIZE, size):
            for turn in range(40):
                reply = append(200, 1000 * turn)
                if reply.status_code == 200:  # pages that were free before
                    stored += 200
                    continue
                full += 1
                assert reply.status_code == 503, reply.text
                assert "full" in reply.json()["message"]
                answer = client.post("/v1/recommend", json={"user": "user-1", "k": 5})
                assert (answer.status_code, answer.json()["used"]) == (200, stored)
        assert full > 10
        assert append(200, 10**6).json()["length"] == stored + 200
        answer = client.post("/v1/recommend", json={"user": "user-1", "k": 5}).json()
        with LmdbStore(tmp_path / "store", readonly=True) as store:
            assert_right(answer, store.read("user-1"))


def test_out_of_memory_a_server_refuses_and_serves_again_when_there_is_some(tmp_path: Path) -> None:
    with servers(tmp_path) as running:
        instance = running["instance"]
        with httpx.Client(base_url=instance.address, timeout=60) as client:
            small = {"user": "user-9", "length": 0, "candidates": [5, 6, 7]}
            n = 300_000
            columns = {"items": np.ones(n, np.int64).tobytes(), "actions": np.ones(n, np.int32).tobytes()}
            large = {
                "user": "user-9",
                "behaviours": {**columns, "timestamps": np.arange(n, dtype=np.int64).tobytes()},
                "candidates": np.arange(3).tobytes(),
            }
            encoded, packed = msgspec.msgpack.encode(large), {"content-type": "application/msgpack"}
            assert client.post("/v1/rank", json=small).status_code == 200
            with limited(instance, resource.RLIMIT_AS, _virtual(instance) + 2**20):
                for _ in range(20):
                    try:
                        reply = client.post("/v1/rank", content=encoded, headers=packed)
                    except httpx.TransportError:
                        continue  # not even the connection could be had
                    assert reply.status_code in (429, 503) or b"max_history" in reply.content, reply.content
                assert client.post("/v1/rank", json=small).status_code in (200, 429, 503)
            assert client.post("/v1/rank", json=small).status_code == 200
            refused = client.post("/v1/rank", content=encoded, headers=packed)
            assert refused.status_code == 400
            assert b"max_history" in refused.content, "it is too long, but it was read"


def _virtual(server: Server) -> int:
    found = re.search(r"VmSize:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@in_virtual_time
async def test_clocks_that_jump_change_no_answer_and_no_deadline() -> None:
    answers = []
    for jumps in (False, True):
        draw = random.Random(1)
        with tempfile.TemporaryDirectory() as folder:

            def wall(jumps: bool = jumps, draw: random.Random = draw) -> float:
                return 1.8e9 + (draw.uniform(-1e9, 1e9) if jumps else 0.0)

            async with fleet(Path(folder), wall_time=wall) as running:
                for user in range(6):
                    n = 1000 * (user + 1)
                    running.store_history(f"u{user}", History(np.arange(n), np.ones(n, np.int32), np.arange(n)))
                began = running.now
                found = [await running.recommend(f"u{visit % 6}") for visit in range(24)]
                assert not running.refused
                assert running.now - began == pytest.approx(2.42038)
                answers.append([(one.items, one.path, one.decision, one.instance) for one in found if one])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 24


def test_the_time_of_day_is_read_for_features_and_new_data_alone() -> None:
    reading = {str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py") if "time.time" in file.read_text()}
    assert reading == {"cascade/pipeline.py", "lab/soak.py", "lab/traffic.py", "serving/provision.py"}
