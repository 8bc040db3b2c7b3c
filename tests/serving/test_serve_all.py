"""`relaygr serve all`, as a user starts it: real processes, killed and stopped."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest


class Served:
    """The running command and a client for its gateway, which does not retry."""

    def __init__(self, process: "subprocess.Popen[str]", address: str, folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.client = httpx.Client(base_url=address, timeout=60)

    def recommend(self, user: str, k: int = 3) -> dict[str, Any]:
        reply = self.client.post("/v1/recommend", json={"user": user, "k": k})
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.get("/v1/status").json()
        return answer


def descendants(pid: int) -> dict[int, str]:
    """Processes below this one, with their command lines."""
    found: dict[int, str] = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
        found |= descendants(int(child))
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    command = [sys.executable, "-m", "relaygr", "serve", "all", "--port", "0", "--instances", "2"]
    command += ["--ranking-budget-ms", "20000", "--pipeline-budget-ms", "50000"]  # nothing here is about time
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            [*command, "--data-dir", str(folder / "data")], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"gateway serves on (\S+)", line)
        assert match, (folder / "stderr").read_text()
        running = Served(process, match[1], folder)
        try:
            yield running
        finally:
            running.client.close()
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_recommendation_names_items_path_instance_and_the_time_of_every_stage(served: Served) -> None:
    answer = served.recommend("user-7")
    assert len(answer["items"]) == 3
    assert set(answer["items"][0]) == {"item", "score", "title"}
    assert answer["instance"] in ("slot-0", "slot-1")
    assert set(answer["stages_ms"]) == {"retrieval", "pre_processing", "ranking", "total"}
    scores = [item["score"] for item in answer["items"]]
    assert scores == sorted(scores, reverse=True)


def test_an_unknown_user_is_an_empty_history(served: Served) -> None:
    answer = served.recommend("nobody yet")
    assert answer["used"] == 0
    assert answer["items"]


def test_behaviours_are_seen_by_the_next_request(served: Served) -> None:
    before = served.recommend("user-9")
    chosen = before["items"][0]["item"]
    behaviour = {"item": chosen, "action": 1, "timestamp": 4_000_000_000}
    reply = served.client.post("/v1/behaviours", json={"user": "user-9", "behaviours": [behaviour]})
    assert reply.status_code == 200
    after = served.recommend("user-9")
    assert chosen not in [item["item"] for item in after["items"]]


def one(item: int, action: int, timestamp: int) -> dict[str, Any]:
    return {"user": "u", "behaviours": [{"item": item, "action": action, "timestamp": timestamp}]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/recommend", {"user": ""}, "user"),
        ("/v1/recommend", {"user": "u", "k": 0}, "k"),
        ("/v1/recommend", {"k": 3}, "user"),
        ("/v1/behaviours", {"user": "u", "behaviours": []}, "behaviours"),
        ("/v1/behaviours", {"user": "u", "behaviours": [{"item": 1, "action": 1}]}, "behaviours.timestamp"),
        ("/v1/behaviours", one(-1, 1, 1), "behaviours.item"),
        ("/v1/behaviours", one(2**63, 1, 1), "behaviours.item"),
        ("/v1/behaviours", one(1, 16, 1), "behaviours.action"),
        ("/v1/behaviours", one(1, -1, 1), "behaviours.action"),
        ("/v1/behaviours", one(1, 1, 10**12), "behaviours.timestamp"),
    ],
)
def test_bad_input_gets_a_4xx_that_names_the_field(served: Served, path: str, body: Any, field: str) -> None:
    reply = served.client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["field"] == field


def test_behaviours_that_are_refused_do_not_stand_in_the_way_of_the_next_request(served: Served) -> None:
    behaviours = [{"item": 1, "action": 1, "timestamp": 1}, {"item": 1, "action": 99, "timestamp": 2}]
    reply = served.client.post("/v1/behaviours", json={"user": "u-bad", "behaviours": behaviours})
    assert reply.status_code == 400
    assert served.recommend("u-bad")["used"] == 0


def test_a_second_one_is_refused_on_the_same_folder(served: Served) -> None:
    command = [
        sys.executable,
        "-m",
        "relaygr",
        "serve",
        "all",
        "--port",
        "0",
        "--data-dir",
        str(served.folder / "data"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "choose another --data-dir" in " ".join(ended.stderr.split())
    assert served.recommend("user-7")["items"]


def test_a_killed_instance_fails_no_request_and_then_everything_stops_cleanly(served: Served) -> None:
    owner = served.recommend("user-11")["instance"]
    below = descendants(served.process.pid)
    victim = next(pid for pid, command in below.items() if f"--slot {owner} " in command)
    os.kill(victim, signal.SIGKILL)
    for user in range(20):
        served.recommend(f"user-{user}")
    assert served.recommend("user-11")["instance"] is not None
    told = (served.folder / "stderr").read_text()
    assert f"{owner} was ended by SIGKILL; it is started again" in told
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(timeout=60) == 0
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists() and _state(pid) != "Z"]


def test_a_port_in_use_is_said_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [
            sys.executable,
            "-m",
            "relaygr",
            "serve",
            "all",
            "--port",
            port,
            "--data-dir",
            str(tmp_path / "data"),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "choose another --port" in " ".join(ended.stderr.split())
    assert not (tmp_path / "data").exists()


def test_a_file_where_a_folder_is_wanted_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    command = [sys.executable, "-m", "relaygr", "serve", "all", "--port", "0", "--data-dir", str(tmp_path / "data")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "data-dir" in ended.stderr
    assert "Traceback" not in ended.stderr


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
