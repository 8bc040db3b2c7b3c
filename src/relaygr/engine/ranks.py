"""Ranks from their arrival to their answer.

take ──▶ resolve ─┬─ resident ───────────────▶ ready ──▶ scored
            ▲     ├─ in flight: join its build ──▲
            │     ├─ reload, extend, compute ────┤ all tokens launched
            │     └─ no pages yet: starved       │
            └───── again: something failed ◀─────┘
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr.cache import Option, Prefix, Source, Tier
from relaygr.clock import Clock
from relaygr.config import OnMiss
from relaygr.engine.builds import Builds
from relaygr.engine.cost import CostModel
from relaygr.engine.device import Device
from relaygr.engine.outcomes import Path, Ranked, Timings
from relaygr.engine.step import PageCopy
from relaygr.engine.waits import Waits
from relaygr.engine.work import Build, BuildState, PreInfer, Rank
from relaygr.errors import DeadlineExceeded, HistoryNeeded, Overloaded, Unavailable
from relaygr.history import KnownHistory
from relaygr.model.batch import ScoreRow
from relaygr.shown import shown

__all__ = ["Choose", "Ranks", "resident"]

MAX_ATTEMPTS: Final = 8
"""How often a rank is tried on a device that fails before it is told so."""
DOUBT: Final = 0.1
"""How much longer than predicted what waits may take, beside twice what steps have been off on average: a device that
others use, too, is slow for a while rather than for a step."""
COSTLIER: Final = 2.0
"""How many times what a rank has to run must be left of a prefix that is given up for it."""
SAFETY: Final = 0.8
"""The share of the time left that a truncated rank is cut to fit."""

Choose = Callable[[Rank | PreInfer, float, float], tuple[Option, Build | None]]
"""From work, when it is due and when its prefix is needed: the way to it, and the build to join if that is the way."""


def resident(tier: Tier, work: Rank | PreInfer) -> Prefix:
    """What the device tier holds of exactly this work's history; it must hold it."""
    prefix = tier.find(work.user)
    assert prefix is not None
    return prefix.first(len(work.history))


