"""How far off predictions are, at a quantile: learned from what was served."""

import math

__all__ = ["Margin"]

_LOWEST, _HIGHEST = 1 / 64, 64.0
_STEP = math.log(1.02)
_BINS = math.ceil(math.log(_HIGHEST / _LOWEST) / _STEP)
_RESCALE_AT = 1e9


class Margin:
    """A quantile of the ratios actual / predicted, in a fixed histogram of their logarithms that forgets slowly.

    A prediction times `value` is exceeded by about one in 1 / (1 - quantile). Each ratio counts the less the more came
    after it, so about the last `memory` of them decide. The value is one of the ratios' bins, 2% wide, at its upper
    end; ratios below 1/64 or above 64 count as those.

    The prior stands for `prior_weight` ratios seen before the first: most of them 1, and twice the share beyond the
    quantile at `prior`, which is at least 1. It fades like any other ratio.
    """

    def __init__(self, quantile: float, *, prior: float = 1.5, prior_weight: float = 100.0, memory: int = 2000) -> None:
        self._beyond = 1 - quantile
        self._growth = 1 + 1 / memory
        self._weight = 1.0
        self._bins = [0.0] * _BINS
        tail = prior_weight * min(1.0, 2 * self._beyond)
        self._highest = _bin(prior)
        """The last bin that anything was counted in."""
        self._bins[_bin(1.0)] += prior_weight - tail
        self._bins[self._highest] += tail
        self._total = prior_weight
        self._value: float | None = None

    @property
    def value(self) -> float:
        """The quantile now."""
        if self._value is None:
            self._value = self._quantile()
        return self._value

    def observe(self, ratio: float) -> None:
        """Some work took `ratio` times what was predicted. What is no positive number is ignored."""
        if not 0 < ratio < math.inf:
            return
        self._weight *= self._growth
        index = _bin(ratio)
        self._bins[index] += self._weight
        self._highest = max(self._highest, index)
        self._total += self._weight
        self._value = None
        if self._weight > _RESCALE_AT:
            self._bins = [count / self._weight for count in self._bins]
            self._total = math.fsum(self._bins)
            self._weight = 1.0

    def _quantile(self) -> float:
        """The upper end of the first bin from above with which more than the share beyond the quantile is passed."""
        left = self._beyond * self._total
        for index in range(self._highest, 0, -1):
            left -= self._bins[index]
            if left < 0:
                return _upper(index)
        return _upper(0)


def _bin(ratio: float) -> int:
    bounded = min(_HIGHEST, max(_LOWEST, ratio))
    return min(_BINS - 1, int(math.log(bounded / _LOWEST) / _STEP))


def _upper(index: int) -> float:
    return _LOWEST * math.exp(_STEP * (index + 1))
