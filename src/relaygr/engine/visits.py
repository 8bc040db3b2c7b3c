"""When users were here: what is learned of it, and what keeping their prefixes is worth by that."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr.cache import PARTS, HeldColumns, Prefix, ReturnRate, ReturnTimes, Tier
from relaygr.clock import Clock
from relaygr.engine.cost import CostModel
from relaygr.history import PAGE

__all__ = ["Visits"]

_TWICE: Final = 0.1
"""What a prefix is worth in one tier when the other has it, too."""
_DEARER: Final = 1.1
"""How many times as much as what would go for it a prefix must be worth to be copied into host memory: a copy takes the
link and the loop's time."""
_PRICED_S: Final = 0.1
"""How long what would go there counts as worth the same."""
_DEAR_S: Final = 1.5e-3
"""Device time from which prefixes go in parts. Heads take launches and evictions more, and the loop's time for them,
which shorter prefixes do not make up for."""


class Visits:
    """Every visit is told to it; tiers weigh what they hold by what it has learned."""

    def __init__(self, device: Tier, host: Tier, cost: CostModel, clock: Clock, *, in_parts: bool) -> None:
        """`in_parts`: whether prefixes are of use without their heads."""
        self._returns = ReturnRate()
        self._times = ReturnTimes()
        self._tiers = device, host
        self._host = host
        self._cost = cost
        self._clock = clock
        self._any_in_parts = in_parts
        self._price: float | None = None
        self._priced = -math.inf
        # What both have goes from the device first, and the copy was not made in vain.
        device.worth, host.worth = (partial(self._worth, whole_twice=share) for share in (_TWICE, 1.0))
        device.in_parts = host.in_parts = self._in_parts

    def add(self, user: str, at: float) -> None:
        """The user was here."""
        self._returns.visit(user)
        self._times.visit(user, at)
        for tier in self._tiers:
            tier.seen(user, at)

    def learn(self, visits: Iterable[tuple[str, float]]) -> None:
        """Forget what is known, and learn these."""
        self._returns, self._times = ReturnRate(), ReturnTimes()
        for user, at in visits:
            self.add(user, at)
        for tier in self._tiers:
            for prefix in tier:
                tier.seen(prefix.user, self.last(prefix.user))

    def forget(self, user: str) -> None:
        self._returns.forget(user)
        self._times.forget(user)

    def last(self, user: str) -> float:
        """When the user was here; long ago where that is not known."""
        return self._times.last(user)

    def expected(self, user: str) -> float:
        """How likely the user comes back; see `ReturnRate`."""
        return self._returns.expected(user)

    def worth_copying(self, prefix: Prefix) -> bool:
        """Whether what a user has who is here now is worth more in host memory than what would go for it.

        What is dear always is: of others only heads go for it. So is anything while too little is known.
        """
        now, whole_s = self._clock.now(), self._cost.append_s(prefix.tokens, 0)
        if self._any_in_parts and whole_s >= _DEAR_S:
            return True
        if now - self._priced >= _PRICED_S:
            self._price, self._priced = self._host.price(), now
        rate = self._times.rate_now(now)
        if rate is None or self._price is None:
            return True
        return rate * whole_s / -(-prefix.tokens // PAGE) > _DEARER * self._price

    def _worth(self, held: HeldColumns, whole_twice: float) -> npt.NDArray[np.float64] | None:
        """Device time that keeping a page of each prefix saves, in a second; little where the other tier has it, of
        those that go whole so many times as much.

        Of the part that goes next, or of all where it goes whole.
        """
        rates = self._times.rates(held.last, self._clock.now())
        if rates is None:
            return None
        whole_s = self._cost.prefix_s(held.tokens)
        dear = self._dear(whole_s)
        of_part = self._cost.token_s(held.head + held.tokens / PARTS / 2) * PAGE
        of_all = whole_s / np.maximum(np.ceil(held.tokens / PAGE), 1)
        worth = rates * np.where(dear & ~held.twice, of_part, of_all)
        return np.where(held.twice, np.where(dear, _TWICE, whole_twice) * worth, worth)

    def _in_parts(self, held: HeldColumns) -> npt.NDArray[np.bool_]:
        """Whose head is so much cheaper to compute again than the whole that it goes first. Not where the other tier
        has it, too: that has all that a part of this would be kept for."""
        return self._dear(self._cost.prefix_s(held.tokens)) & ~held.twice

    def _dear(self, whole_s: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        return (whole_s >= _DEAR_S) & self._any_in_parts
