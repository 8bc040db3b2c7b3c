"""What a gateway tells: of its cascade, its trigger, its router and its slots."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

from relaygr.relay import Health
from relaygr.serving.metrics import HTTP, Histogram, Histograms, Kind, Labels, Metric, by, one
from relaygr.serving.ranking import RelayRanking

__all__ = ["CASCADE", "GATEWAY", "RELAY", "GatewayCounts"]


@dataclass
class GatewayCounts:
    """What a gateway counts itself."""

    recommendations: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By path and decision."""
    stage_seconds: Histograms = field(default_factory=lambda: defaultdict(Histogram))
    ranking_seconds: Histograms = field(default_factory=lambda: defaultdict(Histogram))
    """By path."""
    behaviours: int = 0
    stale: int = 0


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
        lambda counts: one(counts.behaviours),
    ),
    Metric(
        "relaygr_stale_recommendations_total",
        Kind.COUNTER,
        "Recommendations on the history that was read last, because the store did not answer.",
        (),
        lambda counts: one(counts.stale),
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
        lambda ranking: by(ranking.trigger.decisions),
    ),
    Metric(
        "relaygr_trigger_margin",
        Kind.GAUGE,
        "The factor by which predicted rank times are exceeded at the trigger's quantile.",
        (),
        lambda ranking: one(ranking.trigger.margin),
    ),
    Metric(
        "relaygr_placements_total",
        Kind.COUNTER,
        "How messages found slots: PLACED, FOLLOWED (its signal), OVERFLOWED (load), MOVED (slot gone), SCATTERED.",
        ("placement",),
        lambda ranking: by(ranking.router.placements),
    ),
    Metric(
        "relaygr_retries_total",
        Kind.COUNTER,
        "Messages sent again, by why: conflict (with the whole history), unavailable (to another slot).",
        ("why",),
        lambda ranking: by(ranking.retries),
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
        lambda ranking: by(ranking.router.loads()),
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
        lambda ranking: by(ranking.membership.transitions),
    ),
)

GATEWAY: Final[tuple[Metric[Any], ...]] = (*HTTP, *CASCADE, *RELAY)
"""All that a gateway tells."""
