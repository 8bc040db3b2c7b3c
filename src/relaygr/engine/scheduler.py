"""What runs next: scores, then appends, each the earliest deadline first, packed into a step.

A rank that only has to be scored comes before what is appended: scoring is the last and the least of a request's work.
In one order of deadlines, under overload, prefixes of requests to come would be made while those that have theirs
become late. A rank without a deadline has the time to wait among the appends.

Work that can no longer be in time for anybody comes behind all that can: under overload it would be done first, as the
most urgent, for nobody, and make others late in turn.
"""

import bisect
import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from relaygr.engine.cost import CostModel
from relaygr.engine.step import Served
from relaygr.engine.work import Build, Rank
from relaygr.history import PAGE

__all__ = ["Plan", "Scheduler"]

_OF_DEADLINE: Final = 0.9
"""The share of a rank's time that its step may be filled up to: predictions are right within some percent."""
_LONG: Final = 20.0
"""How many times what any step costs its appends must take for scores not to wait for them."""


class Plan(NamedTuple):
    """A step to launch: chunks low … high of builds, and ranks to score."""

    served: Served
    appends: list[tuple[Build, int, int]]
    ends: dict[Build, int]
    """How far each of its builds goes: those that get a head have two chunks."""
    scores: list[Rank]
    cost_s: float


class Scheduler:
    """Plans steps of about `step_s` seconds. Pure: it reads the work and changes none of it.

    Chunks are multiples of the model's `grain`, where that is more than a page and one of them is long enough.
    """

    def __init__(self, cost: CostModel, step_s: float) -> None:
        self._cost = cost
        self._step_s = step_s

    def plan(
        self, builds: Iterable[Build], ranks: Iterable[Rank], now: float, in_flight_s: float, *, apart: bool = False
    ) -> Plan | None:
        """The next step, or None if there is nothing to run. It begins when what is in flight has ended.

        The most urgent work is always in it, whatever it costs, though never more than a chunk; more is packed in order
        of urgency while the step stays within its time, and within the deadlines of the ranks in it, which are answered
        at its end. A build's ranks may score in the step that runs its last chunk. All of a step's work is of one
        model.

        `apart`: whether scores may go in a step of their own, ahead of appends that would take long. Not in every step:
        what is appended must go on.
        """
        queue: list[_Place] = [(build.hopeless(now), True, build.due, build.order, build) for build in builds]
        queue += _places(ranks, now)
        if not queue:
            return None
        queue.sort()
        served = queue[0][4].served
        appends: list[tuple[Build, int, int]] = []
        ends: dict[Build, int] = {}
        scores: list[Rank] = []
        cost_s, most_s, latest_s, begins = self._cost.step_s, self._step_s, math.inf, now + in_flight_s
        ahead: Plan | None = None
        for number, (_, _, _, _, work) in enumerate(queue, 1):  # grows while it is gone through
            if work.served is not served:
                continue
            if isinstance(work, Rank):
                with_it_s = cost_s + work.cost_s
                if with_it_s > most_s and (scores or appends):
                    break
                scores.append(work)
                cost_s = with_it_s
                if begins + cost_s <= work.deadline:  # else it is late, whatever comes with it
                    fills_s = _OF_DEADLINE * (work.deadline - begins)
                    if fills_s < latest_s:
                        latest_s = fills_s
                        most_s = min(most_s, latest_s)
                continue
            low = work.launched
            first = not appends and not scores
            high = self._chunk_end(work, low, most_s - cost_s, at_least_one=first, crumbs=not appends)
            if high == low:
                break
            if apart and scores and not appends:
                ahead = Plan(served, [], {}, scores.copy(), cost_s)
            while high > low:
                appends.append((work, low, high))
                ends[work] = high
                cost_s += self._cost.append_s(high - low, low)
                low, head = work.behind(high), high == work.head
                # Behind a head, what is new: in the same step, also where it takes no longer than another would.
                left = max(most_s - cost_s, min(self._cost.step_s, latest_s - cost_s))
                high = self._chunk_end(work, low, left, at_least_one=False, crumbs=False) if head else low
            if low == work.prefix.tokens:
                for rank in work.ranks:
                    if not rank.over:
                        (place,) = _places((rank,), now)
                        bisect.insort(queue, place, lo=number)
        if ahead is not None and cost_s - ahead.cost_s > _LONG * self._cost.step_s:
            return ahead
        return Plan(served, appends, ends, scores, cost_s)

    def _chunk_end(self, build: Build, low: int, left_s: float, *, at_least_one: bool, crumbs: bool) -> int:
        """How far the build's chunk from `low` may go: to its end, or to the end of a page, in the time that is left.

        To the end of a grain rather, the nearest, by which a step may become longer by half a grain. `crumbs`: whether
        less than half a grain will do: a long build goes on in steps that have little time for it.
        """
        end = build.until(low)
        if self._cost.append_s(end - low, low) <= left_s:
            return end
        first_page = low // PAGE + 1
        fits, most = first_page - 1, (end - 1) // PAGE
        while fits < most:
            middle = (fits + most + 1) // 2
            if self._cost.append_s(middle * PAGE - low, low) <= left_s:
                fits = middle
            else:
                most = middle - 1
        grain = build.served.grain // PAGE
        grains = (fits - first_page + 1 + grain // 2) // grain
        if grains:
            return min((first_page - 1 + grains * grain) * PAGE, end)
        if crumbs and fits >= first_page:
            return fits * PAGE
        return min(first_page * PAGE, end) if at_least_one else low


_Place = tuple[bool, bool, float, int, Build | Rank]
"""Where some work stands in the order: the least is the most urgent."""


def _places(ranks: Iterable[Rank], now: float) -> list[_Place]:
    never = math.inf
    return [(now + rank.cost_s > rank.deadline, rank.deadline == never, rank.due, rank.order, rank) for rank in ranks]
