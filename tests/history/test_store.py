"""What every store must do. A new kind of store is one more entry in STORES."""

import contextlib
import importlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import store_processes
from behaviours import histories, lengths, numbered
from optional import require
from redis_server import redis_server
from relaygr.errors import InvalidInput, Unavailable
from relaygr.history import PAGE, History, HistoryStore, LmdbStore
from relaygr.history.digest import EMPTY
from relaygr.history.store import MAX_USER_BYTES

Opener = Callable[[], HistoryStore]
"""Opens the same store each time, in whatever process; one at a time in each."""


def lmdb_stores(folder: Path) -> Iterator[Opener]:
    for number in count():
        yield partial(LmdbStore, folder / f"store{number}", 1 << 30, durable=False)


def redis_stores(folder: Path) -> Iterator[Opener]:
    require("redis", "pip install 'relaygr[redis]'")
    store = importlib.import_module("relaygr.history.redis_store")
    with redis_server(folder) as server:
        for number in count():
            # Slow machines are slow; what is slow on purpose is in test_redis_store.py.
            yield partial(store.RedisStore, server.url, prefix=f"{number}:", timeout_s=60.0)


STORES = {"lmdb": lmdb_stores, "redis": redis_stores}
"""For each kind: from an empty folder, any number of new, empty stores."""


@pytest.fixture(params=STORES)
def new_stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Iterator[Opener]]:
    with contextlib.closing(STORES[request.param](tmp_path)) as stores:  # type: ignore[type-var]  # they are generators
        yield stores


@pytest.fixture
def opener(new_stores: Iterator[Opener]) -> Opener:
    return next(new_stores)


@pytest.fixture
def store(opener: Opener) -> Iterator[HistoryStore]:
    with opener() as opened:
        yield opened


def columns(history: History) -> tuple[Any, Any, Any]:
    return history.items, history.actions, history.timestamps


def test_it_is_a_history_store(store: HistoryStore) -> None:
    assert isinstance(store, HistoryStore)


def test_a_user_nobody_has_seen_has_an_empty_history(store: HistoryStore) -> None:
    assert store.read("nobody") == store.read("nobody", 5) == store.read("nobody", start=7) == History.empty()
    assert store.read("nobody").start == store.read("nobody", start=7).start == 0
    assert store.length("nobody") == 0
    assert store.span("nobody") is None
    assert store.digest("nobody") == store.digest("nobody", 0) == store.digest("nobody", start=PAGE) == EMPTY
    assert store.delete("nobody") is False
    assert list(store.users()) == []


def test_what_was_appended_is_read(store: HistoryStore) -> None:
    assert store.append("u", [5, 6], [1, 2], [10, 20]) == 2
    assert store.append("u", [7], [3], [20]) == 3
    history = store.read("u")
    assert history == History([5, 6, 7], [1, 2, 3], [10, 20, 20])
    assert [column.dtype for column in columns(history)] == [np.int64, np.int32, np.int64]
    assert not any(column.flags.writeable for column in columns(history))
    assert store.span("u") == (10, 20)
    assert list(store.users()) == ["u"]


def test_what_was_written_is_there_when_it_is_opened_again(opener: Opener) -> None:
    with opener() as store:
        store.append("u", *columns(numbered(1000)))
    with opener() as store:
        assert store.read("u") == numbered(1000)
        assert store.digest("u") == numbered(1000).digest()


def test_any_last_and_any_start_are_slices(store: HistoryStore) -> None:
    whole = numbered(3 * PAGE + 50)
    store.append("u", *columns(whole))
    whole.digest()

    @given(st.none() | lengths(5 * PAGE), lengths(5 * PAGE))
    def holds(last: int | None, start: int) -> None:
        low = min(len(whole), start if last is None else max(start, len(whole) - last))
        read = store.read("u", last, start=start)
        assert read == whole[low:]
        assert read.start == low
        assert read.digest() == whole[low:].digest()

    holds()


