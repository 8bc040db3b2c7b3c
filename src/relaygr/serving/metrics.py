"""Prometheus metrics: what a metric is, the text of a scrape, and what every app tells of its calls.

A metric is one entry of a table: its name, its labels, a sentence, and how it is read from what already counts.
Nothing is counted twice and nothing is global: two apps in one process do not meet. The hot path pays for histograms
alone, some additions each.
"""

import asyncio
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Final, Generic, Protocol, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

__all__ = [
    "BUCKETS",
    "CONTENT_TYPE",
    "HTTP",
    "Histogram",
    "Histograms",
    "Kind",
    "Labels",
    "Metric",
    "Metrics",
    "Values",
    "by",
    "one",
]

S = TypeVar("S")

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_MS: Final = (
    *(0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12.5, 15, 17.5, 20, 25, 30, 35, 40, 45, 50, 60, 70, 80, 90, 100),
    *(110, 120, 135, 150, 175, 200, 250, 400, 800, 1600, 5000),
)
BUCKETS: Final = tuple(ms / 1e3 for ms in _MS)
"""Seconds. Close enough between 1 and 200 ms to read a P99 there, with bounds at the default budgets, 50 and 135 ms."""


class Histogram:
    """Counts of seconds by bucket. Not for threads: every app observes on its event loop."""

    __slots__ = ("_counts", "sum")

    def __init__(self) -> None:
        self.sum = 0.0
        self._counts = [0] * (len(BUCKETS) + 1)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """How many were at most each bound, the last of them all."""
        bounds = [*map(str, BUCKETS), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


Labels = tuple[str, ...]
Histograms = defaultdict[Labels, Histogram]
Values = Mapping[Any, float] | Mapping[Any, Histogram]
"""By Labels; a mapping of tuples of one length is none of tuples of any."""


class Kind(StrEnum):
    """How a metric is read."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric(Generic[S]):
    """One metric, read from an `S` at every scrape."""

    name: str
    """As scraped; that of a counter ends in _total."""
    kind: Kind
    help: str
    labels: Labels
    read: Callable[[S], Values]
    """Values by those of the labels."""

    def family(self, subject: S) -> Family:
        values = self.read(subject)
        if self.kind is Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(self.name, self.help, labels=self.labels)
            for labels, value in values.items():
                assert isinstance(value, Histogram)
                histogram.add_metric(labels, value.cumulative(), value.sum)
            return histogram
        kind = CounterMetricFamily if self.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(self.name, self.help, labels=self.labels)
        for labels, value in values.items():
            assert not isinstance(value, Histogram)
            family.add_metric(labels, value)
        return family


class Metrics(Collector):
    """What one app tells, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self._parts: list[Callable[[], Iterator[Family]]] = []

    def tell(self, table: Sequence[Metric[S]], subject: Callable[[], S | None]) -> None:
        """Read this table at every scrape from what `subject` gives then; None: there is nothing to tell."""

        def families() -> Iterator[Family]:
            current = subject()
            if current is not None:
                yield from (metric.family(current) for metric in table)

        self._parts.append(families)

    def collect(self) -> Iterator[Family]:
        for families in self._parts:
            yield from families()

    def text(self) -> bytes:
        """The answer to a scrape."""
        return generate_latest(self.registry)


def one(value: float) -> Values:
    """Of a metric without labels."""
    return {(): float(value)}


def by(counts: Mapping[Any, int]) -> Values:
    """Of a metric with one label."""
    return {(str(label),): float(count) for label, count in counts.items()}


class Served(Protocol):
    """An app, as far as it is told of here."""

    requests: Counter[tuple[str, int]]
    seconds: Histograms
    busy: int
    draining: bool


HTTP: Final[tuple[Metric[Served], ...]] = (
    Metric(
        "relaygr_http_requests_total",
        Kind.COUNTER,
        "Requests answered, by call (its path, or other) and HTTP status; 499: the client went before.",
        ("call", "status"),
        lambda app: {(call, str(status)): float(count) for (call, status), count in app.requests.items()},
    ),
    Metric(
        "relaygr_http_request_seconds",
        Kind.HISTOGRAM,
        "From a request's last byte to its reply, by call.",
        ("call",),
        lambda app: app.seconds,
    ),
    Metric(
        "relaygr_http_requests_under_way",
        Kind.GAUGE,
        "Requests taken and not answered.",
        (),
        lambda app: one(app.busy),
    ),
    Metric(
        "relaygr_draining",
        Kind.GAUGE,
        "1 while new work is refused before the end.",
        (),
        lambda app: one(app.draining),
    ),
    Metric(
        "relaygr_tasks",
        Kind.GAUGE,
        "Tasks of the server's event loop.",
        (),
        lambda app: one(len(asyncio.all_tasks())),
    ),
)
