"""When users were here: what is learned of it, and what keeping their prefixes is worth by that."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr.cache import PARTS, HeldColumns, ReturnRate, ReturnTimes, Tier
from relaygr.clock import Clock
from relaygr.engine.cost import CostModel
from relaygr.history import PAGE

__all__ = ["Visits"]

_TWICE: Final = 0.1
"""What a prefix is worth in one tier when the other has it, too."""
_DEAR_S: Final = 1.5e-3
"""Device time from which prefixes go in parts. Heads take launches and evictions more, and the loop's time for them,
which shorter prefixes do not make up for."""


class Visits:
    """Every visit is told to it; tiers weigh what they hold by what it has learned."""

    def __init__(self, tiers: Sequence[Tier], cost: CostModel, clock: Clock, *, in_parts: bool) -> None:
        """`in_parts`: whether prefixes are of use without their heads."""
        self._returns = ReturnRate()
        self._times = ReturnTimes()
        self._tiers = tiers
        self._cost = cost
        self._clock = clock
        self._any_in_parts = in_parts
        for tier in tiers:
            tier.worth, tier.in_parts = self._worth, self._in_parts

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

    def _worth(self, held: HeldColumns) -> npt.NDArray[np.float64] | None:
        """Device time that keeping a page of each prefix saves, in a second; little where the other tier has it.

        Of the part that goes next, or of all where it goes whole.
        """
        rates = self._times.rates(held.last, self._clock.now())
        if rates is None:
            return None
        whole_s = self._cost.prefix_s(held.tokens)
        of_part = self._cost.token_s(held.head + held.tokens / PARTS / 2) * PAGE
        of_all = whole_s / np.maximum(np.ceil(held.tokens / PAGE), 1)
        worth = rates * np.where(self._goes_in_parts(held, whole_s), of_part, of_all)
        return np.where(held.twice, _TWICE * worth, worth)

    def _in_parts(self, held: HeldColumns) -> npt.NDArray[np.bool_]:
        """Whose head is so much cheaper to compute again than the whole that it goes first. Not where the other tier
        has it, too: that has all that a part of this would be kept for."""
        return self._goes_in_parts(held, self._cost.prefix_s(held.tokens))

    def _goes_in_parts(self, held: HeldColumns, whole_s: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        return (whole_s >= _DEAR_S) & ~held.twice & self._any_in_parts
