"""Prometheus metrics: what each app tells, where it reads it, and the text of a scrape.

A metric is one entry of a table here: its name, its labels, a sentence, and how it is read from what already counts.
Nothing is counted twice and nothing is global: two apps in one process do not meet. The hot path pays for histograms
alone, some additions each.
"""

import sys
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any, Final, Generic, Protocol, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from relaygr.engine import EngineCounts, EngineStatus
from relaygr.relay import Health
from relaygr.serving.ranking import RelayRanking

__all__ = [
    "BUCKETS",
    "CONTENT_TYPE",
    "GATEWAY",
    "INSTANCE",
    "EngineTold",
    "GatewayCounts",
    "Histogram",
    "Histograms",
    "InstanceCounts",
    "Kind",
    "Metric",
    "Metrics",
    "markdown",
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


def _one(value: float) -> Values:
    return {(): float(value)}


def _by(counts: Mapping[Any, int]) -> Values:
    return {(str(label),): float(count) for label, count in counts.items()}


# ---- both


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
        "Requests answered, by call (its path, or other) and HTTP status.",
        ("call", "status"),
        lambda app: {(call, str(status)): float(count) for (call, status), count in app.requests.items()},
    ),
    Metric(
        "relaygr_http_request_seconds",
        Kind.HISTOGRAM,
        "From a request's head to its reply, by call.",
        ("call",),
        lambda app: app.seconds,
    ),
    Metric(
        "relaygr_http_requests_under_way",
        Kind.GAUGE,
        "Requests taken and not answered.",
        (),
        lambda app: _one(app.busy),
    ),
    Metric(
        "relaygr_draining",
        Kind.GAUGE,
        "1 while new work is refused before the end.",
        (),
        lambda app: _one(app.draining),
    ),
)

# ---- instance


@dataclass
class InstanceCounts:
    """What a frontend counts itself."""

    slot: str
    decisions: Counter[str] = field(default_factory=Counter)
    """Answers to signals."""
    rank_seconds: Histograms = field(default_factory=lambda: defaultdict(Histogram))
    """By path and part."""
    histories: Counter[str] = field(default_factory=Counter)
    """How calls got their history."""
    engine_up: bool = True


FRONTEND: Final[tuple[Metric[InstanceCounts], ...]] = (
    Metric(
        "relaygr_engine_up",
        Kind.GAUGE,
        "1 if the engine process answered this scrape; without it the engine's metrics are missing.",
        ("slot",),
        lambda counts: {(counts.slot,): float(counts.engine_up)},
    ),
    Metric(
        "relaygr_admission_decisions_total",
        Kind.COUNTER,
        "Signals answered, by decision: ADMIT, RESIDENT, NO_MEMORY, NO_CAPACITY.",
        ("decision",),
        lambda counts: _by(counts.decisions),
    ),
    Metric(
        "relaygr_rank_seconds",
        Kind.HISTOGRAM,
        "Time of a rank in the engine, by path and part: total; prefix, until its scoring step was launched; score.",
        ("path", "part"),
        lambda counts: counts.rank_seconds,
    ),
    Metric(
        "relaygr_histories_total",
        Kind.COUNTER,
        "How signals and ranks got their history: digest (its prefix was cached), carried, store, conflict (409).",
        ("how",),
        lambda counts: _by(counts.histories),
    ),
)


@dataclass(frozen=True)
class EngineTold:
    """What an engine told at a scrape."""

    status: EngineStatus
    counts: EngineCounts


def _pages(told: EngineTold) -> dict[Labels, float]:
    """Every page is in one state: free, used (may be evicted) or pinned (may not)."""
    status = told.status
    tiers = (
        ("device", status.device_pages, status.device_pages_free, status.device_pages_pinned),
        ("host", status.host_pages, status.host_pages_free, status.host_pages_pinned),
    )
    return {
        (tier, state): float(pages)
        for tier, total, free, pinned in tiers
        for state, pages in (("free", free), ("used", total - free - pinned), ("pinned", pinned))
    }


