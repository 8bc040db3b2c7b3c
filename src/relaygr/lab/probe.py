"""One probe: some traffic in one mode, under budgets."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from relaygr.lab.outcome import Budgets
from relaygr.lab.trace import Trace
from relaygr.lab.tuning import Tuning
from relaygr.lab.workload import Workload
from relaygr.serving.modes import Mode

__all__ = ["Probe"]

_SECONDS: Final = (5.0, 30.0)
"""Of a probe at least and at most."""
_LIVED_S: Final = 1.0
"""Of a probe's past, what is lived through at least."""
_KEEPING_LIVED_S: Final = 6.0
"""And at most, where prefixes are kept."""


@dataclass(frozen=True)
class Probe:
    """What is sent, and how it is served. The same probe sends the same requests."""

    mode: Mode
    workload: Workload
    budgets: Budgets
    tuning: Tuning
    engine: str = ""
    """What serves it, in words: model, kind of device, type and memory, not which machine, of which a file has one.
    Empty where a file is of one engine."""

    def at(self, *, rate: float | None = None, length: int | None = None, requests: int = 300) -> "Probe":
        """The same with another rate or length, for as long as about so many requests take."""
        rate = self.workload.rate if rate is None else rate
        lengths = self.workload.lengths if length is None else str(length)
        low, high = _SECONDS
        seconds = min(max(requests / rate, low), high)
        return replace(self, workload=replace(self.workload, rate=rate, lengths=lengths, seconds=seconds))

    def tried(self, number: int) -> "Probe":
        """As it is tried for the how manyth time, from 1 on: with other arrivals each time, and for each seed."""
        return replace(self, workload=replace(self.workload, seed=1000 * self.workload.seed + number))

    def trace(self) -> Trace:
        return self.workload.trace()

    @property
    def lived_s(self) -> float:
        """How much of its past is lived through; what is before is only left by its users.

        Where prefixes are kept it takes some seconds until what is kept is what would have been, and until then more
        has to be computed than later.
        """
        return max(_LIVED_S, min(_KEEPING_LIVED_S, self.workload.past_s / 2)) if self.mode.keeps else _LIVED_S

    @property
    def key(self) -> str:
        told: dict[str, Any] = {
            "mode": self.mode,
            "workload": self.workload.told(),
            "budgets": asdict(self.budgets),
            "tuning": asdict(self.tuning),
        }
        if self.lived_s != _LIVED_S:  # files from when it was always that are still right where it is
            told["lived_s"] = self.lived_s
        return json.dumps(told | ({"engine": self.engine} if self.engine else {}), sort_keys=True)
