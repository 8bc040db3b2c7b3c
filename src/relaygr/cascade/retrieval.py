"""Retrieval: from a catalogue by nearest neighbours, or from a service of the user's own."""

import asyncio
import json
import math
from collections.abc import Sequence
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Self

import faiss
import httpx
import numpy as np
import numpy.typing as npt

from relaygr.cascade.catalogue import Catalogue
from relaygr.cascade.stage import Offload, Retrieval, RetrievalRequest, Retrieved, in_thread
from relaygr.errors import InvalidInput, Unavailable
from relaygr.history import History
from relaygr.history.history import index as integer
from relaygr.history.history import integers

__all__ = ["DelayedRetrieval", "FaissRetrieval", "FixedRetrieval", "HttpRetrieval", "IndexKind"]

_EXACT_UP_TO: Final = 200_000
"""Items up to which every one is compared: a few milliseconds on one core."""


class IndexKind(StrEnum):
    """How neighbours are found."""

    EXACT = "EXACT"
    """Compare every item."""
    IVF = "IVF"
    """Compare the items of the nearest eighth of √N clusters. What is near but in another cluster is missed."""

    @classmethod
    def for_items(cls, items: int) -> "IndexKind":
        """EXACT while that takes milliseconds, else IVF."""
        return cls.EXACT if items <= _EXACT_UP_TO else cls.IVF