ENGINE: Final[tuple[Metric[EngineTold], ...]] = (
    Metric(
        "relaygr_ranks_total",
        Kind.COUNTER,
        "Ranks answered, by path: RESIDENT, WAITED, RELOADED, EXTENDED, FULL, TRUNCATED.",
        ("path",),
        lambda told: _by(told.status.paths),
    ),
    Metric(
        "relaygr_ranks_resident_left_by_earlier_total",
        Kind.COUNTER,
        "Of the RESIDENT ranks: those whose prefix an earlier request had left.",
        (),
        lambda told: _one(told.status.resident_left_by_earlier),
    ),
    Metric(
        "relaygr_pre_infer_outcomes_total",
        Kind.COUNTER,
        "What became of pre-infers: COMPUTED, EXTENDED, RELOADED, RESIDENT, JOINED, NO_MEMORY, NO_CAPACITY, FAILED.",
        ("outcome",),
        lambda told: _by(told.status.outcomes),
    ),
    Metric(
        "relaygr_prefixes_had_total",
        Kind.COUNTER,
        "What prefixes were had from: RESIDENT or DEVICE (hits in device memory), HOST, IN_FLIGHT, NOTHING (misses).",
        ("source",),
        lambda told: _by(told.counts.sources),
    ),
    Metric(
        "relaygr_tier_pages",
        Kind.GAUGE,
        "Pages by tier (device, host) and state: free, used (may be evicted), pinned (leased or in use).",
        ("tier", "state"),
        _pages,
    ),
    Metric(
        "relaygr_tier_bytes",
        Kind.GAUGE,
        "The same in bytes.",
        ("tier", "state"),
        lambda told: {labels: pages * told.status.page_bytes for labels, pages in _pages(told).items()},
    ),
    Metric(
        "relaygr_tier_prefixes",
        Kind.GAUGE,
        "Prefixes cached, by tier.",
        ("tier",),
        lambda told: _by({"device": told.status.device_prefixes, "host": told.status.host_prefixes}),
    ),
    Metric(
        "relaygr_evictions_total",
        Kind.COUNTER,
        "Prefixes evicted for room, by tier.",
        ("tier",),
        lambda told: _by({"device": told.status.device_evictions, "host": told.status.host_evictions}),
    ),
    Metric(
        "relaygr_reloads_total",
        Kind.COUNTER,
        "Prefixes copied from host to device memory.",
        (),
        lambda told: _one(told.counts.reloads),
    ),
    Metric(
        "relaygr_write_backs_total",
        Kind.COUNTER,
        "Prefixes bound for host memory: written, or dropped because too many waited.",
        ("outcome",),
        lambda told: _by({"written": told.status.written_back, "dropped": told.counts.write_back_dropped}),
    ),
    Metric(
        "relaygr_write_backs_waiting",
        Kind.GAUGE,
        "Prefixes that wait to be copied to host memory.",
        (),
        lambda told: _one(told.status.write_back_waiting),
    ),
    Metric(
        "relaygr_leases",
        Kind.GAUGE,
        "Pre-inferred prefixes kept for ranks to come.",
        (),
        lambda told: _one(told.status.leases),
    ),
    Metric(
        "relaygr_queue_depth",
        Kind.GAUGE,
        "What is under way, by kind: ranks, builds (of prefixes), steps and copies on the device.",
        ("of",),
        lambda told: _by(
            {
                "ranks": told.status.ranks_under_way,
                "builds": told.status.builds_under_way,
                "steps": told.status.steps_in_flight,
                "copies": told.status.copies_in_flight,
            }
        ),
    ),
    Metric(
        "relaygr_queue_wait_seconds",
        Kind.GAUGE,
        "What a rank without hurry would wait for the device now, as predicted.",
        (),
        lambda told: _one(told.status.wait_ms / 1e3),
    ),
    Metric(
        "relaygr_device_busy_seconds_total",
        Kind.COUNTER,
        "Seconds in steps on the device, by work: pre_infer, or rank.",
        ("work",),
        lambda told: {
            ("pre_infer",): told.counts.pre_infer_busy_s,
            ("rank",): told.status.device_busy_s - told.counts.pre_infer_busy_s,
        },
    ),
    Metric(
        "relaygr_faults_total",
        Kind.COUNTER,
        "What failed on the device, by kind: step, copy IN, copy OUT.",
        ("kind",),
        lambda told: _by(told.status.faults),
    ),
    Metric(
        "relaygr_model_epoch",
        Kind.GAUGE,
        "Epoch of the served model's tables, by the model's version.",
        ("version",),
        lambda told: {(told.status.version,): float(told.status.epoch)},
    ),
    Metric(
        "relaygr_cost_model_version",
        Kind.GAUGE,
        "Goes up whenever the cost model is fitted anew.",
        (),
        lambda told: _one(told.status.cost_model_version),
    ),
)

# ---- gateway


