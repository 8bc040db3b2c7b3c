"""What waits for the device, and how long work that is due at some time would wait behind it."""

import math
from collections.abc import Collection, Iterable

from relaygr.clock import Clock
from relaygr.engine.builds import Builds
from relaygr.engine.cost import CostModel
from relaygr.engine.device import Device
from relaygr.engine.work import Build, Rank

__all__ = ["Waits"]


class Waits:
    """Sums of predicted device time, in the scheduler's order: scores, then appends, then what can no longer be in
    time, which counts for nobody."""

    def __init__(
        self, device: Device, builds: Builds, ready: Iterable[Rank], cost: CostModel, clock: Clock, step_s: float
    ) -> None:
        """`step_s`: about how long steps are."""
        self._device = device
        self._builds = builds
        self._ready = ready
        self._cost = cost
        self._clock = clock
        self._step_s = step_s

    def wait_s(self, due: float = math.inf) -> float:
        """How long an append due then would wait: for what is in flight, and for all that comes before it."""
        return self._device.left_s + self.before_append_s(due)

    def before_append_s(self, due: float, but: Collection[Build | None] = ()) -> float:
        """Of all that is not in flight and comes before an append due then, `but` for the tokens of these builds."""
        now, work_s = self._clock.now(), 0.0
        for build in self._before(due, now):
            if build.ranks:
                work_s += build.scoring_s
            if build not in but:
                work_s += build.cost_s
        for rank in self._ready:
            if (rank.deadline < math.inf or rank.due <= due) and not rank.hopeless(now):
                work_s += rank.cost_s
        return self.in_steps(work_s)

    def before_score_s(self, due: float) -> float:
        """Of all that is not in flight and comes before a score due then: scores that have a deadline before it."""
        now = self._clock.now()
        return self.in_steps(
            sum([
                rank.cost_s
                for rank in self._ready
                if rank.due <= due and rank.deadline < math.inf and not rank.hopeless(now)
            ])
        )  # fmt: skip

    def costliest(self, due: float, more_than_s: float) -> Build | None:
        """Of prefixes that come before an append due then, and whose ranks have not come yet, the one that has most
        left to run, if that is more than so long."""
        ahead = (
            build
            for build in self._before(due, self._clock.now())
            if build.cost_s > more_than_s and build.pre_infer and not build.ranks and not build.waiting
        )
        return max(ahead, key=lambda build: build.cost_s, default=None)

    def _before(self, due: float, now: float) -> list[Build]:
        """Builds that come before an append due then. They are many, and asked for with every call: most have no rank
        yet, and nothing more is asked of these."""
        return [build for build in self._builds if build.due <= due and not (build.ranks and build.hopeless(now))]

    def in_steps(self, work_s: float) -> float:
        """This much work with what every step costs by itself."""
        fixed = self._cost.step_s
        return work_s * (1 + fixed / max(self._step_s - fixed, fixed, 1e-9))
