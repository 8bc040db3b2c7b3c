"""An instance told to stop while it works: what was accepted is finished, new work refused, and it ends in time."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import msgspec
import numpy as np

from relaygr import build_model
from relaygr.model import checkpoint

BEHAVIOURS, CANDIDATES, RANKS = 6000, 64, 4
DRAIN_S = 60.0


def test_sigterm_finishes_what_was_accepted_refuses_new_work_and_ends(tmp_path: Path) -> None:
    model = build_model("hstu", layers=2, dim=64, heads=2, items=1000, seed=0)
    checkpoint.save(model, tmp_path / "model")
    (tmp_path / "file").write_text(f"[instance]\nport = 0\nthreads = 1\ndrain_s = {DRAIN_S}\n")
    command = [sys.executable, "-m", "relaygr", "serve", "instance", "--config", str(tmp_path / "file")]
    with subprocess.Popen([*command, "--model", str(tmp_path / "model")], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            serves = re.search(r"serves on (\S+)", process.stdout.readline())
            assert serves
            _drain(process, serves[1])
        finally:
            process.kill()


def _drain(process: "subprocess.Popen[str]", address: str) -> None:
    draw = np.random.default_rng(0)
    behaviours = {
        "items": draw.integers(0, 1000, BEHAVIOURS).tolist(),
        "actions": [1] * BEHAVIOURS,
        "timestamps": list(range(BEHAVIOURS)),
    }
    statuses: list[int] = []

    def rank(user: int) -> None:
        body = {"user": f"u{user}", "behaviours": behaviours, "candidates": list(range(CANDIDATES))}
        statuses.append(httpx.post(f"{address}/v1/rank", json=body, timeout=DRAIN_S).status_code)

    with httpx.Client(base_url=address, timeout=DRAIN_S) as client:
        assert client.get("/readyz").status_code == 200
        ranks = [threading.Thread(target=rank, args=(user,)) for user in range(RANKS)]
        for thread in ranks:
            thread.start()
        until = time.monotonic() + DRAIN_S
        while msgspec.json.decode(client.get("/v1/status").content)["engine"]["ranks_under_way"] < RANKS:
            assert time.monotonic() < until
            assert len(statuses) == 0, "they are meant to take a while"
        process.send_signal(signal.SIGTERM)
        while client.get("/readyz").status_code == 200:
            assert time.monotonic() < until
        assert not statuses, "they are under way"
        refused = client.post("/v1/rank", json={"user": "late", "length": 0, "candidates": [1]})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
    for thread in ranks:
        thread.join()
    assert statuses == [200] * RANKS
    assert process.wait(timeout=DRAIN_S) == 0
    host, _, port = address.removeprefix("http://").rpartition(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0