def test_any_digest_is_that_of_the_history(store: HistoryStore) -> None:
    whole = numbered(3 * PAGE + 50)
    store.append("u", *columns(whole))

    @given(st.integers(0, 4), lengths())
    def holds(page: int, length: int) -> None:
        window = whole[page * PAGE :]
        length = min(length, len(window))
        assert store.digest("u", length, start=page * PAGE) == window.digest(length)
        assert store.digest("u", start=page * PAGE) == window.digest()

    holds()


def test_stored_hashes_are_handed_on(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append("u", *columns(numbered(5 * PAGE + 3)))
    read = [store.read("u"), store.read("u", start=2 * PAGE), store.read("u", 3 * PAGE + 3)]
    hashed: list[int] = []

    def counted(items: Any, actions: Any, timestamps: Any) -> bytes:
        hashed.append(len(items))
        return EMPTY

    def no_pages(items: Any, actions: Any, timestamps: Any) -> list[bytes]:
        assert not len(items), "a whole page was hashed again"
        return []

    monkeypatch.setattr("relaygr.history.history.page_hash", counted)
    monkeypatch.setattr("relaygr.history.history.page_hashes", no_pages)
    for history in read:
        history.digest()
    assert hashed == [3, 3, 3]


def test_what_was_read_stays_as_it_was(store: HistoryStore) -> None:
    store.append("u", *columns(numbered(200)))
    before = store.read("u")
    store.replace("u", *columns(numbered(300, salt=1)))
    store.delete("u")
    store.append("u", *columns(numbered(100, salt=2)))
    assert before == numbered(200)
    assert before.digest() == numbered(200).digest()


def test_a_correction_replaces_everything(store: HistoryStore) -> None:
    store.append("u", *columns(numbered(70 * PAGE + 5)))
    store.append("other", *columns(numbered(200, salt=3)))
    corrected = numbered(2 * PAGE + 7, salt=1)
    assert store.replace("u", *columns(corrected)) == len(corrected)
    assert store.read("u") == corrected
    assert store.digest("u") == corrected.digest()
    assert store.span("u") == (corrected.timestamps[0], corrected.timestamps[-1])
    more = numbered(PAGE, first=len(corrected), salt=1)
    store.append("u", *columns(more))
    assert store.read("u") == numbered(3 * PAGE + 7, salt=1)
    assert store.replace("new", [1], [1], [1]) == 1
    assert store.replace("u", [], [], []) == 0
    assert sorted(store.users()) == ["new", "other"]
    assert store.read("other") == numbered(200, salt=3)


def test_a_forgotten_user_leaves_the_others_alone(store: HistoryStore) -> None:
    for user in "abc":
        store.append(user, *columns(numbered(2 * PAGE + 9, salt=ord(user))))
    assert store.delete("b") is True
    assert store.delete("b") is False
    assert store.read("b") == History.empty()
    assert sorted(store.users()) == ["a", "c"]
    store.append("b", [1], [1], [1])
    assert store.read("b") == History([1], [1], [1])
    for user in "ac":
        assert store.read(user) == numbered(2 * PAGE + 9, salt=ord(user))


def test_nothing_appended_is_nothing_stored(store: HistoryStore) -> None:
    assert store.append("u", [], [], []) == 0
    assert list(store.users()) == []
    assert store.append_many({}) == {}
    store.append("u", [1], [1], [1])
    assert store.append("u", [], [], []) == 1


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("items", [1.5]),
        ("items", [[1]]),
        ("items", [-1]),
        ("items", [1, 2]),
        ("actions", [-1]),
        ("actions", [2**31]),
        ("actions", [1, 2]),
        ("timestamps", ["now"]),
        ("timestamps", [99]),
        ("timestamps", [101, 102]),
    ],
)
def test_a_bad_append_names_its_field_and_stores_nothing(store: HistoryStore, field: str, bad: Any) -> None:
    store.append("u", [1], [1], [100])
    columns = {"items": [1], "actions": [1], "timestamps": [100], field: bad}
    named = "actions" if field == "items" and len(bad) == 2 else field
    with pytest.raises(InvalidInput, match=f"^{named}: "):
        store.append("u", **columns)
    if bad != [99]:
        with pytest.raises(InvalidInput, match=f"^{named}: "):
            store.replace("u", **columns)
    assert store.read("u") == History([1], [1], [100])
    assert store.span("u") == (100, 100)


