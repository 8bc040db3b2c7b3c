"""Distributions given by a few of their quantiles."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from relaygr.errors import InvalidInput

__all__ = ["Quantiles"]


@dataclass(frozen=True)
class Quantiles:
    """Log-linear between points (share, value); below the first point and above the last, that point's value."""

    points: tuple[tuple[float, float], ...]
    source: str
    seen: bool = True
    """Whether somebody has seen it somewhere; else it was set directly."""

    def __post_init__(self) -> None:
        shares, values = zip(*self.points, strict=True) if self.points else ((), ())
        rising = all(low < high for low, high in pairwise(shares))
        if not shares or not rising or shares[0] < 0 or shares[-1] > 1:
            raise InvalidInput("quantiles", "must be points (share, value) with shares rising from 0 to 1")
        if min(values) <= 0 or any(low > high for low, high in pairwise(values)):
            raise InvalidInput("quantiles", "must have positive values that do not fall")

    @staticmethod
    def constant(value: float) -> "Quantiles":
        return Quantiles(((0.5, value),), "set directly", seen=False)

    @staticmethod
    def of(values: npt.ArrayLike, source: str) -> "Quantiles":
        """Of values that were seen, at least one, all positive: at every thousandth, the lowest and the highest too."""
        shares = np.linspace(0.0, 1.0, 1001)
        seen = np.quantile(np.asarray(values, np.float64), shares, method="inverted_cdf")
        return Quantiles(tuple(zip(shares.tolist(), seen.tolist(), strict=True)), source)

    def draw(self, random: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        return self.at(random.random(count))

    def at(self, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The values that these shares of the distribution lie below."""
        known, values = np.array(self.points).T
        return np.asarray(np.exp(np.interp(shares, known, np.log(values))))

    @property
    def mean(self) -> float:
        return float(self.at((np.arange(20_000) + 0.5) / 20_000).mean())
