"""What the expander chooses from: every way to a prefix, with its price."""

from collections.abc import Callable

from relaygr.cache import Option, Source, Tier, choose
from relaygr.clock import Clock
from relaygr.engine.cost import CostModel
from relaygr.engine.work import Build, BuildState, PreInfer, Rank
from relaygr.history import PAGE

__all__ = ["Options"]


class Options:
    """Prices the ways to a prefix from what the tiers hold and what work costs. Changes nothing."""

    def __init__(
        self, device: Tier, host: Tier, cost: CostModel, clock: Clock, accept_epochs: int, *, extend: bool = True
    ) -> None:
        """`extend`: whether prefixes that lack a part of a history are used for it."""
        self._device = device
        self._host = host
        self._cost = cost
        self._clock = clock
        self._accept_epochs = accept_epochs
        self._extend = extend

    def choose(
        self,
        work: Rank | PreInfer,
        joinable: Build | None,
        wait: Callable[[float], float],
        due: float,
        needed: float,
        copies: int,
    ) -> Option:
        """The way to take for work due then whose prefix is needed by `needed`.

        `joinable` is the build that will hold the most of its history, `wait` says how long the device is busy with
        what is due before then, `copies` how many copies are under way.
        """
        now, n = self._clock.now(), len(work.history)
        resident, head = self._held(self._device, work)
        if resident == n and not head:
            return Option(Source.RESIDENT, n, now, 0.0)
        wait_s, everything = wait(due), self._append_s(work, 0)
        options = [Option(Source.NOTHING, 0, now + wait_s + everything, everything)]
        least = everything
        if resident > 0:
            least = self._append_s(work, resident, head)
            options.append(Option(Source.DEVICE, resident, now + wait_s + least, least))
        more = joinable is not None and joinable.prefix.length > (resident - 1 if head else resident)
        if joinable is not None and more and (self._extend or joinable.prefix.length == n):
            rest = self._append_s(work, joinable.prefix.length)
            ready = now + wait_s + (joinable.cost_s if joinable.due > due else 0.0) + rest
            if joinable.state is BuildState.RELOADING and not joinable.cost_s and not rest:
                ready = now + self._cost.copy_s(len(joinable.prefix.pages))  # the device has no part in it
            in_flight = Option(Source.IN_FLIGHT, joinable.prefix.length, ready, rest)
            if joinable.prefix.length == n:
                return in_flight  # this very prefix is being made: nobody makes it twice
            options.append(in_flight)
        on_host, head = self._held(self._host, work)
        rest = self._append_s(work, on_host, head)
        if on_host > 0 and (on_host > resident or rest < least):
            pages = -(-(work.lineage.context_tokens + on_host - head) // PAGE)
            copy = self._cost.copy_s(pages) * (1 + copies)
            ready = now + (max(wait_s, copy) + rest if rest else copy)
            options.append(Option(Source.HOST, on_host, ready, rest, pages))
        return choose(options, needed)

    def _held(self, tier: Tier, work: Rank | PreInfer) -> tuple[int, int]:
        """Behaviours of this history that the tier holds the KV of, -1 where it has nothing of this lineage; and how
        many tokens before them are missing."""
        prefix = tier.find(work.user)
        if prefix is None or not prefix.lineage.serves(work.lineage, self._accept_epochs):
            return -1, 0
        held, head = prefix.agrees(work.history), prefix.head
        if head and (prefix.lineage != work.lineage or work.lineage.context_tokens + held <= head):
            return -1, 0  # a head is computed by the tables of today, as what is behind it must have been
        return (held if self._extend or (held == len(work.history) and not head) else 0), head

    def _append_s(self, work: Rank | PreInfer, base: int, head: int = 0) -> float:
        """Device time to append what is missing behind `base` behaviours and of their head, or everything where there
        are none."""
        context = work.lineage.context_tokens
        if base <= 0:
            return self._cost.append_s(context + len(work.history), 0)
        held = context + base
        return self._cost.append_s(head, 0) + self._cost.append_s(context + len(work.history) - held, held)