def test_one_bad_user_of_many_stores_nothing_of_any(store: HistoryStore) -> None:
    store.append("b", *columns(numbered(300)))
    new = numbered(200)
    with pytest.raises(InvalidInput, match=r"^timestamps: .*'b'"):
        store.append_many({"a": new, "b": new, "c": new})
    assert list(store.users()) == ["b"]
    assert store.read("b") == numbered(300)
    with pytest.raises(InvalidInput, match=r"^user: "):
        store.append_many({"a": new, "": new})
    with pytest.raises(InvalidInput, match=r"^behaviours: .*'c'"):
        store.append_many({"a": new, "c": columns(new)})  # type: ignore[dict-item]
    assert list(store.users()) == ["b"]


def test_many_users_are_appended_at_once(store: HistoryStore) -> None:
    users = {f"user {i}": numbered(i * 10, salt=i) for i in range(1, 40)}
    assert store.append_many(users) == {user: len(history) for user, history in users.items()}
    assert {user: store.read(user) for user in store.users()} == users


@pytest.mark.parametrize("user", ["", "x" * (MAX_USER_BYTES + 1), "é" * 256, "\ud800", 7, None, b"u"])
def test_a_user_that_cannot_be_is_refused(store: HistoryStore, user: Any) -> None:
    for call in (store.read, store.length, store.span, store.digest, store.delete):
        with pytest.raises(InvalidInput, match=r"^user: "):
            call(user)
    for write in (store.append, store.replace):
        with pytest.raises(InvalidInput, match=r"^user: "):
            write(user, [1], [1], [1])


def test_any_other_user_will_do(store: HistoryStore) -> None:
    kept: dict[str, int] = {}
    # No character takes more than four bytes; surrogates alone take none.
    text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=MAX_USER_BYTES // 4)

    @given(text | st.sampled_from(["x" * MAX_USER_BYTES, "\0", "\0\0", "\U0001f600" * 127]))
    def holds(user: str) -> None:
        kept[user] = store.append(user, [1], [0], [0])
        assert {user: store.length(user) for user in store.users()} == kept

    holds()


@pytest.mark.parametrize("bad", [-1, 1.5, "1"])
def test_a_bad_number_is_refused_by_name(store: HistoryStore, bad: Any) -> None:
    store.append("u", *columns(numbered(300)))
    with pytest.raises(InvalidInput, match=r"^last: "):
        store.read("u", bad)
    for call in (store.read, store.digest):
        with pytest.raises(InvalidInput, match=r"^start: "):
            call("u", start=bad)
    with pytest.raises(InvalidInput, match=r"^length: "):
        store.digest("u", bad)


def test_a_digest_that_cannot_be_is_refused_by_name(store: HistoryStore) -> None:
    store.append("u", *columns(numbered(300)))
    with pytest.raises(InvalidInput, match=r"^start: "):
        store.digest("u", start=PAGE + 1)
    with pytest.raises(InvalidInput, match=r"^length: "):
        store.digest("u", 301)
    with pytest.raises(InvalidInput, match=r"^length: "):
        store.digest("u", 300 - PAGE + 1, start=PAGE)
    with pytest.raises(InvalidInput, match=r"^length: "):
        store.digest("nobody", 1)


def test_a_closed_store_says_so(opener: Opener) -> None:
    store = opener()
    store.append("u", [1], [1], [1])
    users = store.users()
    store.close()
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.read("u"),
        lambda: store.length("u"),
        lambda: store.digest("u"),
        lambda: store.append("u", [1], [1], [1]),
        lambda: store.delete("u"),
        lambda: next(users),
    ]
    for call in calls:
        with pytest.raises(Unavailable, match="closed"):
            call()


