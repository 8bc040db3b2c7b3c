"""Whether a pre-infer may take memory and device time."""

from dataclasses import dataclass

from relaygr.engine.outcomes import Decision

__all__ = ["Admission", "Backlog", "Demand"]


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
    """Device time that pre-inference already admitted still needs, or would if it had but its share."""
    horizon_s: float
    """Time until its deadline."""


class Backlog:
    """What was admitted, as if it ran on its share of the device alone: so pre-inference takes no more than that share,
    however long admission goes on. It may be done sooner, while the device has nothing else to do."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._seconds = 0.0
        self._at = 0.0

    def left(self, now: float) -> float:
        """Seconds of device time."""
        self._seconds = max(0.0, self._seconds - self._share * (now - self._at))
        self._at = now
        return self._seconds

    def add(self, seconds: float) -> None:
        """Less than none: of what was admitted so much is not to run."""
        self._seconds = max(0.0, self._seconds + seconds)


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