@dataclass
class GatewayCounts:
    """What a gateway counts itself."""

    recommendations: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By path and decision."""
    stage_seconds: Histograms = field(default_factory=lambda: defaultdict(Histogram))
    ranking_seconds: Histograms = field(default_factory=lambda: defaultdict(Histogram))
    """By path."""
    behaviours: int = 0


CASCADE: Final[tuple[Metric[GatewayCounts], ...]] = (
    Metric(
        "relaygr_recommendations_total",
        Kind.COUNTER,
        "Recommendations by the rank's path (NONE: nothing was left to rank) and the signal's decision.",
        ("path", "decision"),
        lambda counts: {labels: float(count) for labels, count in counts.recommendations.items()},
    ),
    Metric(
        "relaygr_stage_seconds",
        Kind.HISTOGRAM,
        "Time of a recommendation's stages: retrieval, pre_processing, ranking, total.",
        ("stage",),
        lambda counts: counts.stage_seconds,
    ),
    Metric(
        "relaygr_ranking_seconds",
        Kind.HISTOGRAM,
        "Time of the ranking stage, by the rank's path.",
        ("path",),
        lambda counts: counts.ranking_seconds,
    ),
    Metric(
        "relaygr_behaviours_total",
        Kind.COUNTER,
        "Behaviours appended.",
        (),
        lambda counts: _one(counts.behaviours),
    ),
)


def _health(ranking: RelayRanking) -> dict[Labels, float]:
    members = ranking.membership.members()
    return {(member.slot, health): float(member.health is health) for member in members for health in Health}


def _waits(ranking: RelayRanking) -> dict[Labels, float]:
    reports = {member.slot: ranking.trigger.reported(member.slot) for member in ranking.membership.members()}
    return {(slot,): report.wait_ms / 1e3 for slot, report in reports.items() if report is not None}


RELAY: Final[tuple[Metric[RelayRanking], ...]] = (
    Metric(
        "relaygr_trigger_decisions_total",
        Kind.COUNTER,
        "Whether requests were worth a signal: ADMIT, NOT_AT_RISK, UNAVAILABLE.",
        ("decision",),
        lambda ranking: _by(ranking.trigger.decisions),
    ),
    Metric(
        "relaygr_trigger_margin",
        Kind.GAUGE,
        "The factor by which predicted rank times are exceeded at the trigger's quantile.",
        (),
        lambda ranking: _one(ranking.trigger.margin),
    ),
    Metric(
        "relaygr_placements_total",
        Kind.COUNTER,
        "How messages found slots: PLACED, FOLLOWED (its signal), OVERFLOWED (load), MOVED (slot gone), SCATTERED.",
        ("placement",),
        lambda ranking: _by(ranking.router.placements),
    ),
    Metric(
        "relaygr_retries_total",
        Kind.COUNTER,
        "Messages sent again, by why: conflict (with the whole history), unavailable (to another slot).",
        ("why",),
        lambda ranking: _by(ranking.retries),
    ),
    Metric(
        "relaygr_slot_health",
        Kind.GAUGE,
        "1 for the health a slot has: JOINING, UP, DRAINING, DOWN; 0 for the others.",
        ("slot", "health"),
        _health,
    ),
    Metric(
        "relaygr_slot_load_tokens",
        Kind.GAUGE,
        "Tokens sent to a slot and not yet answered.",
        ("slot",),
        lambda ranking: _by(ranking.router.loads()),
    ),
    Metric(
        "relaygr_slot_wait_seconds",
        Kind.GAUGE,
        "What a rank would wait at a slot, as it last said.",
        ("slot",),
        _waits,
    ),
    Metric(
        "relaygr_membership_transitions_total",
        Kind.COUNTER,
        "What happened to slots: ADDED, READDRESSED, CAME_UP, STARTED_DRAINING, FAILED, REFUSED, REMOVED.",
        ("transition",),
        lambda ranking: _by(ranking.membership.transitions),
    ),
)

INSTANCE: Final[tuple[Metric[Any], ...]] = (*HTTP, *FRONTEND, *ENGINE)
"""All that an instance tells."""
GATEWAY: Final[tuple[Metric[Any], ...]] = (*HTTP, *CASCADE, *RELAY)
"""All that a gateway tells."""


def markdown() -> str:
    """The tables of docs/metrics.md."""
    own = (("Instance", INSTANCE), ("Gateway", GATEWAY))
    sections = [_section("Both", HTTP), *(_section(title, table[len(HTTP) :]) for title, table in own)]
    return "\n".join(sections)


def _section(title: str, table: Sequence[Metric[Any]]) -> str:
    rows = [f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.help} |" for m in table]
    return "\n".join((f"## {title}\n", "| metric | kind | labels | what |", "|---|---|---|---|", *rows, ""))


if __name__ == "__main__":
    sys.stdout.write(markdown())
