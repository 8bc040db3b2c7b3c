"""What work costs on this device: T(new, cached, m), fitted to a profile and kept current from served work."""

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
import numpy.typing as npt

__all__ = ["CostModel", "LinearFit"]

_FORGET = 0.98
_PROFILE_WEIGHT = 0.05
_REFIT_AT_LEAST = 16
_REFIT_AT_MOST = 256
_REFIT_S = 0.5
"""A fit costs as much as a small step: so much device time goes by between two, unless very many steps do."""
_MARGIN_DECAY = 0.02
_OFF_DECAY = 0.02
_LARGEST_MARGIN = 10.0
_ERRORS = 1024
_LEAST_S = 1e-9
"""What any work is taken for at the least: errors are relative."""
_COUNTS: npt.NDArray[np.float64] = np.power(_FORGET, np.arange(_REFIT_AT_MOST - 1, -1, -1))
"""What each of the most that are taken in together counts, the oldest first."""


class LinearFit:
    """seconds ≈ Σ coefficient · feature, coefficients never negative, relative errors least squared.

    The profile is kept for good, at a small weight, so that what traffic does not show is not forgotten; served work
    counts the more the newer it is. `version` goes up with every refit.
    """

    def __init__(self, scales: Sequence[float]) -> None:
        """`scales`: a typical size of each feature."""
        size = len(scales)
        self.coefficients: tuple[float, ...] = (0.0,) * size
        self.version = 0
        self._scales = np.array((*scales, 1.0))
        self._profile, self._recent = np.zeros((size, size + 1)), np.zeros((size, size + 1))
        """Sums of the equations' products with each other, and with their right sides in the last column."""
        self._unfitted: list[tuple[float, ...]] = []
        """Features and seconds observed since the last fit; taken in together, off the path of every step."""
        self._unfitted_s = 0.0

    def profile(self, samples: Sequence[tuple[Sequence[float], float]]) -> None:
        """Start from measured (features, seconds)."""
        _add(self._profile, self._equations([(*features, max(taken, _LEAST_S)) for features, taken in samples]))
        self._fit()

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Some work with these features took this long."""
        if seconds > 0.0:
            self._unfitted.append((*features, max(seconds, _LEAST_S)))
            self._unfitted_s += seconds
            count = len(self._unfitted)
            if count >= _REFIT_AT_MOST or (count >= _REFIT_AT_LEAST and self._unfitted_s >= _REFIT_S):
                self._fit()

    def _equations(self, samples: Sequence[tuple[float, ...]]) -> npt.NDArray[np.float64]:
        """[samples, features + 1]: what times the coefficients is to be 1, and that 1."""
        equations = np.array(samples, np.float64).reshape(-1, len(self._scales))
        equations /= equations[:, -1:]
        equations /= self._scales
        return equations

    def _fit(self) -> None:
        if self._unfitted:
            count = len(self._unfitted)
            self._recent *= _FORGET**count
            _add(self._recent, self._equations(self._unfitted), _COUNTS[-count:])
            self._unfitted.clear()
            self._unfitted_s = 0.0
        solution = _non_negative_least_squares(_PROFILE_WEIGHT * self._profile + self._recent)
        self.coefficients = tuple((solution / self._scales[:-1]).tolist())
        self.version += 1


def _add(
    sums: npt.NDArray[np.float64],
    equations: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64] | float = 1.0,
) -> None:
    """More relative equations, features · coefficients = 1, that count so much each."""
    sums += (equations[:, :-1].T * weights) @ equations


def _non_negative_least_squares(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A good solution with no negative entry: the most negative is set to zero until none is."""
    size = len(sums)
    diagonal = sums.diagonal()
    ridge, chosen = 1e-9 * float(diagonal.sum()) / size, diagonal.nonzero()[0]
    solution = np.zeros(size)
    while len(chosen):
        part = sums[chosen]
        found = np.linalg.solve(part[:, chosen] + np.diag([ridge] * len(chosen)), part[:, -1])
        if found.min() >= 0:
            solution[chosen] = found
            break
        chosen = np.delete(chosen, found.argmin())
    return solution


class CostModel:
    """Predicts seconds of device time for steps, and of copying for reloads.

    A step's time is fixed + per new token + per (new token, key) + per candidate + per (candidate, key);
    a copy's is fixed + per page.
    """

    def __init__(self) -> None:
        self.steps = LinearFit((1.0, 1e3, 1e6, 1e2, 1e6))
        self.copies = LinearFit((1.0, 1e2))
        self.margin = 1.0
        """By what factor steps have lately exceeded their prediction: up at once, down slowly."""
        self.off = 0.0
        """How far steps have lately been off their prediction on average, as a share of it."""
        self._errors: deque[float] = deque(maxlen=_ERRORS)

    @property
    def version(self) -> int:
        return self.steps.version + self.copies.version

    @property
    def error(self) -> float:
        """The median of how far the last steps were off their prediction, as a share of what they took."""
        return median(self._errors) if self._errors else 0.0

    @property
    def step_s(self) -> float:
        """What any step costs before it does anything."""
        return self.steps.coefficients[0]

    def observe_step(self, features: Sequence[float], predicted_s: float, seconds: float) -> None:
        """A step took this long where that was predicted."""
        self.steps.observe(features, seconds)
        if seconds > 0:
            self._errors.append(abs(seconds - predicted_s) / seconds)
        ratio = min(seconds / predicted_s, _LARGEST_MARGIN) if predicted_s > 0 else 1.0
        self.off += _OFF_DECAY * (abs(ratio - 1.0) - self.off)
        self.margin = max(ratio, self.margin + _MARGIN_DECAY * (1.0 - self.margin))

    def append_s(self, new: int, cached: int) -> float:
        """To append `new` tokens behind `cached`, beside a step's fixed cost."""
        _, token, pair, _, _ = self.steps.coefficients
        return new * token + (new * cached + new * (new + 1) / 2) * pair

    def prefix_s(self, tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """To compute prefixes of so many tokens from nothing: `append_s` of many at once."""
        _, token, pair, _, _ = self.steps.coefficients
        return tokens * token + tokens * (tokens + 1) / 2 * pair

    def token_s(self, places: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """To append one token at each of these places."""
        _, token, pair, _, _ = self.steps.coefficients
        return token + places * pair

    def score_s(self, candidates: int, tokens: int) -> float:
        """To score candidates on a prefix, beside a step's fixed cost."""
        _, _, _, row, pair = self.steps.coefficients
        return candidates * (row + tokens * pair)

    def copy_s(self, pages: int) -> float:
        """To copy pages between the tiers."""
        fixed, page = self.copies.coefficients
        return fixed + pages * page

    def longest_cut(self, length: int, context: int, candidates: int, seconds: float) -> int:
        """Of a history of `length`, how many of the newest behaviours can be run and scored in this time."""
        low, high = 0, length
        while low < high:
            middle = (low + high + 1) // 2
            tokens = context + middle
            if self.append_s(tokens, 0) + self.score_s(candidates, tokens) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    @staticmethod
    def features(
        appends: Sequence[tuple[int, int]], scores: Sequence[tuple[int, int]]
    ) -> tuple[float, float, float, float, float]:
        """Of a step: appends as (new, cached) and scores as (candidates, tokens)."""
        tokens = pairs = candidates = candidate_pairs = 0.0
        for new, cached in appends:
            tokens += new
            pairs += new * cached + new * (new + 1) / 2
        for rows, length in scores:
            candidates += rows
            candidate_pairs += rows * length
        return 1.0, tokens, pairs, candidates, candidate_pairs
