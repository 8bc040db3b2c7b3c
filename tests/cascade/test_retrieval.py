"""What is nearest to the newest behaviours comes first; a service that fails is unavailable, in a sentence."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import faiss
import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from behaviours import numbered
from engines import in_virtual_time
from relaygr import History
from relaygr.cascade import (
    Catalogue,
    FaissRetrieval,
    FixedRetrieval,
    HttpRetrieval,
    IndexKind,
    RetrievalRequest,
    Retrieved,
    inline,
)
from relaygr.errors import InvalidInput, Unavailable

T = TypeVar("T")

CATALOGUE = Catalogue.random(200, 8, seed=3)


def history_of(*items: int) -> History:
    return History(items, [0] * len(items), range(len(items)))


def find(retrieval: FaissRetrieval, history: History, k: int = 10) -> Retrieved:
    return asyncio.run(retrieval.run(RetrievalRequest("u1", history, k)))


def mean_of(history: History, catalogue: Catalogue, recent: int, half_life: float) -> Any:
    """The query, the plain way."""
    total = np.zeros(catalogue.dim)
    for age, item in enumerate(reversed(history.items.tolist()[-recent:])):
        if item in catalogue.ids:
            total += 0.5 ** (age / half_life) * catalogue.embeddings[catalogue.ids.tolist().index(item)].astype(float)
    return total / np.linalg.norm(total)


@given(items=st.lists(st.integers(0, 300), min_size=1, max_size=40), k=st.integers(1, 250))
def test_the_nearest_to_the_newest_behaviours_are_found_in_order(items: list[int], k: int) -> None:
    retrieval = FaissRetrieval(CATALOGUE, recent=16, half_life=4.0, offload=inline)
    history = history_of(*items)
    if not any(item < 200 for item in items[-16:]):
        assert retrieval.query(history) is None
        return
    query = mean_of(history, CATALOGUE, 16, 4.0)
    got = find(retrieval, history, k)
    similarities = CATALOGUE.embeddings @ query
    assert len(got.items) == len(set(got.items.tolist())) == min(k, 200)
    assert got.similarities is not None
    assert np.allclose(got.similarities, similarities[got.items], atol=1e-5)
    assert np.allclose(got.similarities, np.sort(similarities)[::-1][: len(got.items)], atol=1e-5)


def test_newer_behaviours_weigh_more_and_old_ones_nothing() -> None:
    catalogue = Catalogue([10, 20, 30], np.eye(3))
    retrieval = FaissRetrieval(catalogue, recent=2, half_life=1.0, offload=inline)
    query = retrieval.query(history_of(30, 20, 10))
    assert query is not None
    assert np.allclose(query, np.array([2, 1, 0]) / np.sqrt(5))
    assert find(retrieval, history_of(30, 20, 10)).items.tolist() == [10, 20, 30]


def test_unknown_items_are_left_out_but_keep_their_place() -> None:
    catalogue = Catalogue([10, 20], np.eye(2))
    retrieval = FaissRetrieval(catalogue, half_life=1.0, offload=inline)
    query = retrieval.query(history_of(20, 99, 10))
    assert query is not None
    assert np.allclose(query, np.array([4, 1]) / np.sqrt(17))


@pytest.mark.parametrize("history", [History.empty(), history_of(900, 901)])
def test_a_user_of_whom_nothing_is_known_gets_the_seeded_order(history: History) -> None:
    first, same, other = (FaissRetrieval(CATALOGUE, seed=seed, offload=inline) for seed in (1, 1, 2))
    got = find(first, history, 50)
    assert len(set(got.items.tolist())) == 50
    assert got.similarities is not None
    assert not got.similarities.any()
    assert np.array_equal(got.items, find(same, history, 50).items)
    assert not np.array_equal(got.items, find(other, history, 50).items)


def test_popular_items_take_the_place_of_the_seeded_order() -> None:
    retrieval = FaissRetrieval(CATALOGUE, popular=[5, 3, 8], offload=inline)
    assert find(retrieval, History.empty(), 2).items.tolist() == [5, 3]


def test_behaviours_that_cancel_each_other_are_no_query() -> None:
    catalogue = Catalogue([0, 1], [[1.0], [-1.0]])
    assert FaissRetrieval(catalogue, half_life=1e12, offload=inline).query(history_of(0, 1)) is None


def test_an_approximate_index_finds_most_of_the_nearest() -> None:
    random = np.random.default_rng(0)
    centres = random.standard_normal((40, 8))
    rows = (centres[:, None] + 0.2 * random.standard_normal((40, 50, 8))).reshape(-1, 8)
    catalogue = Catalogue(np.arange(2000) * 3, rows)
    exact = FaissRetrieval(catalogue, offload=inline)
    approximate = FaissRetrieval(catalogue, index=IndexKind.IVF, offload=inline)
    assert (exact.index, approximate.index) == (IndexKind.EXACT, IndexKind.IVF)
    for item in range(0, 6000, 600):
        wanted = set(find(exact, history_of(item), 20).items.tolist())
        assert len(wanted & set(find(approximate, history_of(item), 20).items.tolist())) >= 15


def test_an_approximate_index_that_finds_fewer_returns_fewer() -> None:
    catalogue = Catalogue.random(800, 4, seed=0)
    got = find(FaissRetrieval(catalogue, index=IndexKind.IVF, offload=inline), history_of(1), 800)
    assert 0 < len(got.items) < 800
    assert got.items.min() >= 0


def test_the_index_is_chosen_by_size() -> None:
    kinds = [IndexKind.for_items(items) for items in (1, 200_000, 200_001, 10**8)]
    assert kinds == [IndexKind.EXACT, IndexKind.EXACT, IndexKind.IVF, IndexKind.IVF]


def test_searches_run_in_a_worker_thread_and_leave_its_settings() -> None:
    ran_on: list[int] = []

    class Watched(FaissRetrieval):
        def _find(self, request: RetrievalRequest) -> Retrieved:
            ran_on.append(threading.get_ident())
            threads = faiss.omp_get_max_threads()
            found = super()._find(request)
            assert faiss.omp_get_max_threads() == threads
            return found

    find(Watched(CATALOGUE), history_of(1, 2))
    assert ran_on
    assert ran_on[0] != threading.get_ident()


@pytest.mark.parametrize("field", ["recent", "half_life"])
@pytest.mark.parametrize("value", [0, -1, float("inf")])
def test_settings_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=field):
        FaissRetrieval(CATALOGUE, **{field: value})


# ---- a service of the user's own

Handler = Callable[[httpx.Request], Coroutine[None, None, httpx.Response]]


def answering(
    content: bytes | AsyncIterator[bytes], status: int = 200, headers: dict[str, str] | None = None
) -> Handler:
    async def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=content, headers=headers)

    return handle


async def ask(handler: Handler, history: History, k: int = 3, **settings: Any) -> Retrieved:
    url = "http://me:secret@items.example/near"
    async with HttpRetrieval(url, 0.05, transport=httpx.MockTransport(handler), **settings) as retrieval:
        return await retrieval.run(RetrievalRequest("u1", history, k))


@in_virtual_time
async def test_the_service_is_sent_the_newest_items_first_and_its_first_k_are_used() -> None:
    asked: list[Any] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("POST", "/near")
        asked.append(json.loads(request.content))
        return httpx.Response(200, json={"items": [9, 8, 7, 6], "more": True})

    got = await ask(handle, history_of(1, 2, 3), recent=2)
    assert asked == [{"user": "u1", "items": [3, 2], "k": 3}]
    assert got.items.tolist() == [9, 8, 7]
    assert got.items.dtype == np.int64
    assert got.similarities is None


@in_virtual_time
async def test_the_service_may_find_nothing() -> None:
    assert len((await ask(answering(b'{"items": []}'), History.empty())).items) == 0


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (answering(b"busy", 500), "answered 500"),
        (answering(b"", 302, {"location": "http://elsewhere.example"}), "answered 302"),
        (answering(b"", 200, {"content-encoding": "gzip"}), "compressed"),
        (answering(b"<html>"), "did not answer in JSON"),
        (answering(b"[" * 100_000), "did not answer in JSON"),
        (answering(b"\xff"), "did not answer in JSON"),
        (answering(b"[1]"), "did not answer"),
        (answering(b'{"items": 1}'), "did not answer"),
        (answering(b'{"items": [1.5]}'), "no ids"),
        (answering(b'{"items": ["1"]}'), "no ids"),
        (answering(b'{"items": [true]}'), "no ids"),
        (answering(b'{"items": [[1], 2]}'), "no ids"),
        (answering(b'{"items": [99999999999999999999]}'), "no ids"),
        (answering(b'{"items": [1, -1]}'), "negative"),
        (answering(b'{"items": [' + b"1," * 600_000 + b"1]}"), "more than 1048576 bytes"),
    ],
)
@in_virtual_time
async def test_anything_but_items_is_unavailable_in_a_sentence(handler: Handler, said: str) -> None:
    with pytest.raises(Unavailable, match=said) as refused:
        await ask(handler, history_of(1))
    assert "http://items.example/near" in str(refused.value)
    assert "secret" not in str(refused.value)


@in_virtual_time
async def test_an_endless_answer_is_left_when_it_is_too_long() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1000
            yield b" " * 1000

    with pytest.raises(Unavailable, match="more than 5000 bytes"):
        await ask(answering(endless()), history_of(1), max_bytes=5000)
    assert sent == 6000


@in_virtual_time
async def test_a_slow_service_is_given_up_after_the_timeout() -> None:
    async def slow(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(3600)
        return httpx.Response(200)

    loop = asyncio.get_running_loop()
    with pytest.raises(Unavailable, match="within 50 ms"):
        await ask(slow, history_of(1))
    assert loop.time() == pytest.approx(0.05)


def test_a_service_that_is_down_is_unavailable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        port = unused.getsockname()[1]

        async def main() -> None:
            async with HttpRetrieval(f"http://127.0.0.1:{port}/", 10.0) as retrieval:
                with pytest.raises(Unavailable, match="cannot be reached"):
                    await retrieval.run(RetrievalRequest("u1", numbered(3), 5))

        asyncio.run(main())


def test_a_service_on_a_real_socket_answers() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n{"items": [4, 2]}')
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            async with HttpRetrieval(f"http://127.0.0.1:{port}/", 10.0) as retrieval:
                got = await retrieval.run(RetrievalRequest("u1", numbered(3), 5))
                assert got.items.tolist() == [4, 2]

    asyncio.run(main())


@in_virtual_time
async def test_a_closed_retrieval_asks_no_more() -> None:
    retrieval = HttpRetrieval("http://items.example", transport=httpx.MockTransport(answering(b"")))
    await retrieval.aclose()
    await retrieval.aclose()
    with pytest.raises(Unavailable, match="closed"):
        await retrieval.run(RetrievalRequest("u1", numbered(3), 5))


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("url", {"url": "items.example"}),
        ("url", {"url": "ftp://items.example"}),
        ("url", {"url": "http://"}),
        ("url", {"url": "http://items.example:port"}),
        ("url", {"url": 3}),
        ("timeout", {"timeout": 0}),
        ("timeout", {"timeout": float("inf")}),
        ("recent", {"recent": 0}),
        ("max_bytes", {"max_bytes": 0}),
    ],
)
def test_a_service_that_cannot_be_is_refused(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        HttpRetrieval(**{"url": "http://items.example", **settings})
    assert refused.value.field == field


@in_virtual_time
async def test_a_fixed_retrieval_answers_the_same_after_its_time() -> None:
    retrieval = FixedRetrieval([3, 1, 2], after_s=0.25)
    assert (await retrieval.run(RetrievalRequest("u1", numbered(3), 2))).items.tolist() == [3, 1]
    assert asyncio.get_running_loop().time() == 0.25
    assert [request.user for request in retrieval.requests] == ["u1"]
