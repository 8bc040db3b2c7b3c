"""What waits for the device, and how long work that is due at some time would wait behind it."""

import math
from collections.abc import Iterable

from relaygr.clock import Clock
from relaygr.engine.builds import Builds
from relaygr.engine.cost import CostModel
from relaygr.engine.device import Device
from relaygr.engine.work import Build, Rank

__all__ = ["Queue"]


class Queue:
    """Sums of predicted device time over what is in flight, the builds, and the ranks ready to be scored."""

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

    @property
    def in_flight_s(self) -> float:
        return self._device.left_s

    def wait_s(self, due: float = math.inf) -> float:
        """How long work due then would wait: what is in flight, and all that is in front of it."""
        return self.in_flight_s + self.before_s(due)

    def before_s(self, due: float) -> float:
        """Of all that is not in flight, is due before then, and can still be in time."""
        now, builds = self._clock.now(), [build for build in self._builds if build.due <= due]
        work_s = sum([build.cost_s + build.scoring_s for build in builds if not build.hopeless(now)])
        return self._in_steps(work_s) + self.scores_before_s(due)

    def scores_before_s(self, due: float) -> float:
        """Of the scores that come before those of a rank due then."""
        return self._in_steps(sum([rank.cost_s for rank in self._ready if rank.due <= due]))

    def share_s(self, build: Build) -> float:
        """Of this build and the ranks that wait for it alone."""
        return self._in_steps(build.cost_s + build.scoring_s)

    def _in_steps(self, work_s: float) -> float:
        """With what every step costs by itself."""
        fixed = self._cost.step_s
        return work_s * (1 + fixed / max(self._step_s - fixed, fixed, 1e-9))
