"""What is Redis's own: a server that is gone, slow or full, damage, other layouts, and how often it is asked."""

import contextlib
import importlib
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from behaviours import numbered
from optional import require
from redis_server import RedisServer, redis_server
from relaygr.errors import InvalidInput, Unavailable
from relaygr.history import PAGE, History, StoreCorrupt, StoreError, StoreFull, open_store

redis = require("redis", "pip install 'relaygr[redis]'")
module = importlib.import_module("relaygr.history.redis_store")
RedisStore = module.RedisStore


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as running:
        yield running


def fill(store: Any, user: str = "u", length: int = 70 * PAGE + 9, salt: int = 0) -> History:
    history = numbered(length, salt=salt)
    store.append(user, history.items, history.actions, history.timestamps)
    return history


def _counting(store: Any) -> list[Any]:
    """What the server is asked from now on."""
    asked, ask = [], store._asked

    def counted(question: Any) -> Any:
        asked.append(question)
        return ask(question)

    store._asked = counted
    return asked


@pytest.mark.parametrize("length", [5, 300, 70 * PAGE + 9])
def test_a_read_takes_two_questions_and_an_append_three_however_long_the_history_is(
    server: RedisServer, length: int
) -> None:
    with RedisStore(server.url, timeout_s=60.0) as store:
        fill(store, length=length)
        asked = _counting(store)
        store.read("u")
        assert len(asked) == 2
        new = numbered(3, first=length)
        store.append("u", new.items, new.actions, new.timestamps)
        assert len(asked) == 2 + 3


def test_many_users_are_appended_in_three_questions(server: RedisServer) -> None:
    with RedisStore(server.url, timeout_s=60.0) as store:
        for _ in range(2):
            users = {f"u{n}": numbered(200, salt=n) for n in range(50)}
            lengths = store.append_many({user: History(h.items, h.actions, [2**40] * 200) for user, h in users.items()})
        asked = _counting(store)
        store.append_many({user: History([1], [1], [2**40]) for user in users})
        assert len(asked) == 3
        assert set(lengths.values()) == {400}


class Watch:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.at = 1.0

    def __call__(self) -> float:
        return self.at


def test_a_server_that_is_gone_is_unavailable_and_asked_again_when_it_is_back(server: RedisServer) -> None:
    watch = Watch()
    with RedisStore(server.url, timeout_s=60.0, now=watch) as store:
        fill(store)
        server.kill()
        for _ in range(3):
            watch.at += module.QUIET_S
            with pytest.raises(Unavailable, match="cannot be reached"):
                store.read("u")
            with pytest.raises(Unavailable, match="a moment ago"):
                store.append("u", [1], [1], [2**40])
        server.start()
        with pytest.raises(Unavailable, match="a moment ago"):
            store.read("u")
        watch.at += module.QUIET_S
        assert store.read("u") == History.empty(), "it keeps nothing on disk here"
        assert store.append("u", [1], [1], [1]) == 1


def test_a_server_that_is_frozen_is_unavailable_within_the_timeout_and_then_at_once(server: RedisServer) -> None:
    assert server.process is not None
    watch = Watch()
    with RedisStore(server.url, timeout_s=0.05, now=watch) as store:
        server.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(Unavailable, match="does not answer"):
                store.read("u")
            with pytest.raises(Unavailable, match="a moment ago"):
                store.read("u")
        finally:
            server.process.send_signal(signal.SIGCONT)
    with RedisStore(server.url, timeout_s=60.0) as store:
        assert store.append("u", [1], [1], [1]) == 1


def test_a_write_whose_answer_was_lost_is_known_to_be_stored(server: RedisServer) -> None:
    watch = Watch()
    with RedisStore(server.url, timeout_s=60.0, now=watch) as store:
        store.append("u", [1], [1], [1])
        run = store._client.eval

        def unanswered(*arguments: Any) -> Any:
            run(*arguments)
            raise redis.ConnectionError("broke off")

        store._client.eval = unanswered
        assert store.append("u", [2], [1], [2]) == 2
        store._client.eval = run
        watch.at += module.QUIET_S
        assert store.read("u") == History([1, 2], [1, 1], [1, 2])


def test_a_write_that_was_never_sent_is_not_said_to_be_stored(server: RedisServer) -> None:
    watch = Watch()
    with RedisStore(server.url, timeout_s=60.0, now=watch) as store:
        store.append("u", [1], [1], [1])

        def lost(*arguments: Any) -> Any:
            raise redis.ConnectionError("broke off")

        run, store._client.eval = store._client.eval, lost
        with pytest.raises(Unavailable, match="may have been stored, or may not"):
            store.append("u", [2], [1], [2])
        store._client.eval = run
        watch.at += module.QUIET_S
        assert store.length("u") == 1


