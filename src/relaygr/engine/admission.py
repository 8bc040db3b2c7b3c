"""Whether a pre-infer may take memory and device time."""

from dataclasses import dataclass

from relaygr.engine.outcomes import Decision

__all__ = ["Admission", "Demand"]


@dataclass(frozen=True)
class Demand:
    """What a pre-infer asks for, and the state it asks in."""

    pages: int
    """Pages it would pin that nobody has pinned yet."""
    pinned: int
    """Pages pinned now, by anyone."""
    cost_s: float
    """Device time it needs."""
    backlog_s: float
    """Device time that pre-inference already admitted still needs."""
    horizon_s: float
    """Time until its deadline."""


@dataclass(frozen=True)
class Admission:
    """Exact and atomic: decided from counts, at one point of the loop, before anything is reserved."""

    total_pages: int
    reserve_pages: int
    """Kept for ranks: the pages of one history of the longest kind."""
    lease_share: float
    """The share of pages that may be pinned once it is admitted."""
    time_share: float
    """The share of device time that pre-inference may take."""

    def decide(self, demand: Demand) -> Decision:
        leasable = int(self.total_pages * self.lease_share + 1e-9)  # 0.29 of 100 pages is 29 of them
        limit = min(self.total_pages - self.reserve_pages, leasable)
        if demand.pinned + demand.pages > limit:
            return Decision.NO_MEMORY
        if demand.cost_s and demand.backlog_s + demand.cost_s > self.time_share * demand.horizon_s:
            return Decision.NO_CAPACITY
        return Decision.ADMIT
