"""What other processes do to a store in tests. Here, and not in a test, so that they can be told to by name."""

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

from behaviours import numbered
from relaygr.history import HistoryStore

__all__ = [
    "CONTEXT",
    "append_apart",
    "append_endlessly",
    "append_numbered",
    "append_through_fork",
    "append_two",
    "fork_while_reading",
    "processes",
    "read_numbered",
    "read_prefixes",
]

Opener = Callable[[], HistoryStore]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["hypothesis.strategies", "relaygr.history"])

_together: Barrier | None = None


def processes(count: int) -> ProcessPoolExecutor:
    """Processes that begin their first work together."""
    return ProcessPoolExecutor(count, CONTEXT, initializer=_begin_together, initargs=(CONTEXT.Barrier(count),))


def _begin_together(barrier: Barrier) -> None:
    global _together
    _together = barrier


def _wait_for_all() -> None:
    if _together is not None:
        _together.wait(timeout=120)


def append_numbered(opener: Opener, users: list[str], total: int) -> None:
    """Appends the numbered history to all the users at once, in parts of many sizes."""
    with opener() as store:
        _wait_for_all()
        at = part = 0
        while at < total:
            part += 1
            new = numbered(min(1 + part * 37 % 290, total - at), first=at)
            at += len(new)
            assert store.append_many(dict.fromkeys(users, new)) == dict.fromkeys(users, at)


def read_prefixes(opener: Opener, users: list[str], total: int) -> None:
    """Reads until all is there, and finds a prefix of the numbered history every time.

    `users` are written together: what one has, those asked later have too.
    """
    expected = numbered(total)
    with opener() as store:
        _wait_for_all()
        seen = 0
        while seen < total:
            for user in users:
                history = store.read(user)
                assert len(history) >= seen
                seen = len(history)
                assert history == expected[:seen]
                assert history.digest() == expected.digest(seen) == store.digest(user, seen)
                assert store.length(user) >= seen
                last = store.read(user, 100)
                assert last == expected[last.start : last.start + len(last)]


def append_apart(opener: Opener, own: str, shared: str, count: int) -> None:
    """Appends to a user of its own and, each time, to one that others write too."""
    with opener() as store:
        _wait_for_all()
        for at in range(count):
            new = numbered(1, first=at)
            store.append(own, new.items, new.actions, new.timestamps)
            store.append(shared, [at], [0], [0])


def append_endlessly(opener: Opener, user: str, told: Connection) -> None:
    """Appends the numbered history in parts of seven and tells each new length, until it is killed."""
    with opener() as store:
        at = 0
        while True:
            new = numbered(7, first=at)
            at = store.append(user, new.items, new.actions, new.timestamps)
            told.send(at)


def append_two(opener: Opener, users: list[str], told: Connection) -> None:
    """Appends the numbered history to both users at once, telling each new length, until it is killed."""
    with opener() as store:
        at = store.length(users[0])
        for part in itertools.count(at):
            new = numbered(1 + part * 37 % 290, first=at)
            (at,) = set(store.append_many(dict.fromkeys(users, new)).values())
            told.send(at)


def read_numbered(store: HistoryStore, user: str) -> int:
    """The user's length, if it is the numbered history."""
    with store:
        history = store.read(user)
        assert history == numbered(len(history))
        return len(history)


def append_through_fork(opener: Opener, user: str) -> int:
    """Opens a store, forks, and appends from the child, then from the parent, then from both again."""
    with opener() as store:
        _append_next(store, user)
        for _ in range(2):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    for _ in range(20):
                        _append_next(store, user)
                    assert store.read(user) == numbered(store.length(user))
                    store.close()
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            for _ in range(20):
                _append_next(store, user)
        return store.length(user)


def fork_while_reading(opener: Opener, user: str, forks: int) -> int:
    """Forks again and again while threads read and write. Returns how many children saw what they should."""
    good = 0
    with opener() as store:
        failures: list[BaseException] = []
        done = threading.Event()

        def read() -> None:
            try:
                while not done.is_set():
                    history = store.read(user)
                    assert history == numbered(len(history))
            except BaseException as error:
                failures.append(error)

        def write() -> None:
            try:
                while not done.is_set():
                    _append_next(store, user)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for work in (read, read, write)]
        for thread in threads:
            thread.start()
        for _ in range(forks):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    for _ in range(3):
                        history = store.read(user)
                        assert history == numbered(len(history))
                    status = 0
                finally:
                    os._exit(status)
            good += os.waitpid(child, 0)[1] == 0
        done.set()
        for thread in threads:
            thread.join()
        assert not failures, failures
    return good


def _append_next(store: HistoryStore, user: str) -> None:
    new = numbered(11, first=store.length(user))
    store.append(user, new.items, new.actions, new.timestamps)
