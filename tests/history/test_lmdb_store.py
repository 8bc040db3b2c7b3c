"""What is LMDB's own: damage is found, maps grow, forks are survived, other layouts are refused."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import store_processes
from behaviours import numbered
from relaygr.errors import InvalidInput, RelayError, Unavailable
from relaygr.history import PAGE, History, LmdbStore, StoreCorrupt, StoreError, StoreFull
from relaygr.history.lmdb_records import NAMES
from relaygr.history.records import BLOCK

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "store"


def fill(path: Path, length: int = BLOCK * PAGE + PAGE + 9) -> History:
    history = numbered(length)
    with LmdbStore(path) as store:
        store.append("u", history.items, history.actions, history.timestamps)
        store.append("v", history.items + 1, history.actions, history.timestamps)
    return history


def raw(path: Path) -> Any:
    return lmdb.open(str(path), map_size=64 * MIB, max_dbs=8)


def records(path: Path, name: str) -> dict[bytes, bytes]:
    with raw(path) as env, env.begin(db=env.open_db(name.encode(), create=False)) as txn:
        return dict(txn.cursor())


def rewrite(path: Path, name: str, key: bytes, value: bytes | None) -> None:
    with raw(path) as env, env.begin(db=env.open_db(name.encode(), create=False), write=True) as txn:
        txn.delete(key) if value is None else txn.put(key, value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", ["gone", "empty", "short", "long", "flipped", "swapped"])
def test_a_damaged_record_is_never_read_as_a_history(path: Path, name: str, damage: str) -> None:
    history = fill(path)
    stored = records(path, name)
    keys = sorted(stored)
    ours, theirs = keys[0], keys[-1]
    good = stored[ours]
    value = {
        "gone": None,
        "empty": b"",
        "short": good[:-1],
        "long": good + b"\0",
        "flipped": bytes([good[0] ^ 1]) + good[1:],
        "swapped": stored[theirs],
    }[damage]
    rewrite(path, name, ours, value)
    with LmdbStore(path) as store:
        if name == "users" and damage == "gone":
            assert store.read("u") == History.empty()
            return
        with pytest.raises(StoreCorrupt, match=r"user 'u' .*damaged"):
            store.read("u")
        assert store.read("v").items.tolist() == (history.items + 1).tolist()
        # A correction repairs it, and leaves the others as they were.
        assert store.replace("u", history.items, history.actions, history.timestamps) == len(history)
        assert store.read("u") == history
        assert store.digest("u") == history.digest()
        assert store.read("v").items.tolist() == (history.items + 1).tolist()
        assert store.delete("u") is True


def test_any_flipped_bit_is_found(path: Path) -> None:
    history = fill(path, 2 * PAGE + 5)
    stored = {name: sorted(records(path, name).items()) for name in NAMES}
    new = numbered(3, first=len(history))

    @given(st.sampled_from(NAMES), st.integers(0, 10**6), st.integers(0, 10**6))
    def holds(name: str, record: int, bit: int) -> None:
        key, good = stored[name][record % len(stored[name])]
        bad = bytearray(good)
        bad[bit // 8 % len(good)] ^= 1 << bit % 8
        rewrite(path, name, key, bytes(bad))
        with LmdbStore(path, durable=False) as store:
            answers = []
            for user, expected in (("u", history), ("v", History(history.items + 1, *_rest(history)))):
                for call, right in (
                    (partial(store.read, user), expected),
                    (partial(store.read, user, 5), expected[-5:]),
                    (partial(store.digest, user), expected.digest()),
                    (partial(store.digest, user, 200), expected.digest(200)),
                    (partial(store.length, user), len(expected)),
                ):
                    try:
                        assert call() == right
                    except StoreCorrupt:
                        answers.append(call)
            assert answers
            for user in "uv":
                try:
                    store.append(user, new.items, new.actions, new.timestamps)
                except StoreCorrupt:
                    continue
                store.replace(user, history.items + (user == "v"), *_rest(history))
        for name_, pairs in stored.items():
            for found in records(path, name_).keys() - {key for key, _ in pairs}:
                rewrite(path, name_, found, None)
            for key, good in pairs:
                rewrite(path, name_, key, good)

    holds()


def _rest(history: History) -> tuple[Any, Any]:
    return history.actions, history.timestamps


def test_a_file_cut_short_is_refused(path: Path) -> None:
    fill(path)
    with (path / "data.mdb").open("r+b") as file:
        file.truncate(16384)
    with pytest.raises(StoreCorrupt, match="cut short"):
        LmdbStore(path)


def test_a_file_of_something_else_is_refused(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "data.mdb").write_bytes(b"something else entirely " * 1000)
    with pytest.raises(StoreError):
        LmdbStore(path)
    with pytest.raises(StoreError):
        LmdbStore(path, readonly=True)


@pytest.mark.parametrize("readonly", [False, True])
def test_another_database_is_refused_and_left_alone(path: Path, readonly: bool) -> None:
    path.mkdir(parents=True)
    with raw(path) as env, env.begin(write=True, db=env.open_db(b"theirs")) as txn:
        txn.put(b"a", b"b")
    with pytest.raises(StoreError, match="not one of histories"):
        LmdbStore(path, readonly=readonly)
    with raw(path) as env, env.begin() as txn:
        assert [key for key, _ in txn.cursor()] == [b"theirs"]


@pytest.mark.parametrize("readonly", [False, True])
def test_another_layout_is_refused_in_a_sentence(path: Path, readonly: bool) -> None:
    fill(path)
    rewrite(path, "info", b"layout", b"relaygr history 9")
    with pytest.raises(StoreError, match="'relaygr history 9', but this version reads only 'relaygr history 1'"):
        LmdbStore(path, readonly=readonly)
    rewrite(path, "info", b"layout", b"relaygr history 1")
    LmdbStore(path, readonly=readonly).close()


def test_a_full_map_says_so_and_keeps_what_was_stored(path: Path) -> None:
    new = numbered(PAGE)

    def append_until_full(store: LmdbStore, stored: list[str]) -> None:
        for number in count(len(stored)):
            store.append(f"u{number}", *_columns(new))
            stored.append(f"u{number}")

    stored: list[str] = []
    with LmdbStore(path, MIB, durable=False) as store:
        with pytest.raises(StoreFull, match="larger map_size"):
            append_until_full(store, stored)
        assert len(stored) > 100
        assert set(store.users()) == set(stored)
        assert all(store.read(user) == new for user in stored)
    before = len(stored)
    with LmdbStore(path, 4 * MIB, durable=False) as store:
        with pytest.raises(StoreFull, match="larger map_size"):
            append_until_full(store, stored)
        assert len(stored) > 3 * before
        assert set(store.users()) == set(stored)


def test_a_map_that_another_process_enlarged_is_followed(path: Path) -> None:
    new = numbered(10)
    with LmdbStore(path, MIB, durable=False) as store, store_processes.processes(1) as pool:
        store.append("before", new.items, new.actions, new.timestamps)
        larger = partial(LmdbStore, path, 64 * MIB, durable=False)
        pool.submit(store_processes.append_numbered, larger, ["u"], 200_000).result()
        assert store.read("u") == numbered(200_000)
        assert store.read("before") == new
        assert store.append("before", *_columns(numbered(5, first=10))) == 15


def test_a_store_goes_through_forks(path: Path) -> None:
    opener = partial(LmdbStore, path, durable=False)
    with store_processes.processes(1) as pool:
        length = pool.submit(store_processes.append_through_fork, opener, "u").result()
    assert length == 11 * (1 + 2 * 40)
    with opener() as store:
        assert store.read("u") == numbered(length)


def test_forks_wait_for_threads_that_read(path: Path) -> None:
    opener = partial(LmdbStore, path, durable=False)
    with store_processes.processes(1) as pool:
        assert pool.submit(store_processes.fork_while_reading, opener, "u", 20).result() == 20


GROW = """
import lmdb, sys
with lmdb.open(sys.argv[1], map_size=64 << 20, max_dbs=8) as env:
    with env.begin(write=True) as txn:
        txn.put(b"more", bytes(1 << 20))
    with env.begin(write=True) as txn:
        txn.delete(b"more")
