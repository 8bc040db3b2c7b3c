"""Writers wait for each other, and can be called back from that."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relaygr.errors import Unavailable
from relaygr.history import LmdbStore, lmdb_environment
from relaygr.history.writer_lock import WriterLock
from writing import a_writer_that_stays


def test_one_thread_holds_it_at_a_time(tmp_path: Path) -> None:
    locks = [WriterLock(tmp_path / "lock") for _ in range(2)]  # as two processes have
    inside, most = 0, 0
    guard = threading.Lock()

    def work(number: int) -> None:
        nonlocal inside, most
        with locks[number % 2].held():
            with guard:
                inside += 1
                most = max(most, inside)
            with guard:
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(400)))
    assert (inside, most) == (0, 1)


def test_who_waits_is_called_back_by_close_and_readers_never_wait(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with LmdbStore(path) as store, ThreadPoolExecutor(2) as pool:
        store.append("u", [1], [1], [1])
        with a_writer_that_stays(path):
            waiting = [pool.submit(store.append, "u", [2], [1], [2]) for _ in range(2)]
            assert store.length("u") == 1
            assert not any(append.done() for append in waiting)
            store.close()
            for append in waiting:
                with pytest.raises(Unavailable, match="closed"):
                    append.result(timeout=60)
    with LmdbStore(path) as store:
        assert store.length("u") == 1


def test_who_waits_goes_on_when_the_other_dies(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with LmdbStore(path) as store, ThreadPoolExecutor(1) as pool, a_writer_that_stays(path) as other:
        waiting = pool.submit(store.append, "u", [2], [1], [2])
        other.kill()
        assert waiting.result(timeout=60) == 1


def test_opening_does_not_wait_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_environment, "OPEN_S", 0.0)
    with LmdbStore(tmp_path / "store"):
        pass
    with a_writer_that_stays(tmp_path / "store"):
        with pytest.raises(Unavailable, match="another process writes"):
            LmdbStore(tmp_path / "store")
        with LmdbStore(tmp_path / "store", readonly=True) as store:
            assert store.length("u") == 0


def test_a_process_can_fork_while_a_write_waits(tmp_path: Path) -> None:
    path = tmp_path / "store"
    code = """
import os, sys, threading
from relaygr.history import LmdbStore
with LmdbStore(sys.argv[1]) as store:
    print("open", flush=True)
    sys.stdin.readline()
    waiting = threading.Thread(target=store.append, args=("u", [1], [1], [1]))
    waiting.start()
    child = os.fork()
    if not child:
        os._exit(0)
    print(os.waitpid(child, 0)[1], waiting.is_alive(), flush=True)
    waiting.join()
    print(store.length("u"))
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forking:
        assert forking.stdin is not None
        assert forking.stdout is not None
        assert forking.stdout.readline() == "open\n"
        with a_writer_that_stays(path) as other:
            forking.stdin.write("\n")
            forking.stdin.flush()
            assert forking.stdout.readline() == "0 True\n"
            other.kill()
            assert forking.stdout.readline() == "1\n"