def test_users_are_listed_while_they_come_and_go(store: HistoryStore) -> None:
    staying = {f"stays {i:05}" for i in range(3000)}
    store.append_many(dict.fromkeys(staying, numbered(1)))
    seen = []
    for number, user in enumerate(store.users()):
        seen.append(user)
        if number % 100 == 0:
            store.append(f"comes {number}", [1], [1], [1])
            store.append(f"zomes {number}", [1], [1], [1])
            store.delete(f"comes {number - 100}")
    assert len(seen) == len(set(seen))
    assert staying <= set(seen)


class Model(RuleBasedStateMachine):
    """A store beside a dictionary of histories: they must agree whatever is done."""

    users = st.sampled_from(["a", "b", "ab"])

    def __init__(self, opener: Opener) -> None:
        super().__init__()
        self.opener = opener
        self.store = opener()
        self.kept: dict[str, History] = {}
        self.known: dict[str, History] = {}
        """As it was read last."""

    def later(self, user: str, new: History) -> History:
        """The behaviours, moved behind the user's last."""
        kept = self.kept.get(user, History.empty())
        last = kept.timestamps[-1] if len(kept) else np.iinfo(np.int64).min
        return History(new.items, new.actions, np.maximum(new.timestamps, last))

    def grown(self, user: str, new: History) -> History:
        return self.kept.get(user, History.empty()).append(*columns(new))

    @rule(user=users, new=histories(2 * PAGE))
    def append(self, user: str, new: History) -> None:
        new = self.later(user, new)
        self.kept[user] = self.grown(user, new)
        assert self.store.append(user, *columns(new)) == len(self.kept[user])

    @rule(new=st.dictionaries(users, histories(70 * PAGE)))
    def append_many(self, new: dict[str, History]) -> None:
        new = {user: self.later(user, part) for user, part in new.items()}
        self.kept |= {user: self.grown(user, part) for user, part in new.items()}
        assert self.store.append_many(new) == {user: len(self.kept[user]) for user in new}

    @rule(user=users)
    def append_what_is_older(self, user: str) -> None:
        kept = self.kept.get(user, History.empty())
        if len(kept) and kept.timestamps[-1] > np.iinfo(np.int64).min:
            with pytest.raises(InvalidInput, match=r"^timestamps: "):
                self.store.append(user, [1], [1], [kept.timestamps[-1] - 1])

    @rule(user=users, new=histories())
    def replace(self, user: str, new: History) -> None:
        self.kept[user] = new
        assert self.store.replace(user, *columns(new)) == len(new)

    @rule(user=users)
    def delete(self, user: str) -> None:
        assert self.store.delete(user) == bool(len(self.kept.pop(user, ())))

    @rule(user=users, last=lengths(), page=st.integers(0, 3))
    def read(self, user: str, last: int, page: int) -> None:
        kept = self.kept.get(user, History.empty())
        assert self.store.read(user, last) == kept[max(0, len(kept) - last) :]
        window = kept[page * PAGE :]
        assert self.store.read(user, start=page * PAGE) == window
        again = self.store.read(user, start=page * PAGE, known=self.known.get(user))
        assert again == window
        assert again.digest() == window.digest()
        self.known[user] = again
        length = min(last, len(window))
        assert self.store.digest(user, length, start=page * PAGE) == window.digest(length)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.opener()

    @invariant()
    def all_agree(self) -> None:
        kept = {user: history for user, history in self.kept.items() if len(history)}
        assert set(self.store.users()) == set(kept)
        for user, history in kept.items():
            read = self.store.read(user)
            assert read == history
            assert read.digest() == History(*columns(history)).digest() == self.store.digest(user)
            assert self.store.length(user) == len(history)
            assert self.store.span(user) == (history.timestamps[0], history.timestamps[-1])

    def teardown(self) -> None:
        self.store.close()


