"""One probe: some traffic in one mode, under budgets; and the file that keeps what came of each."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from relaygr.config import EngineConfig
from relaygr.engine.simulated import SimulatedCosts
from relaygr.errors import InvalidInput
from relaygr.lab.outcome import Budgets, Run
from relaygr.lab.outputs import checked_file
from relaygr.lab.simulate import simulate
from relaygr.lab.trace import Trace
from relaygr.lab.tuning import Tuning
from relaygr.lab.workload import Workload
from relaygr.serving.modes import Mode

__all__ = ["Device", "Probe", "ProbeFile", "Start"]

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


@dataclass(frozen=True)
class Device:
    """What a simulation needs to know of a device, all of it measured."""

    costs: SimulatedCosts
    page_bytes: int
    config: EngineConfig

    @staticmethod
    def of(told: dict[str, Any]) -> "Device":
        """From plain values, as `asdict` makes them."""
        return Device(SimulatedCosts(**told["costs"]), told["page_bytes"], EngineConfig(**told["config"]))

    def slower(self, factor: float) -> "Device":
        """Where steps take so many times as long as the profile said."""
        steps = ("step", "token", "pair", "candidate", "candidate_pair")
        return replace(self, costs=replace(self.costs, **{name: factor * getattr(self.costs, name) for name in steps}))

    def full_s(self, length: int, candidates: int) -> float:
        """What computing in full takes by itself."""
        costs = self.costs
        pairs = length * (length + 1) / 2
        scoring = candidates * (costs.candidate + costs.candidate_pair * length)
        return costs.step + costs.token * length + costs.pair * pairs + scoring

    def length_for(self, seconds: float, candidates: int) -> int:
        """The longest history that takes no longer than that in full."""
        low, high = 1, 1 << 24
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.full_s(middle, candidates) <= seconds else (low, middle - 1)
        return low

    def probe(
        self,
        mode: Mode,
        workload: Workload,
        budgets: Budgets,
        length: int,
        engine: str = "",
        *,
        one_at_a_time: bool = False,
    ) -> Probe:
        """Tuned for histories of this length, and for many requests under way unless there is `one_at_a_time`."""
        tuning = Tuning.of(budgets, mode, self.costs.step, self.full_s(length, workload.candidates))
        if one_at_a_time:
            tuning = tuning.one_at_a_time(budgets)
        return Probe(mode, workload, budgets, tuning, engine)

    def simulate(self, probe: Probe) -> dict[str, Any]:
        """What the probe would tell, by the simulator."""
        return self.run(probe, hopeless=True).told(probe.budgets)

    def run(self, probe: Probe, *, hopeless: bool = False) -> Run:
        """What would become of the probe's requests, by the simulator. See `replay`."""
        return simulate(
            self.costs, self.page_bytes, self.config, probe.trace(), probe.mode, probe.budgets, probe.tuning,
            lived_s=probe.lived_s, hopeless=hopeless,
        )  # fmt: skip


@dataclass(frozen=True)
class Start:
    """Where a search begins: measured and simulated once, since it would not come out the same again."""

    device: Device
    guesses: dict[str, float]
    """By mode."""


class ProbeFile:
    """One line of JSON for each probe, written when it is done: a search that was ended goes on where it was.

    Where it began is a line, too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told: dict[str, dict[str, Any]] = {}
        self._starts: dict[str, Start] = {}
        for number, line in enumerate(_text(path).splitlines(), 1):
            try:
                row = json.loads(line)
                if "search" in row:
                    self._starts[row["search"]] = Start(Device.of(row["device"]), row["guesses"])
                    continue
                self._told[json.dumps(row["probe"], sort_keys=True)] = row
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidInput("probes", f"line {number} of {path} is no probe: {error}") from error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._told.values())

    def find(self, probe: Probe) -> dict[str, Any] | None:
        """What came of this very probe, if it was run before."""
        row = self._told.get(probe.key)
        return None if row is None else row["told"]

    def add(self, probe: Probe, told: dict[str, Any], **more: Any) -> None:
        row = {"probe": json.loads(probe.key), "told": told, **more}
        self._told[probe.key] = row
        self._write(row)

    def start(self, search: str) -> Start | None:
        """Where this very search began, if it did before."""
        return self._starts.get(search)

    def begin(self, search: str, start: Start) -> None:
        self._starts[search] = start
        self._write({"search": search, **asdict(start)})

    def _write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _text(path: Path) -> str:
    """What is in the file; nothing where there is none yet."""
    checked_file("probes", path)
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("probes", f"cannot be read: {error}") from error
