"""Pre-infers from their arrival to their answer.

take ─┬─ refused: no memory, no capacity ──────────────────▶ answered
      ├─ resident ─────────────▶ claimed ──────────────────▶ answered
      ├─ in flight, or begun ──▶ claimed ──▶ its build ends ▶ answered
      └─ more than what is in flight: taken again when that has ended
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np

from relaygr.cache import Option, Source, Tier
from relaygr.clock import Clock
from relaygr.engine.admission import Admission, Backlog, Demand
from relaygr.engine.builds import Builds
from relaygr.engine.claims import Claims
from relaygr.engine.outcomes import Decision, Path, PreInferOutcome
from relaygr.engine.ranks import Choose, resident
from relaygr.engine.work import Build, PreInfer
from relaygr.errors import HistoryNeeded
from relaygr.history import PAGE, KnownHistory
from relaygr.shown import shown

__all__ = ["PreInfers"]

_OUTCOMES: Final = {
    Path.FULL: PreInferOutcome.COMPUTED,
    Path.EXTENDED: PreInferOutcome.EXTENDED,
    Path.RELOADED: PreInferOutcome.RELOADED,
}


class PreInfers:
    """Decides about pre-infers, and answers them."""

    def __init__(
        self,
        tier: Tier,
        builds: Builds,
        claims: Claims,
        admission: Admission,
        backlog: Backlog,
        choose: Choose,
        clock: Clock,
        turn_soon: Callable[[], None],
    ) -> None:
        self.outcomes: Counter[PreInferOutcome] = Counter()
        self._under_way: dict[PreInfer, None] = {}
        """Calls that have no answer yet."""
        self._tier = tier
        self._builds = builds
        self._claims = claims
        self._admission = admission
        self._backlog = backlog
        self._choose = choose
        self._clock = clock
        self._turn_soon = turn_soon

    def begin(self, call: PreInfer) -> None:
        """A call that has just come; see `take`."""
        self.take(call)
        if not call.over:
            self._under_way[call] = None
            call.future.add_done_callback(lambda _: self._under_way.pop(call))

    def take(self, call: PreInfer) -> None:
        """Decide about a pre-infer, and begin it if admitted. A refusal reserves nothing."""
        if call.over:
            return
        option, joined = self._choose(call, call.deadline, call.deadline)
        exact = option.source is Source.RESIDENT or (joined is not None and joined.prefix.length == len(call.history))
        if isinstance(call.history, KnownHistory) and not exact:
            call.future.set_exception(HistoryNeeded(f"the prefix of {shown(call.user)} is not cached"))
        elif joined is not None and not exact:
            tokens = call.lineage.context_tokens + len(call.history)
            if self._admit(call, option.device_s, -(-tokens // PAGE) - len(joined.prefix.pages)):
                joined.due = min(joined.due, call.deadline)
                joined.waiting.append(call)
        else:
            self._take(call, option, joined)

    def _take(self, call: PreInfer, option: Option, joined: Build | None) -> None:
        """What it asks for is there, being made (`joined`), or to be begun."""
        if joined is not None:
            pages, need = joined.prefix.pages, 0
        elif option.source is Source.RESIDENT:
            pages = resident(self._tier, call).pages
            need = self._tier.pool.unpinned(pages)
        else:
            shared, copied, new = self._builds.pages_for(call.user, call.lineage, len(call.history), option)
            need = new + self._tier.pool.unpinned(np.concatenate((shared, copied)))
        if not self._admit(call, option.device_s if joined is None else 0.0, need):
            return
        build, outcome = joined, PreInferOutcome.JOINED
        if option.source is Source.RESIDENT:
            self._tier.touch(call.user)
            outcome = PreInferOutcome.RESIDENT
            self._builds.sources[option.source] += 1
        elif joined is None:
            build = self._builds.start(call, option, call.deadline, keep=True)
            assert build is not None, "admission has counted the pages"
            pages, outcome = build.prefix.pages, _OUTCOMES[build.made]
        else:
            self._builds.sources[option.source] += 1
        self._claims.add(call.user, call.lineage, pages, build, self._clock.now())
        if build is None or build.ended:
            self.answer(call, outcome)
        else:
            build.due = min(build.due, call.deadline)
            build.calls.append((call, outcome))
        self._turn_soon()

    def expire(self, call: PreInfer) -> None:
        """The pre-infer's deadline is here, or its caller has gone: the work goes on until the lease ends."""
        self.answer(call, PreInferOutcome.FAILED)

    def refuse(self, build: Build) -> None:
        """Those it was begun for are refused after all: its time goes to others."""
        for call, _ in build.calls:
            self.answer(call, PreInferOutcome.NO_CAPACITY)
        self._backlog.add(-build.cost_s)

    def fail_all(self) -> None:
        """Whoever waits, waits in vain."""
        for call in self._under_way:
            self.answer(call, PreInferOutcome.FAILED)

    def fail_waiting(self, build: Build) -> None:
        """Those who wait to extend what it makes will not."""
        for work in build.waiting:
            if isinstance(work, PreInfer):
                self.answer(work, PreInferOutcome.FAILED)

    def answer(self, call: PreInfer, outcome: PreInferOutcome) -> None:
        """Unless it has its answer."""
        if not call.over:
            self.outcomes[outcome] += 1
            call.future.set_result(outcome)

    def _admit(self, call: PreInfer, cost_s: float, pages: int) -> bool:
        """Whether it may take these pages and this time; else it is answered. Time it was admitted for is not asked of
        it again."""
        now = self._clock.now()
        cost_s = max(0.0, cost_s - call.admitted_s)
        backlog_s = max(self._builds.pre_infer_s(), self._backlog.left(now))
        decision = self._admission.decide(
            Demand(pages, self._tier.pool.pinned, cost_s, backlog_s, horizon_s=call.deadline - now)
        )
        if decision is Decision.ADMIT:
            self._backlog.add(cost_s)
            call.admitted_s += cost_s
            return True
        self.answer(call, PreInferOutcome(decision.value))
        return False
