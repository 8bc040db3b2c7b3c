"""Builds from start to end: pages reserved all at once, appended to in place or after a copy, kept or not."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from relaygr.cache import Lease, Lineage, Option, Pages, Prefix, Source, Tier
from relaygr.engine.cost import CostModel
from relaygr.engine.device import Copy
from relaygr.engine.outcomes import Path
from relaygr.engine.step import Direction, PageCopy
from relaygr.engine.work import Build, BuildState, PreInfer, Rank
from relaygr.history import PAGE, History, KnownHistory

__all__ = ["Builds"]

NO_PAGES: Final[Pages] = np.empty(0, np.int64)


class Builds:
    """Prefixes being made, on pages they own.

    `ended` is called once for each build that is done or has failed, before its own pins are let go; `arriving` when
    what is copied from host memory is nearly all there.
    """

    def __init__(
        self,
        device: Tier,
        host: Tier,
        cost: CostModel,
        copy: Copy,
        ended: Callable[[Build], None],
        arriving: Callable[[Build], None],
        accept_epochs: int,
        orders: Iterator[int],
    ) -> None:
        self.sources: Counter[Source] = Counter()
        """What prefixes were had from: counted whenever a rank or a pre-infer got one."""
        self.reloads = 0
        """Copies from host memory that ended well."""
        self._device = device
        self._host = host
        self._cost = cost
        self._copy = copy
        self._ended = ended
        self._arriving = arriving
        self._accept_epochs = accept_epochs
        self._orders = orders
        self._running: dict[Build, None] = {}
        self._joinable: dict[str, list[Build]] = {}

    def __iter__(self) -> Iterator[Build]:
        """Those that have not ended."""
        return iter(self._running)

    def runnable(self) -> Iterator[Build]:
        """Those with tokens to launch."""
        return (build for build in self._running if build.runnable)

    def pre_infer_s(self) -> float:
        """Device time that admitted pre-inference still needs."""
        return sum(build.cost_s for build in self._running if build.pre_infer)

    def joinable(self, user: str, lineage: Lineage, history: History | KnownHistory) -> Build | None:
        """The build that will hold the most of this history, if any will hold a part of it and nothing else."""
        best = None
        for build in self._joinable.get(user, ()):
            prefix = build.prefix
            if (
                prefix.length <= len(history)
                and (best is None or prefix.length > best.prefix.length)
                and prefix.lineage.serves(lineage, self._accept_epochs)
                and prefix.agrees(history) == prefix.length
            ):
                best = build
        return best

    def pages_for(self, user: str, lineage: Lineage, length: int, option: Option) -> tuple[Pages, Pages, int]:
        """What a build would need: pages it would share, the page it would copy (or none), and how many new ones."""
        count = -(-(lineage.context_tokens + length) // PAGE)
        if option.source is not Source.DEVICE:
            return NO_PAGES, NO_PAGES, count
        prefix = self._device.find(user)
        assert prefix is not None
        shared, rest = divmod(lineage.context_tokens + option.base, PAGE)
        shared -= prefix.missing
        copied = NO_PAGES
        if rest and (option.base == length or self._device.pool.filled(int(prefix.pages[shared])) <= rest):
            shared += 1  # nothing is appended, or nobody has written behind the base: append in place
        elif rest:
            copied = prefix.pages[shared : shared + 1]
        return prefix.pages[:shared], copied, count - shared

    def start(self, work: Rank | PreInfer, option: Option, due: float, *, keep: bool) -> Build | None:
        """Reserve all the pages of a build and begin it; None, and nothing changed, if they cannot be had.

        `keep`: whether others may join it and it is cached when done.
        """
        user, lineage, history = work.user, work.lineage, work.history
        assert isinstance(history, History), "callers have asked for the behaviours"
        shared, copied, new = self.pages_for(user, lineage, len(history), option)
        on_host = self._host.find(user) if option.source is Source.HOST else None
        cached = self._device.find(user) if option.source is Source.DEVICE else on_host
        fresh = self._device.reserve(new, np.concatenate((shared, copied)))
        if fresh is None:
            return None
        self.sources[option.source] += 1
        base = missing = 0
        if cached is not None:
            base, missing = lineage.context_tokens + option.base, cached.missing
            old = cached.lineage
            spread = lineage.epoch - old.epoch if option.base < len(history) else old.spread
            lineage = lineage._replace(epoch=old.epoch, spread=spread)
        pages = np.concatenate((fresh[:missing], shared, fresh[missing:]))
        head = missing * PAGE
        reloaded = 0 if on_host is not None else base  # what is copied in fills its pages, too
        self._device.pool.fill(pages, 0, head)
        self._device.pool.fill(pages, reloaded, lineage.context_tokens + len(history))
        made = Path.FULL if cached is None else Path.EXTENDED if head or option.base < len(history) else Path.RELOADED
        build = Build(
            served=work.served,
            prefix=Prefix.of(user, lineage, history, pages),
            history=history,
            context=work.context,
            base=base,
            head=head,
            made=made,
            due=due,
            order=next(self._orders),
            launched=0 if head else base,
            done=0 if head else base,
            keep=keep,
            pre_infer=isinstance(work, PreInfer),
        )
        build.cost_s = self._left_s(build)
        if len(copied):
            build.page_copy = (int(copied[0]), int(pages[base // PAGE]))
            build.source = Lease(self._device.pool, user, copied, math.inf)
            self._device.pool.unpin(copied)  # the lease has pinned it
        self._running[build] = None
        if keep:
            self._joinable.setdefault(user, []).append(build)
        if on_host is not None:
            self._reload(build, on_host, work.cost_s if isinstance(work, Rank) else 0.0)
        elif build.done == build.prefix.tokens:
            self._end(build, BuildState.DONE)
        return build

    def _reload(self, build: Build, on_host: Prefix, scoring_s: float) -> None:
        """Copy the base from host memory; appending goes on when it is there. `scoring_s`: what its rank will take."""
        target = build.prefix.pages[on_host.missing : -(-build.base // PAGE)]
        source = on_host.pages[: len(target)]
        build.state = BuildState.RELOADING
        build.source = Lease(self._host.pool, on_host.user, source, math.inf)
        build.in_flight += 1
        self._host.touch(on_host.user)

        def nearly() -> None:
            if build.state is BuildState.RELOADING:
                build.nearly_reloaded = True
                self._arriving(build)

        def copied(error: BaseException | None) -> None:
            build.reload, build.nearly_reloaded = None, False
            if error is not None and self._host.find(on_host.user) is on_host:
                self._host.drop(on_host.user)
            self.reloads += error is None
            if build.state is BuildState.RELOADING:
                build.state = BuildState.APPENDING
            self.ran(build, build.done, well=error is None)

        # A rank may begin while the last layers come in: what it takes itself, it need not wait.
        lead = (self._cost.step_s + scoring_s) / max(self._cost.copy_s(len(target)), 1e-9)
        nearly_at = max(0.0, 1.0 - lead) if scoring_s and build.launched == build.prefix.tokens else 1.0
        build.reload = PageCopy(Direction.IN, source, target, nearly, nearly_at)
        self._copy(build.reload, copied)

    def launched(self, build: Build, high: int) -> None:
        """Its tokens up to `high` have been launched, in one step."""
        build.page_copy = None
        build.launched = build.behind(high)
        build.in_flight += 1
        build.cost_s = self._left_s(build)

    def ran(self, build: Build, high: int, *, well: bool) -> None:
        """What a step had of it, up to `high`, or a copy, has ended."""
        build.in_flight -= 1
        if well:
            build.done = build.behind(high)
            if build.source is not None:  # else a step before this one may still read it
                build.source.release()
        if build.state is BuildState.APPENDING:
            if not well:
                self._end(build, BuildState.FAILED)
            elif build.done == build.prefix.tokens:
                self._end(build, BuildState.DONE)
        self._free_if_over(build)

    def _left_s(self, build: Build) -> float:
        """Device time for what has not been launched of it."""
        low, left_s = build.launched, 0.0
        while low < build.prefix.tokens:
            high = build.until(low)
            left_s += self._cost.append_s(high - low, low)
            low = build.behind(high)
        return left_s

    def abandon_if_unwanted(self, build: Build) -> None:
        """Give up a build that nobody waits for; what was launched still runs to its end."""
        if not build.ended and not build.wanted:
            self._end(build, BuildState.ABANDONED)

    def unlist(self, build: Build) -> None:
        """Nobody joins this build any more, and it is not kept when done."""
        build.keep = False
        self._unjoin(build)

    def _unjoin(self, build: Build) -> None:
        builds = self._joinable.get(build.prefix.user, [])
        if build in builds:
            builds.remove(build)
            if not builds:
                del self._joinable[build.prefix.user]

    def of(self, user: str) -> list[Build]:
        """The user's builds that others may join."""
        return list(self._joinable.get(user, ()))

    def _end(self, build: Build, state: BuildState) -> None:
        build.state = state
        build.cost_s = 0.0
        self._unjoin(build)
        del self._running[build]
        if state is not BuildState.DONE:
            self._free_if_over(build)  # first, so that those who are told find its pages free
        self._ended(build)
        self._free_if_over(build)

    def _free_if_over(self, build: Build) -> None:
        """Let go of the build's own pins once it has ended and nothing launched touches its pages."""
        if build.ended and not build.in_flight and not build.freed:
            build.freed = True
            if build.source is not None:
                build.source.release()
            self._device.pool.unpin(build.prefix.pages)