class FaissRetrieval:
    """The items of a catalogue nearest to what the user did last, by inner product.

    The query is the mean of the embeddings of the newest `recent` behaviours, each weighing half as much as the one
    `half_life` behaviours after it. Behaviours of items that the catalogue lacks are left out. A user of whom nothing
    is left gets `popular`, or without that all items in an order drawn from `seed`; their similarities are 0.

    Clustering a large catalogue takes seconds: make this before serving. Searches run through `offload`, on
    one core each; FAISS lets go of the interpreter meanwhile.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        index: IndexKind | None = None,
        recent: int = 64,
        half_life: float = 16.0,
        popular: Any = None,
        seed: int = 0,
        offload: Offload = in_thread,
    ) -> None:
        """`index` None: by the catalogue's size."""
        self.catalogue = catalogue
        self.index = index or IndexKind.for_items(len(catalogue))
        self._recent = _at_least_1("recent", recent)
        if not 0 < half_life < math.inf:
            raise InvalidInput("half_life", "must be positive and finite")
        self._half_life = half_life
        if popular is None:
            popular = np.random.default_rng(integer("seed", seed)).permutation(catalogue.ids)
        self._popular = integers("popular", popular, np.int64).copy()
        self._offload = offload
        self._index = _build(catalogue.embeddings, self.index)

    async def run(self, request: RetrievalRequest, /) -> Retrieved:
        return await self._offload(lambda: self._find(request))

    def query(self, history: History) -> npt.NDArray[np.float32] | None:
        """The user's place among the items, of length 1; None where nothing is known."""
        rows = self.catalogue.rows(history.items[::-1][: self._recent])
        ages = np.flatnonzero(rows >= 0)
        weights = np.exp2(-ages / self._half_life)
        total = weights @ self.catalogue.embeddings[rows[ages]]
        length = float(np.linalg.norm(total))
        if length <= 1e-6 * float(weights.sum()):  # no behaviour, or behaviours that cancel each other
            return None
        return (total / length).astype(np.float32)

    def _find(self, request: RetrievalRequest) -> Retrieved:
        query = self.query(request.history)
        if query is None:
            items = self._popular[: request.k]
            return Retrieved(items, np.zeros(len(items), np.float32))
        similarities, rows = self._search(query, min(request.k, len(self.catalogue)))
        found = rows >= 0  # an approximate index may find fewer
        return Retrieved(self.catalogue.ids[rows[found]], similarities[found])

    def _search(self, query: npt.NDArray[np.float32], k: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        threads = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(1)  # of this thread alone; several would wait for each other on busy cores
        try:
            similarities, rows = self._index.search(query[None], k)
        finally:
            faiss.omp_set_num_threads(threads)
        return similarities[0], rows[0]


def _build(embeddings: npt.NDArray[np.float32], kind: IndexKind) -> faiss.Index:
    items, dim = embeddings.shape
    index: faiss.Index
    if kind is IndexKind.EXACT:
        index = faiss.IndexFlatIP(dim)
    else:
        clusters = max(1, min(math.isqrt(items), items // 39))  # FAISS wants 39 items to a cluster
        ivf = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, clusters, faiss.METRIC_INNER_PRODUCT)
        ivf.nprobe = max(1, clusters // 8)
        ivf.train(embeddings)
        index = ivf
    index.add(embeddings)
    return index


class HttpRetrieval:
    """A service of the user's own. An async context manager.

        POST url   {"user": "user-7", "items": [newest id, the one before, …], "k": 1024}
        200        {"items": [best id, …]}

    At most `recent` items are sent and `k` of the answer are used. Raises Unavailable when the service cannot be
    reached, takes longer than `timeout` seconds, or answers anything else, or more than `max_bytes`.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 0.1,
        *,
        recent: int = 256,
        max_bytes: int = 1 << 20,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport` is a seam for tests; the default is the network, without proxies."""
        try:
            self._url = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as error:
            raise InvalidInput("url", f"is not an address: {error}") from error
        if self._url.scheme not in ("http", "https") or not self._url.host:
            raise InvalidInput("url", "must begin with http:// or https:// and name a host")
        if not 0 < timeout < math.inf:
            raise InvalidInput("timeout", "must be positive and finite")
        self._timeout = timeout
        self._recent = _at_least_1("recent", recent)
        self._max_bytes = _at_least_1("max_bytes", max_bytes)
        self._service = f"the retrieval service at {self._url.copy_with(userinfo=b'', query=None, fragment=None)}"
        self._client = httpx.AsyncClient(
            transport=transport,
            timeout=None,  # one limit for all of it is set around the call
            trust_env=False,
            headers={"accept": "application/json", "accept-encoding": "identity"},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. Does nothing the second time."""
        await self._client.aclose()

    async def run(self, request: RetrievalRequest, /) -> Retrieved:
        if self._client.is_closed:
            raise Unavailable(f"{self._service} is no longer asked: this retrieval is closed")
        newest = request.history.items[::-1][: self._recent].tolist()
        try:
            async with asyncio.timeout(self._timeout):
                body = await self._post({"user": request.user, "items": newest, "k": request.k})
        except TimeoutError as error:
            raise Unavailable(f"{self._service} did not answer within {self._timeout * 1e3:g} ms") from error
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise Unavailable(f"{self._service} cannot be reached: {error or type(error).__name__}") from error
        return Retrieved(self._items(body)[: request.k])

    async def _post(self, question: dict[str, Any]) -> bytes:
        body = bytearray()
        async with self._client.stream("POST", self._url, json=question) as response:
            if response.status_code != 200:
                raise Unavailable(f"{self._service} answered {response.status_code}")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise Unavailable(f"{self._service} answered compressed, which it was not asked for")
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > self._max_bytes:
                    raise Unavailable(f"{self._service} answered more than {self._max_bytes} bytes")
        return bytes(body)

    def _items(self, body: bytes) -> npt.NDArray[np.int64]:
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Unavailable(f"{self._service} did not answer in JSON: {error}") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("items"), list):
            raise Unavailable(f'{self._service} did not answer {{"items": [...]}}')
        try:
            items = integers("items", answer["items"], np.int64)
        except InvalidInput as error:
            raise Unavailable(f"{self._service} answered items that are no ids: {error.problem}") from error
        if items.size and items.min() < 0:
            raise Unavailable(f"{self._service} answered items that are negative")
        return items


class DelayedRetrieval:
    """Another retrieval, which answers no sooner than this: a stand-in for one that has more to do."""

    def __init__(self, retrieval: Retrieval, at_least_s: float) -> None:
        self._retrieval = retrieval
        self._at_least_s = at_least_s

    async def run(self, request: RetrievalRequest, /) -> Retrieved:
        clock = asyncio.get_running_loop().time
        until = clock() + self._at_least_s
        found = await self._retrieval.run(request)
        await asyncio.sleep(max(0.0, until - clock()))
        return found


class FixedRetrieval:
    """A retrieval for tests and simulation: the same items for all, after a fixed time."""

    def __init__(self, items: Sequence[int], *, after_s: float = 0.0) -> None:
        self._items = integers("items", items, np.int64)
        self._after_s = after_s
        self.requests: list[RetrievalRequest] = []

    async def run(self, request: RetrievalRequest, /) -> Retrieved:
        self.requests.append(request)
        if self._after_s > 0:
            await asyncio.sleep(self._after_s)
        return Retrieved(self._items[: request.k])


def _at_least_1(field: str, value: Any) -> int:
    checked = integer(field, value)
    if checked < 1:
        raise InvalidInput(field, "must be at least 1")
    return checked