"""


class Growing:
    """An environment of a database to which another process writes whenever somebody has looked at it."""

    def __init__(self, env: Any, grow: Callable[[], None]) -> None:
        self._env = env
        self._grow = grow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def info(self) -> Any:
        told = self._env.info()
        self._grow()
        return told


@pytest.mark.parametrize("readonly", [False, True])
def test_a_database_that_grows_while_it_is_opened_is_whole(
    path: Path, readonly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = fill(path)
    opened, stat = lmdb.open, Path.stat

    def grow() -> None:
        subprocess.run([sys.executable, "-c", GROW, str(path)], check=True)

    def looked(file: Path, **more: Any) -> os.stat_result:
        found = stat(file, **more)
        if file.name == "data.mdb":
            grow()
        return found

    monkeypatch.setattr(lmdb, "open", lambda *args, **more: Growing(opened(*args, **more), grow))
    monkeypatch.setattr(Path, "stat", looked)
    with LmdbStore(path, readonly=readonly) as store:
        assert store.read("u") == history


def test_a_database_is_opened_once_in_a_process(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path, target_is_directory=True)
    with LmdbStore(path) as store:
        for again in (path, str(path), tmp_path / "link"):
            with pytest.raises(Unavailable, match="already open in this process"):
                LmdbStore(again)
        assert store.length("u") == 0
    LmdbStore(path).close()


def test_a_store_that_nobody_closed_can_be_opened_again(path: Path) -> None:
    LmdbStore(path).append("u", [1], [1], [1])
    with LmdbStore(path) as store:
        assert store.length("u") == 1


def test_a_reader_cannot_write(path: Path) -> None:
    with pytest.raises(Unavailable):
        LmdbStore(path, readonly=True)
    history = fill(path)
    with LmdbStore(path, readonly=True) as store:
        assert store.read("u") == history
        for write in (
            partial(store.append, "u", [1], [1], [10**9]),
            partial(store.replace, "u", [1], [1], [10**9]),
            partial(store.delete, "u"),
        ):
            with pytest.raises(StoreError, match="only for reading"):
                write()
        assert store.read("u") == history


def test_a_path_that_cannot_be_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(Unavailable):
        LmdbStore(tmp_path / "file")


@pytest.mark.parametrize("map_size", [0, -1, 1000, 1.5, "1GiB"])
def test_a_map_that_cannot_be_is_refused(path: Path, map_size: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^map_size: "):
        LmdbStore(path, map_size)
    assert not path.exists()


def test_an_append_writes_no_more_for_a_long_history(path: Path) -> None:
    def written(length: int) -> int:
        with LmdbStore(path / str(length), durable=False) as store:
            history = numbered(length)
            store.append("u", *_columns(history))
        before = {name: records(path / str(length), name) for name in NAMES}
        with LmdbStore(path / str(length), durable=False) as store:
            store.append("u", *_columns(numbered(1, first=length)))
        after = {name: records(path / str(length), name) for name in NAMES}
        changed = [value for name in NAMES for key, value in after[name].items() if before[name].get(key) != value]
        return sum(map(len, changed))

    assert written(100 * PAGE + 5) == written(5)


def test_numbers_of_forgotten_users_are_free_again(path: Path) -> None:
    with LmdbStore(path, durable=False) as store:
        for _ in range(3):
            store.append_many({user: numbered(300, salt=ord(user)) for user in "abc"})
            for user in "cab":
                assert store.delete(user)
    assert all(not records(path, name) for name in NAMES)


def test_every_error_is_one_of_ours() -> None:
    assert all(issubclass(error, RelayError) for error in (StoreError, StoreCorrupt, StoreFull))


def _columns(history: History) -> Iterator[np.ndarray[Any, Any]]:
    return iter((history.items, history.actions, history.timestamps))