def test_it_does_what_a_dictionary_of_histories_does(new_stores: Iterator[Opener]) -> None:
    few = settings(max_examples=20, stateful_step_count=15)
    run_state_machine_as_test(lambda: Model(next(new_stores)), settings=few)  # type: ignore[arg-type]


def test_threads_share_a_store(store: HistoryStore) -> None:
    total = 2000

    def write(user: str) -> None:
        for low in range(0, total, 50):
            store.append(user, *columns(numbered(50, first=low)))

    def read(user: str) -> None:
        seen = 0
        while seen < total:
            history = store.read(user)
            assert len(history) >= seen
            seen = len(history)
            assert history == numbered(seen)
            assert store.digest(user, seen) == history.digest()

    with ThreadPoolExecutor(4) as threads:
        work = [threads.submit(task, user) for user in "ab" for task in (write, read)]
        for future in work:
            future.result()


def test_processes_that_read_while_one_writes_see_whole_appends(opener: Opener) -> None:
    with opener():
        pass
    users, total = ["a", "b"], 20_000
    with store_processes.processes(3) as pool:
        work = [pool.submit(store_processes.read_prefixes, opener, users, total) for _ in range(2)]
        work.append(pool.submit(store_processes.append_numbered, opener, users[::-1], total))
        for future in work:
            future.result()
    with opener() as store:
        assert store.read("a") == store.read("b") == numbered(total)


def test_processes_that_write_wait_for_each_other(opener: Opener) -> None:
    with store_processes.processes(3) as pool:
        work = [pool.submit(store_processes.append_apart, opener, own, "shared", 200) for own in "abc"]
        for future in work:
            future.result()
    with opener() as store:
        assert all(store.read(own) == numbered(200) for own in "abc")
        assert sorted(store.read("shared").items.tolist()) == sorted(list(range(200)) * 3)


def test_a_writer_that_is_killed_leaves_whole_appends(opener: Opener) -> None:
    told, tell = store_processes.CONTEXT.Pipe(duplex=False)
    writer = store_processes.CONTEXT.Process(target=store_processes.append_endlessly, args=(opener, "u", tell))
    with told, tell:
        writer.start()
        while told.recv() < 700:
            pass
        writer.kill()
        writer.join()
    with opener() as store:
        history = store.read("u")
        assert len(history) >= 700
        assert len(history) % 7 == 0
        assert history == numbered(len(history))
        new = numbered(5, first=len(history))
        assert store.append("u", *columns(new)) == len(history) + 5


@pytest.mark.parametrize("seed", range(2))
def test_writers_killed_at_any_moment_lose_nothing_acknowledged(new_stores: Iterator[Opener], seed: int) -> None:
    draw, opener = random.Random(seed), next(new_stores)
    acknowledged = 0
    for _ in range(8):
        told, tell = store_processes.CONTEXT.Pipe(duplex=False)
        arguments = (opener, ["a", "b"], tell)
        writer = store_processes.CONTEXT.Process(target=store_processes.append_two, args=arguments)
        writer.start()
        tell.close()
        with told:
            for _ in range(draw.randrange(1, 30)):
                acknowledged = told.recv()
            # Somewhere within the next append: a spin of seeded length, not a time.
            for _ in range(draw.randrange(0, 20_000)):
                pass
            writer.kill()
            writer.join()
            with contextlib.suppress(EOFError):
                while True:
                    acknowledged = told.recv()
        with opener() as store:
            history = store.read("a")
            assert len(history) >= acknowledged
            assert history == store.read("b") == numbered(len(history))
            assert history.digest() == store.digest("a") == numbered(len(history)).digest()


def test_a_process_gets_a_store_by_mail(store: HistoryStore) -> None:
    store.append("u", *columns(numbered(500)))
    with store_processes.processes(1) as pool:
        assert pool.submit(store_processes.read_numbered, store, "u").result() == 500
