"""A search of `relaygr lab slo` or `length`: run on a bench, kept in a file, and told."""

import asyncio
import datetime
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from relaygr.cli import lab_options as options
from relaygr.cli.lab_told import number, share
from relaygr.lab.workload import Workload

if TYPE_CHECKING:
    from relaygr.lab.bench import Bench
    from relaygr.lab.device import Device
    from relaygr.lab.found import Found, Limit
    from relaygr.lab.outcome import Budgets
    from relaygr.lab.probe import Probe
    from relaygr.lab.probe_file import ProbeFile, Start
    from relaygr.serving.modes import Mode

__all__ = ["Search", "tell"]

_STEP: Final = 1.13
"""So many times what was found and confirmed fails: a step of the search, rounded."""


@dataclass(frozen=True)
class Search:
    """For the highest of something that a workload may have."""

    what: str
    served: options.Served
    workload: Workload
    """Of which each probe has another rate, or other lengths."""
    budgets: "Budgets"
    at: "Callable[[Device], Callable[[Mode, float], Probe]]"
    guess: "Callable[[Device, Mode], float]"
    tries: int
    highest: float = 1e9
    grain: float = 0.0
    """What is tried differs by no less."""

    @property
    def key(self) -> str:
        """What makes it another search."""
        told = {"workload": self.workload.told(), "budgets": asdict(self.budgets), "served": self.served.name}
        return f"{self.what}: {json.dumps(told, sort_keys=True)}"

    @property
    def traffic(self) -> dict[str, Any]:
        return {"sources": self.workload.sources, "hybrid": self.workload.hybrid}

    @property
    def kept(self) -> dict[str, Any]:
        """What is kept with each probe: where its facts are from, and which search it was first run for."""
        from relaygr.lab.probe_file import Searched

        return {"traffic": self.traffic, "searched": Searched.name(self.key)}

    @property
    def ran(self) -> dict[str, Any]:
        """What runs it, and when."""
        from relaygr.lab.machine import machine

        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return {"version": importlib.metadata.version("relaygr"), "date": now, "machine": machine()}

    def _sent(self, probe: "Probe") -> float:
        return probe.workload.rate if self.what == "rate" else float(probe.workload.lengths)

    def sure(self, limit: "Limit") -> bool:
        """Whether more tries would tell no more: it is confirmed, and either failed a step above or is the highest."""
        if not limit.confirmed or limit.value is None:
            return False
        nearest = max(_STEP * limit.value, limit.value + self.grain)
        return limit.value + self.grain >= self.highest or (limit.failed is not None and limit.failed <= nearest)

    async def run(self, probes: Path, modes: "list[Mode]") -> "tuple[Found, Start]":
        from relaygr.lab.limits import Limits
        from relaygr.lab.probe_file import ProbeFile
        from relaygr.serving.modes import Mode

        console = Console(stderr=True)
        file = ProbeFile(probes)
        async with self.served.bench(self.workload.longest) as bench:
            with console.status("measuring, and simulating where to begin"):
                start = await self._start(bench, file, modes)
            limits = Limits(bench, file, lambda line: console.print(line, highlight=False, soft_wrap=True))
            wanted = self.at(start.device)
            guesses = {each: start.guesses[each] for each in modes}
            found = await limits.search(
                wanted, guesses, tries=self.tries, highest=self.highest, sent=self._sent, **self.kept
            )
            file.end(self.key, found.told(), **self.ran)
            held = found.limits.get(Mode.RELAY_HOST_EXTEND)
            for each in Mode:
                beside = self.what == "rate" and each not in modes and each is not Mode.RANDOM_ROUTING  # no router here
                if held and beside:
                    await limits.told(wanted(each, held).tried(1), **self.kept)
            if bench.samples:
                checked = await asyncio.to_thread(bench.check)
                console.print(_scores(checked), highlight=False, soft_wrap=True)
        return found, start

    async def _start(self, bench: "Bench", file: "ProbeFile", modes: "list[Mode]") -> "Start":
        """Where it began before, or begins now; with the guesses of all these modes."""
        from relaygr.lab.probe_file import Start

        start = file.start(self.key) or Start(await bench.measure(), {})
        missing = [each for each in modes if each not in start.guesses]
        if missing:
            more = {each.value: await asyncio.to_thread(self.guess, start.device, each) for each in missing}
            start = Start(start.device, start.guesses | more)
            file.begin(self.key, start, **self.ran)
        return start


