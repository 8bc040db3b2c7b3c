"""A gateway whose append waits for another writer: it serves on, ends when told to, and says what became of it."""

import signal
import threading
from pathlib import Path

import httpx

from simulated_servers import servers
from writing import a_writer_that_stays


def test_sigterm_while_an_append_waits_ends_the_gateway_and_the_append_gets_503(tmp_path: Path) -> None:
    behaviour = {"item": 3, "action": 1, "timestamp": 2**33}
    answers: list[httpx.Response] = []
    with (
        servers(tmp_path, gateway="drain_s = 0.5\n") as running,
        httpx.Client(base_url=running["gateway"].address, timeout=60) as client,
        a_writer_that_stays(tmp_path / "store"),
    ):

        def append() -> None:
            body = {"user": "user-1", "behaviours": [behaviour]}
            answers.append(client.post("/v1/behaviours", json=body))

        waiting = threading.Thread(target=append)
        waiting.start()
        while "relaygr_http_requests_under_way 2.0" not in client.get("/metrics").text:
            pass  # this scrape, and the append
        assert client.post("/v1/recommend", json={"user": "user-1", "k": 3}).status_code == 200
        assert not answers
        gateway = running["gateway"].process
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(timeout=30) == 0
        waiting.join(timeout=30)
        assert [answer.status_code for answer in answers] == [503]
        assert answers[0].headers["retry-after"]
