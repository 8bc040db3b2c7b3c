"""Rows of the headline's table, and what is known before they are searched: costs, lengths, guesses."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from common import RESULTS
from relaygr.config import EngineConfig
from relaygr.lab.device import Device
from relaygr.lab.limits import guess_length, guess_rate
from relaygr.lab.outcome import Budgets
from relaygr.lab.probe import Probe
from relaygr.lab.workload import STAGE_SPREAD, STAGES, Workload
from relaygr.serving.modes import Mode

Kind = Literal["rate", "length"]
Traffic = Literal["cold", "refresh", "warm"]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    kind: Kind
    """What is searched for: the highest rate, or the longest history."""
    budgets: Budgets
    traffic: Traffic
    n: int | None = None
    """Behaviours; None: as many as take half the ranking budget in full, or what is searched for."""
    tries: int = 9
    """Of a mode: enough to see it fail above what is told."""
    confirm: int = 1
    """How often what was found must hold again."""

    def workload(self, candidates: int) -> Workload:
        """Without its rate and lengths."""
        left = self.budgets.lead_ms
        base = Workload(
            1.0, 1.0, "reuse", candidates=candidates, longest=1 << 24, past_s=1.0, stage_spread=STAGE_SPREAD,
            retrieval_ms=left * STAGES[0], pre_processing_ms=left * STAGES[1],
        )  # fmt: skip
        if self.traffic == "refresh":
            return replace(base, profile="refresh", past_s=16.0)
        if self.traffic == "warm":
            gap_s = 2.0 if self.kind == "length" else 5.0
            return replace(base, reuse=0.999, gap_s=gap_s, past_s=6 * gap_s)
        return replace(base, arrivals="even" if self.kind == "length" else "poisson")

    def probe(self, device: Device, mode: Mode, candidates: int, length: int, engine: str = "") -> Probe:
        """Tuned for histories of this length; without its rate and lengths."""
        alone = self.kind == "length"
        return device.probe(mode, self.workload(candidates), self.budgets, length, engine, one_at_a_time=alone)


@dataclass(frozen=True)
class Group:
    """Rows that one engine serves."""

    name: str
    shape: str
    candidates: int
    config: EngineConfig
    rows: Sequence[Row]


def on_gpu(device: str) -> list[Group]:
    config = EngineConfig(
        device=device, dtype="bfloat16", device_cache="116GiB", host_cache="84GiB", max_history=278_528
    )
    half = [Row(f"half-{ms}", "rate", Budgets(ms, 200.0), "cold") for ms in (10, 20, 50)]
    wide = Budgets(50.0, 200.0)
    rows = [
        *half,
        Row("refresh-32k", "rate", wide, "refresh", 32_768),
        Row("refresh-128k", "rate", wide, "refresh", 131_072, tries=2, confirm=0),  # one in full takes longer than that
        Row("warm-128k", "rate", wide, "warm", 131_072, tries=2, confirm=0),
        Row("length-10", "length", Budgets(10.0, 200.0), "cold"),
        Row("length-50", "length", wide, "cold"),
        Row("length-50-warm", "length", wide, "warm"),
    ]
    longest = 14_335 - 128
    short = replace(config, device_cache="126GiB", host_cache="96GiB", max_history=16_384)
    dlrmv3 = [
        Row("dlrmv3", "rate", wide, "refresh", longest),
        Row("dlrmv3-80", "rate", Budgets(20.0, 80.0), "refresh", longest),  # MLPerf's bound of that model's server
    ]
    return [
        Group("d512", "d512", 512, config, rows),
        Group("dlrmv3", "dlrmv3", 2048, short, dlrmv3),
    ]


def on_cpu() -> list[Group]:
    """A few ranks in full fit into the budget: where only one does, the rate at which two seldom meet is too low to be
    measured in minutes."""
    config = EngineConfig(device_cache="512MiB", host_cache="512MiB", max_history=32_768)
    wide = Budgets(200.0, 800.0)
    rows = [
        Row("refresh-2k", "rate", wide, "refresh", 2048),
        Row("length-200", "length", wide, "cold"),
        Row("length-200-warm", "length", wide, "warm"),
    ]
    return [Group("d64", "d64", 64, config, rows)]


@dataclass
class Plan:
    """What is known before anything is searched: costs, lengths, guesses. Kept, so that what is resumed is the same."""

    path: Path
    device: Device
    n: dict[str, int]
    guesses: dict[str, dict[str, float]]
    """By row and mode: where the simulator sees the limit."""
    unloaded: dict[str, tuple[int, float, float]]
    """By row: some length, and milliseconds of a rank in full there alone: in one piece, and in the relay's steps."""

    rough: dict[str, dict[str, float]] = field(default_factory=dict)
    """The same by rule of thumb, where simulating took too long."""
    found: dict[str, dict[str, float]] = field(default_factory=dict)
    """The same by an earlier search, put in by hand: where to begin rather."""

    def begin(self, row: str, mode: Mode) -> float:
        known = (each.get(row, {}).get(mode) for each in (self.found, self.guesses, self.rough))
        return next(value for value in known if value is not None)

    def measured(self, row: Row, candidates: int, mode: Mode = Mode.FULL) -> Device:
        """The device, with costs put right by what a rank took."""
        n, whole, stepped = self.unloaded[row.name]
        predicted = self.device.full_s(n, candidates)
        if mode is not Mode.RELAY_HOST_EXTEND:
            return self.device.slower(whole / 1e3 / predicted)
        steps = predicted // (row.probe(self.device, mode, candidates, n).tuning.step_ms / 1e3)
        return self.device.slower(stepped / 1e3 / (predicted + steps * self.device.costs.step))

    def save(self) -> None:
        told = asdict(self)
        del told["path"]
        self.path.write_text(json.dumps(told, indent=1))

    @staticmethod
    def load(path: Path) -> "Plan":
        told = json.loads(path.read_text())
        known = Device.of(told["device"])
        unloaded = {row: (int(n), float(whole), float(steps)) for row, (n, whole, steps) in told["unloaded"].items()}
        return Plan(path, known, told["n"], told["guesses"], unloaded, told.get("rough", {}), told.get("found", {}))