class Ranks:
    """All ranks under way, and which of them can be scored."""

    def __init__(
        self,
        tier: Tier,
        builds: Builds,
        cost: CostModel,
        clock: Clock,
        choose: Choose,
        give_up: Callable[[Build, bool], None],
        device: Device,
        step_s: float,
        on_miss: OnMiss,
    ) -> None:
        """`step_s`: about how long steps are."""
        self.paths: Counter[Path] = Counter()
        self.ready: dict[Rank, None] = {}
        """To score: their prefixes are there, or will be by the time the step reaches them."""
        self._under_way: dict[Rank, None] = {}
        self._starved: dict[Rank, None] = {}
        """Waiting for pages, holding nothing."""
        self._tier = tier
        self._builds = builds
        self._cost = cost
        self._clock = clock
        self._choose = choose
        self._give_up = give_up
        self._device = device
        self.waits = Waits(device, builds, self.ready, cost, clock, step_s)
        self._on_miss = on_miss

    def __len__(self) -> int:
        return len(self._under_way)

    def take(self, rank: Rank) -> None:
        """Begin a rank. Its future is answered when it is scored or expires; `leave` must follow."""
        self._under_way[rank] = None
        self.resolve(rank)

    def leave(self, rank: Rank) -> None:
        """The caller has its answer, or has gone: what only this rank wanted is given up."""
        rank.future.cancel()
        self._under_way.pop(rank, None)
        if rank.launched is None:
            self._let_go(rank)

    def expire(self, rank: Rank) -> None:
        """The rank's deadline is here."""
        if not rank.over:
            rank.future.set_exception(DeadlineExceeded(f"the rank of {shown(rank.user)} was not done by its deadline"))
            self.ready.pop(rank, None)

    def cut(self, rank: Rank) -> None:
        """Most of the rank's time has passed. If its prefix is not there yet, stop waiting and truncate."""
        if not rank.over and rank.launched is None and rank not in self.ready and rank.path is not Path.TRUNCATED:
            self._truncate(rank)

    def forget(self, user: str) -> None:
        """Nothing that this user's ranks under way still make is kept."""
        for rank in self._under_way:
            if rank.user == user:
                rank.keep = False

    def answer_all(self, error: Unavailable) -> None:
        """Whoever waits gets this error, and nothing else changes."""
        for rank in self._under_way:
            if not rank.over:
                rank.future.set_exception(error)
                rank.future.exception()  # where nobody asks for it any more, that needs no line in the log

    def refuse_all(self) -> None:
        """The engine is closing."""
        self.answer_all(Unavailable("the engine is closing"))
        for rank in list(self._under_way):
            self.leave(rank)

    def feed_starved(self) -> None:
        """Try those that wait for pages, the most urgent first: no later one takes the pages it waits for."""
        if not self._starved:  # as nearly always, and this is asked with every turn
            return
        for rank in sorted(self._starved, key=lambda rank: (rank.due, rank.order)):
            del self._starved[rank]
            self.resolve(rank)
            if rank in self._starved:
                break

    def resolve(self, rank: Rank) -> None:
        """Find this rank its prefix: there, joined, begun, or waiting for pages."""
        if rank.over:
            return
        rank.load = load = len(rank.candidates.kept), rank.lineage.context_tokens + len(rank.history)
        rank.cost_s = self._cost.score_s(*load)
        needed = rank.deadline - rank.cost_s - self._cost.step_s
        option, joined = self._choose(rank, rank.due, needed)
        exact = option.source is Source.RESIDENT or (joined is not None and joined.prefix.length == len(rank.history))
        if isinstance(rank.history, KnownHistory) and not exact:
            self._ask(rank, "is not cached")
        elif self._on_miss == "truncate" and option.ready > needed:
            self._truncate(rank)
        elif not self._room_for(rank, option, joined, needed):
            kind = Unavailable if rank.attempts else Overloaded  # it would be in time, had the device not failed
            rank.future.set_exception(kind(f"too much waits for the device to rank {shown(rank.user)} in time"))
        elif option.source is Source.RESIDENT:
            self._tier.touch(rank.user)
            self._builds.sources[option.source] += 1
            self._attach(rank, resident(self._tier, rank), None)
            self.ready[rank] = None
        elif joined is None:
            self._begin(rank, option)
        else:
            rank.path = rank.path.costlier(Path.WAITED)
            joined.due = joined.due_for(rank)
            if exact:
                self._builds.sources[option.source] += 1
                self._join(rank, joined)
            else:
                rank.build = joined
                joined.waiting.append(rank)

    def _room_for(self, rank: Rank, option: Option, joined: Build | None, needed: float) -> bool:
        """Whether it is worth trying; not where it would be late for no other reason than what waits in front of it.

        To try it all the same would make those late that come behind it, and they those behind them. Where nobody else
        waits there is no harm in trying, however likely it is to fail.
        A prefix in front that has much more left to run, and whose own rank has not come yet, is given up where that is
        enough: others may be answered in its time, and its rank may find the time for the rest of it yet.
        """
        if rank.deadline == math.inf or (self._on_miss == "truncate" and option.source is not Source.RESIDENT):
            return True
        now, due, work_s = self._clock.now(), rank.due, option.device_s
        if joined is not None:  # this rank waits for what is left of it
            work_s += joined.cost_s
            due = joined.due_for(rank) if joined.prefix.length == len(rank.history) else due
        arrives = now
        if option.source is Source.HOST:
            arrives += self._cost.copy_s(option.copied)
        own = self.waits.in_steps(work_s)
        if arrives + own > needed:
            return True

        def late(others: float) -> bool:
            ready = max(arrives, now + self._device.left_s + others) + own
            return ready + (DOUBT + 2 * self._cost.off) * others > needed

        others = self.waits.before_append_s(due, (joined,)) if work_s else self.waits.before_score_s(due)
        if not others or not late(others):
            return True
        costliest = self.waits.costliest(due, COSTLIER * work_s) if work_s else None
        if costliest is None or late(self.waits.before_append_s(due, (joined, costliest))):
            return False
        # What has run of it is kept, but not in place of what this rank is to be made from.
        self._give_up(costliest, costliest.prefix.user != rank.user)
        return True

    def again(self, rank: Rank) -> None:
        """Something this rank relied on failed: a miss. Resolve it anew."""
        rank.launched = None
        self._let_go(rank)
        if rank.over:
            return
        rank.attempts += 1
        if rank.attempts >= MAX_ATTEMPTS:
            rank.future.set_exception(Unavailable(f"the device failed {rank.attempts} times"))
        elif rank.path is Path.TRUNCATED:
            self._begin(rank, Option(Source.NOTHING, 0, self._clock.now(), 0.0))
        else:
            self.resolve(rank)

    def launched(self, ranks: Sequence[Rank]) -> tuple[list[ScoreRow], list[PageCopy]]:
        """The step that scores them is launched now: what of each it is to score, and what of that is still copied."""
        now, ready = self._clock.now(), self.ready
        rows, reloads = [], []
        for rank in ranks:
            del ready[rank]
            rank.launched = now
            assert rank.row is not None
            rows.append(rank.row)
            if rank.build is not None and rank.build.reload is not None:
                reloads.append(rank.build.reload)
        return rows, reloads

    def scored(self, ranks: Sequence[Rank], scores: Sequence[npt.NDArray[np.float32]], seconds: float) -> None:
        """Answer with what the device computed, in a step that took so long; ranks whose build failed begin again."""
        now, score_ms, paths = self._clock.now(), seconds * 1e3, self.paths
        new = tuple.__new__  # half of what the classes themselves take: this is in the way of every step
        leases = []
        for rank, values in zip(ranks, scores, strict=True):
            build = rank.build
            if build is not None and build.state is not BuildState.DONE:
                self.again(rank)
                continue
            launched, future, row, lease = rank.launched, rank.future, rank.row, rank.lease
            if not future.done():
                assert row is not None
                assert launched is not None
                arrived, path = rank.arrived, rank.path
                paths[path] += 1
                timings = new(Timings, ((now - arrived) * 1e3, (launched - arrived) * 1e3, score_ms))
                future.set_result(new(Ranked, (values, path, row.position, rank.epoch, timings)))
                rank.scored = True
            if build is None and lease is not None:  # it waits in no list
                leases.append(lease)
                rank.lease = None
            else:
                self._let_go(rank)
        self._tier.pool.end_leases(leases)

    def _begin(self, rank: Rank, option: Option) -> None:
        """Build the prefix in the way the option says, or wait for pages, behind whoever waits and is more urgent."""
        urgency = rank.due, rank.order
        build = None
        if not any((other.due, other.order) < urgency for other in self._starved):
            keep = rank.keep and rank.path is not Path.TRUNCATED
            build = self._builds.start(rank, option, rank.due, keep=keep)
        if build is None:
            self._starved[rank] = None
        else:
            rank.path = rank.path.costlier(build.made)
            self._join(rank, build)

    def _truncate(self, rank: Rank) -> None:
        """Rank on the newest behaviours that fit into the time left."""
        self._let_go(rank)
        if isinstance(rank.history, KnownHistory):
            self._ask(rank, "is late")
            return
        left = SAFETY * (rank.deadline - self._clock.now()) / self._cost.margin
        left -= self.waits.wait_s(rank.due) + self._cost.step_s
        context, candidates = rank.lineage.context_tokens, len(rank.candidates)
        length = self._cost.longest_cut(len(rank.history), context, candidates, left)
        rank.path = Path.TRUNCATED
        rank.history = rank.history[len(rank.history) - length :]
        rank.lineage = rank.lineage._replace(start=rank.history.start)
        rank.load = candidates, context + length
        rank.cost_s = self._cost.score_s(*rank.load)
        self._begin(rank, Option(Source.NOTHING, 0, self._clock.now(), 0.0))

    def _ask(self, rank: Rank, why: str) -> None:
        """Ask the caller for the behaviours: its prefix is not there, or not in time."""
        rank.history_needed = True
        rank.future.set_exception(HistoryNeeded(f"the prefix of {shown(rank.user)} {why}"))

    def _attach(self, rank: Rank, prefix: Prefix, build: Build | None) -> None:
        """This is what the rank scores on: pin it."""
        pages = prefix.pages
        trays = rank.served.trays
        make = ScoreRow if trays is None else trays.ahead
        rank.row = make(rank.candidates, rank.request, prefix.length, prefix.tokens, pages, prefix.listed)
        rank.epoch, rank.build = prefix.lineage.epoch, build
        rank.lease = self._tier.pool.lease(rank.user, pages)

    def _join(self, rank: Rank, build: Build) -> None:
        """The rank scores on exactly what this build makes."""
        self._attach(rank, build.prefix, build)
        build.ranks.append(rank)
        if build.all_launched:
            self.ready[rank] = None

    def _let_go(self, rank: Rank) -> None:
        """Undo `_attach`, and take the rank from every list it waits in."""
        self.ready.pop(rank, None)
        self._starved.pop(rank, None)
        build, lease, rank.lease, rank.build = rank.build, rank.lease, None, None
        if lease is not None:
            self._tier.pool.end_leases((lease,))
        if build is not None:
            if rank in build.ranks:
                build.ranks.remove(rank)
            if rank in build.waiting:
                build.waiting.remove(rank)
            self._builds.abandon_if_unwanted(build)
