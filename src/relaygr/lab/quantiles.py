"""Distributions given by a few of their quantiles, and the facts about real traffic that are known so."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr.errors import InvalidInput

__all__ = ["GLOBO_GAPS", "GLOBO_SESSIONS", "LENGTHS", "Quantiles"]


@dataclass(frozen=True)
class Quantiles:
    """Log-linear between points (share, value); below the first point and above the last, that point's value."""

    points: tuple[tuple[float, float], ...]
    source: str

    def __post_init__(self) -> None:
        shares, values = zip(*self.points, strict=True) if self.points else ((), ())
        rising = all(low < high for low, high in pairwise(shares))
        if not shares or not rising or shares[0] < 0 or shares[-1] > 1:
            raise InvalidInput("quantiles", "must be points (share, value) with shares rising from 0 to 1")
        if min(values) <= 0 or any(low > high for low, high in pairwise(values)):
            raise InvalidInput("quantiles", "must have positive values that do not fall")

    @staticmethod
    def constant(value: float) -> "Quantiles":
        return Quantiles(((0.5, value),), "set directly")

    def draw(self, random: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        return self.at(random.random(count))

    def at(self, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The values that these shares of the distribution lie below."""
        known, values = np.array(self.points).T
        return np.asarray(np.exp(np.interp(shares, known, np.log(values))))

    @property
    def mean(self) -> float:
        return float(self.at((np.arange(20_000) + 0.5) / 20_000).mean())


LENGTHS: Final = {
    "kuairand-1k": Quantiles(
        ((0.1, 1998), (0.5, 8327), (0.9, 24418), (0.99, 62626), (1.0, 127557)),
        "events of a user in all 11,713,045 rows of KuaiRand-1K (short video), by a public exploratory analysis",
    ),
    "ml-1m": Quantiles(
        ((0.5, 96), (0.9, 400), (0.99, 907), (1.0, 2314)),
        "ratings of a user in MovieLens-1M",
    ),
}
"""Behaviours of users, by name."""

_GLOBO: Final = (
    "2,988,181 clicks of 322,897 users of the news portal Globo.com, October 2017; the 54% of gaps that are exactly "
    "30.000 s, which were imputed, left out"
)
GLOBO_SESSIONS: Final = Quantiles(((0.5, 2), (0.75, 3), (0.9, 4), (0.95, 6), (0.99, 9)), _GLOBO)
"""Requests of a session."""
GLOBO_GAPS: Final = Quantiles(
    (
        (0.01, 1.16), (0.05, 8.47), (0.1, 20.9), (0.25, 70.0), (0.5, 163.3), (0.75, 388.8), (0.9, 1290.8),
        (0.95, 2714.4), (0.99, 12190.6),
    ),
    _GLOBO,
)  # fmt: skip
"""Seconds between two requests of a session."""