def tell(search: Search, found: "Found", start: "Start", as_json: bool) -> None:
    from relaygr.lab.found import shown_value
    from relaygr.serving.modes import Mode

    over = [each for each in (Mode.FULL, Mode.CACHE) if each in found.limits]
    guesses = {each.value: start.guesses[each] for each in found.limits}
    told = {
        "traffic": search.traffic,
        "found": {each.value: value for each, value in found.limits.items()},
        "confirmed": {each.value: limit.confirmed for each, limit in found.modes.items()},
        "failed_above": {each.value: limit.failed for each, limit in found.modes.items()},
        "simulated": guesses,
        "simulated_off": {
            each.value: guesses[each] / value - 1 for each, value in found.limits.items() if value is not None
        },
        "ratio": {each.value: found.ratio(each) for each in over},
        "ratio_between": {each.value: found.ratio_between(each) for each in over},
        "best": {each.value: rows for each, rows in found.best.items()},
    }
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    table = Table(title=f"highest {search.what} within the budgets", box=None, padding=(0, 1, 0, 0))
    for head in ("mode", "found", "failed at", "simulated", "the relay holds", "P99, ms", "reuse"):
        table.add_column(head, no_wrap=True)
    for each, limit in found.modes.items():
        best = found.best.get(each, {})
        ratio = "" if each is Mode.RELAY_HOST_EXTEND else found.shown_ratio(each)
        table.add_row(
            each.value, limit.shown, limit.shown_failed, shown_value(guesses[each]), ratio,
            number(best.get("ranking P99")), share(best.get("reuse")),
        )  # fmt: skip
    console = Console()
    console.print(table)
    for line in _hints(search, found):
        console.print(line, highlight=False, soft_wrap=True)
    if search.what == "rate":
        sources = search.workload.sources
        hybrid = "; a hybrid: nobody has seen these together" if search.workload.hybrid else ""
        console.print(
            f"users: {sources['users']}; lengths: {sources['lengths']}{hybrid}", highlight=False, soft_wrap=True
        )
        if (recorded := search.workload.recorded) is not None:
            soon = recorded.returns_within(search.workload.past_s)
            console.print(
                f"{soon:.0%} of the recorded returns come within --past-s, {search.workload.past_s:g} s: others count "
                "as newcomers",
                highlight=False,
                soft_wrap=True,
            )


def _scores(checked: Mapping[str, Any]) -> str:
    if not checked["samples"]:
        return "scores: none compared"
    verdict = "within what is allowed" if checked["holds"] else "MORE than is allowed"
    return (
        f"scores: of {checked['samples']} answers compared with full inference the largest difference is "
        f"{checked['difference']:.2g}, {verdict}, {checked['allowed']:.2g}"
    )


def _hints(search: Search, found: "Found") -> "Iterator[str]":
    """What is to be known of limits that were not found, or not for sure."""
    from relaygr.lab.found import UNCONFIRMED

    limits = [limit for limit in found.modes.values() if not search.sure(limit)]
    if any(limit.value is None for limit in limits):
        yield "none: nothing that was tried held, and held again"
    if any(limit.value is not None and not limit.confirmed for limit in limits):
        yield f"{UNCONFIRMED}: held once, and no try was left to see whether it holds again"
    if limits:
        yield (
            f"The limit is between what held and what failed: the same command with more --tries than {search.tries} "
            "goes on and narrows it"
        )