def measured(name: str) -> tuple[Group, Row, Plan]:
    """The row of this name, its group, and what an H200 was measured to take for it."""
    group, row = next((group, row) for group in on_gpu("cuda") for row in group.rows if row.name == name)
    return group, row, Plan.load(RESULTS / f"headline-h200-plan-{group.name}.json")


def length_of(value: float) -> int:
    return max(256, int(value) // 256 * 256)


def probe_at(row: Row, group: Group, device: Device, mode: Mode, value: float, n: int) -> Probe:
    length = n if row.kind == "rate" else length_of(value)
    memory = f"{group.config.device_cache} + {group.config.host_cache}" if mode.keeps else ""
    probe = row.probe(device, mode, group.candidates, length, memory)
    if row.kind == "rate":
        return probe.at(rate=float(f"{value:.3g}"), length=n, requests=500 if mode is Mode.RELAY_HOST_EXTEND else 300)
    rate = 4.0 if row.traffic == "warm" else 0.9e3 / row.budgets.pipeline_ms  # one at a time
    return probe.at(rate=rate, length=length, requests=50)


def guess(row: Row, group: Group, device: Device, mode: Mode, n: int, highest: float) -> float:
    """Where the simulator sees the limit."""
    returning = row.traffic != "cold"

    def at(mode: Mode, value: float) -> Probe:
        """With more requests than a real one has, so that luck decides less."""
        probe = probe_at(row, group, device, mode, value, n)
        more = 4 if row.traffic == "cold" else 1
        return replace(probe, workload=replace(probe.workload, seconds=more * probe.workload.seconds))

    if row.kind == "rate":
        return guess_rate(device, at, mode, n, group.candidates, returning=returning)
    return guess_length(device, at, mode, group.candidates, highest, returning=row.traffic == "warm")
