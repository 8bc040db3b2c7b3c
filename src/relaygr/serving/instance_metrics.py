"""What an instance tells: its frontend's counts, and its engine's."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

from relaygr.engine import EngineCounts, EngineStatus
from relaygr.serving.metrics import HTTP, Histogram, Histograms, Kind, Labels, Metric, by, one

__all__ = ["ENGINE", "FRONTEND", "INSTANCE", "EngineTold", "InstanceCounts"]


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
        lambda counts: by(counts.decisions),
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
        lambda counts: by(counts.histories),
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
        lambda told: by(told.status.paths),
    ),
    Metric(
        "relaygr_ranks_resident_left_by_earlier_total",
        Kind.COUNTER,
        "Of the RESIDENT ranks: those whose prefix an earlier request had left.",
        (),
        lambda told: one(told.status.resident_left_by_earlier),
    ),
    Metric(
        "relaygr_pre_infer_outcomes_total",
        Kind.COUNTER,
        "What became of pre-infers: COMPUTED, EXTENDED, RELOADED, RESIDENT, JOINED, NO_MEMORY, NO_CAPACITY, FAILED.",
        ("outcome",),
        lambda told: by(told.status.outcomes),
    ),
    Metric(
        "relaygr_prefixes_had_total",
        Kind.COUNTER,
        "What prefixes were had from: RESIDENT or DEVICE (hits in device memory), HOST, IN_FLIGHT, NOTHING (misses).",
        ("source",),
        lambda told: by(told.counts.sources),
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
        lambda told: by({"device": told.status.device_prefixes, "host": told.status.host_prefixes}),
    ),
    Metric(
        "relaygr_evictions_total",
        Kind.COUNTER,
        "Prefixes evicted for room, by tier.",
        ("tier",),
        lambda told: by({"device": told.status.device_evictions, "host": told.status.host_evictions}),
    ),
    Metric(
        "relaygr_shortened_total",
        Kind.COUNTER,
        "Times a prefix lost a part of its head for room, which is computed again when its user returns, by tier.",
        ("tier",),
        lambda told: by({"device": told.status.device_shortened, "host": told.status.host_shortened}),
    ),
    Metric(
        "relaygr_reloads_total",
        Kind.COUNTER,
        "Prefixes copied from host to device memory.",
        (),
        lambda told: one(told.counts.reloads),
    ),
    Metric(
        "relaygr_write_backs_total",
        Kind.COUNTER,
        "Prefixes bound for host memory: written, or dropped because too many waited.",
        ("outcome",),
        lambda told: by({"written": told.status.written_back, "dropped": told.counts.write_back_dropped}),
    ),
    Metric(
        "relaygr_write_backs_waiting",
        Kind.GAUGE,
        "Prefixes that wait to be copied to host memory.",
        (),
        lambda told: one(told.status.write_back_waiting),
    ),
    Metric(
        "relaygr_leases",
        Kind.GAUGE,
        "Pre-inferred prefixes kept for ranks to come.",
        (),
        lambda told: one(told.status.leases),
    ),
    Metric(
        "relaygr_queue_depth",
        Kind.GAUGE,
        "What is under way, by kind: ranks, builds (of prefixes), steps and copies on the device.",
        ("of",),
        lambda told: by(
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
        lambda told: one(told.status.wait_ms / 1e3),
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
        lambda told: by(told.status.faults),
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
        lambda told: one(told.status.cost_model_version),
    ),
    Metric(
        "relaygr_cost_model_error",
        Kind.GAUGE,
        "Of the last steps, the median of how far their time was off what was predicted, as a share of it.",
        (),
        lambda told: one(told.status.cost_model_error),
    ),
)

INSTANCE: Final[tuple[Metric[Any], ...]] = (*HTTP, *FRONTEND, *ENGINE)
"""All that an instance tells."""