@pytest.mark.parametrize("field", [b"r", b"p0", b"p70", b"b0", b"b1"])
@pytest.mark.parametrize("damage", ["gone", "empty", "short", "long", "flipped", "swapped"])
def test_a_damaged_record_is_never_read_as_a_history(server: RedisServer, field: bytes, damage: str) -> None:
    with RedisStore(server.url, timeout_s=60.0) as store, contextlib.closing(redis.Redis.from_url(server.url)) as raw:
        history, other = fill(store), fill(store, "v", salt=1)
        good, theirs = raw.hget("relaygr:user:u", field), raw.hget("relaygr:user:v", field)
        value = {
            "empty": b"",
            "short": good[:-1],
            "long": good + b"\0",
            "flipped": bytes([good[0] ^ 1]) + good[1:],
            "swapped": theirs,
        }.get(damage)
        raw.hset("relaygr:user:u", field, value) if value is not None else raw.hdel("relaygr:user:u", field)
        if field == b"r" and damage == "gone":
            assert store.read("u") == History.empty()
            return
        with pytest.raises(StoreCorrupt, match=r"user 'u' .*damaged"):
            store.read("u")
        assert store.read("v") == other
        assert store.replace("u", history.items, history.actions, history.timestamps) == len(history)
        assert store.read("u") == history
        assert store.digest("u") == history.digest()


def test_a_server_without_memory_says_so_and_keeps_what_was_stored(tmp_path: Path) -> None:
    limits = ("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    with redis_server(tmp_path / "redis", *limits) as server, RedisStore(server.url, timeout_s=60.0) as store:
        stored: list[str] = []

        def until_full() -> None:
            while len(stored) < 10_000:
                fill(store, f"u{len(stored)}", PAGE)
                stored.append(f"u{len(stored)}")

        with pytest.raises(StoreFull, match="no memory left"):
            until_full()
        assert len(stored) > 100
        assert all(store.read(user) == numbered(PAGE) for user in stored)
        assert store.delete(stored[0])


def test_another_layout_is_refused(server: RedisServer) -> None:
    with contextlib.closing(redis.Redis.from_url(server.url)) as raw:
        raw.set("relaygr:layout", b"relaygr history 9")
        with pytest.raises(StoreError, match="relaygr history 9"):
            RedisStore(server.url)
        RedisStore(server.url, prefix="other:").close()


def test_a_prefix_of_special_characters_lists_its_own_users(server: RedisServer) -> None:
    with RedisStore(server.url, prefix="a*[b]?\\:", timeout_s=60.0) as store, RedisStore(server.url) as other:
        store.append("mine", [1], [1], [1])
        other.append("theirs", [1], [1], [1])
        assert list(store.users()) == ["mine"]
        assert list(other.users()) == ["theirs"]


def test_the_name_of_a_store_says_its_kind(server: RedisServer, tmp_path: Path) -> None:
    with open_store(server.url) as shared, open_store(str(tmp_path / "folder")) as embedded:
        assert type(shared).__name__ == "RedisStore"
        assert type(embedded).__name__ == "LmdbStore"


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^timeout_s: "):
        RedisStore("redis://localhost", timeout_s=0)
    with pytest.raises(InvalidInput, match=r"^store: "):
        RedisStore("redis://localhost:port/0")
    with RedisStore(f"unix://{tmp_path}/nobody") as nobody, pytest.raises(Unavailable):
        nobody.length("u")
    with RedisStore("redis://user:secret@127.0.0.1:1/0") as nobody, pytest.raises(Unavailable) as raised:
        nobody.length("u")
    assert "secret" not in str(raised.value)


def test_a_server_that_comes_later_is_asked_when_it_is_needed(tmp_path: Path) -> None:
    now = 0.0
    with redis_server(tmp_path / "redis") as server:
        server.kill()
        with RedisStore(server.url, timeout_s=60.0, now=lambda: now) as store:
            with pytest.raises(Unavailable):
                store.length("u")
            server.start()
            now = 1.0
            assert store.append("u", [1], [1], [1]) == 1


def test_a_server_that_comes_later_with_another_layout_is_refused(tmp_path: Path) -> None:
    now = 0.0
    with redis_server(tmp_path / "redis") as server:
        server.kill()
        with RedisStore(server.url, timeout_s=60.0, now=lambda: now) as store:
            server.start()
            redis.Redis.from_url(server.url).set("relaygr:layout", b"another")
            now = 1.0
            with pytest.raises(StoreError, match="another"):
                store.length("u")
            with pytest.raises(StoreError, match="another"):
                store.append("u", [1], [1], [1])


def test_what_was_acknowledged_survives_a_kill_of_a_server_that_writes_each_append_to_disk(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", "--appendonly", "yes", "--appendfsync", "always") as server:
        with RedisStore(server.url, timeout_s=60.0) as store:
            history = fill(store)
            server.kill()
            server.start()
        with RedisStore(server.url, timeout_s=60.0) as store:
            assert store.read("u") == history


def test_the_client_is_asked_for_by_name_where_it_is_missing() -> None:
    code = (
        "import sys; sys.modules['redis'] = None\n"
        "from relaygr.history import open_store\n"
        "open_store('redis://localhost')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "relaygr[redis]" in done.stderr


@pytest.mark.parametrize(
    "url", ["redis://me:hun/ter@host:6379/0", "redis://me:hun?ter@host/0", "redis://me:hun@host:no/0"]
)
def test_a_name_that_is_none_is_refused_without_any_of_its_password(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"^store: .*redis://host:6379/0") as refused:
        RedisStore(url)
    told = "".join(traceback.format_exception_only(refused.value))
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__
    assert "hun" not in told
    assert "ter@" not in told
