"""`relaygr lab slo` and `length`: the highest rate, and the longest history, within the budgets."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from relaygr.cli import lab_options as options
from relaygr.cli.lab_told import number, share
from relaygr.cli.output import errors
from relaygr.errors import InvalidInput
from relaygr.lab.workload import STAGE_SPREAD, STAGES, Workload

if TYPE_CHECKING:
    from relaygr.lab.bench import Bench
    from relaygr.lab.device import Device
    from relaygr.lab.limits import Found
    from relaygr.lab.outcome import Budgets
    from relaygr.lab.probe import Probe
    from relaygr.lab.probe_file import ProbeFile, Start
    from relaygr.serving.modes import Mode

__all__ = ["EPILOG", "length", "slo"]

EPILOG: Final = (
    "Defaults are sized for a CPU. On a GPU: --device cuda --dtype bfloat16 --shape d512 (or your --model) "
    "--candidates 512 --device-cache 80% --host-cache 64GiB, and for slo --lengths 32768, or your own."
)
_DEFAULT: Final = Workload(1.0, 1.0, lengths="2048", candidates=64, past_s=16.0, stage_spread=STAGE_SPREAD)

Probes = Annotated[Path, typer.Argument(help="A file of probes, one JSON line each; what is in it is not run again.")]
Tries = Annotated[int, typer.Option(min=1, help="Probes of each mode at most.")]


def slo(
    probes: Probes,
    profile: options.Profile = _DEFAULT.profile,
    reuse: options.Reuse = _DEFAULT.reuse,
    gap_s: options.GapS = _DEFAULT.gap_s,
    skew: options.Skew = _DEFAULT.skew,
    recorded: options.Recorded = None,
    lengths: options.Lengths = None,
    longest: options.Longest = _DEFAULT.longest,
    new: options.New = _DEFAULT.new,
    candidates: options.Candidates = _DEFAULT.candidates,
    retrieval_ms: options.RetrievalMs = None,
    pre_processing_ms: options.PreProcessingMs = None,
    stage_spread: options.StageSpread = _DEFAULT.stage_spread,
    arrivals: options.Arrivals = _DEFAULT.arrivals,
    past_s: options.PastS = _DEFAULT.past_s,
    seed: options.Seed = 0,
    mode: options.Modes = None,
    shape: options.Shape = "d64",
    model: options.Model = None,
    device: options.DeviceName = "cpu",
    dtype: options.DType = "float32",
    device_cache: options.DeviceCache = "512MiB",
    host_cache: options.HostCache = "512MiB",
    ranking_ms: options.RankingMs = 50.0,
    pipeline_ms: options.PipelineMs = 200.0,
    tries: Tries = 8,
    as_json: options.AsJson = False,
) -> None:
    """Find the highest rate at which P99 of ranking and pipeline hold and 99 of 100 requests are answered, by mode.

    The simulator, with costs measured here, says where to begin; then modes take turns on the real engine, and what is
    found is confirmed by another run. Each probe is a line of the file as soon as it is done: call it again, and it
    goes on where it was ended. The other modes are measured at the rate that the relay was found to hold.

    Traffic is that of `relaygr lab workload`, with the same options; the rate is what is searched. Lengths not given,
    nor recorded: 2048. Stage times not given: of what --pipeline-ms leaves beside --ranking-ms, retrieval takes 60% and
    pre-processing 20% in the middle (90 and 30 ms of 200 and 50). The relay works in that time: give yours.
    """
    from relaygr.lab.limits import guess_rate
    from relaygr.lab.outcome import Budgets

    with errors("lab slo"):
        budgets = Budgets(ranking_ms, pipeline_ms)
        base = options.with_own(
            Workload(
                1.0, 1.0, profile, reuse, gap_s, skew, _DEFAULT.lengths, longest, new, candidates,
                *_stages(budgets, retrieval_ms, pre_processing_ms), stage_spread, arrivals, past_s, seed,
            ),
            recorded,
            lengths,
        )  # fmt: skip
        middle, most = base.length_quantiles.at(np.array([0.5, 1.0])).tolist()
        most = min(round(most), longest)
        base = replace(base, longest=min(longest, most + max(1024, int(256 * new))))
        served = options.Served(shape, model, device, dtype, device_cache, host_cache)

        def at(known: "Device") -> "Callable[[Mode, float], Probe]":
            def probe(each: "Mode", rate: float) -> "Probe":
                return known.probe(each, base, budgets, most, served.name).at(rate=float(f"{rate:.3g}"))

            return probe

        def guess(known: "Device", each: "Mode") -> float:
            return guess_rate(known, at(known), each, middle, candidates, returning=base.returning)

        search = _Search("rate", served, base, budgets, at, guess, tries)
        found, start = asyncio.run(search.run(probes, options.modes(mode)))
    _tell(search, found, start, as_json)


def length(
    probes: Probes,
    longest: Annotated[int, typer.Option(min=128, help="The longest history tried.")] = 32_768,
    reuse: options.Reuse = 0.0,
    new: options.New = _DEFAULT.new,
    candidates: options.Candidates = _DEFAULT.candidates,
    retrieval_ms: options.RetrievalMs = None,
    pre_processing_ms: options.PreProcessingMs = None,
    stage_spread: options.StageSpread = _DEFAULT.stage_spread,
    seed: options.Seed = 0,
    mode: options.Modes = None,
    shape: options.Shape = "d64",
    model: options.Model = None,
    device: options.DeviceName = "cpu",
    dtype: options.DType = "float32",
    device_cache: options.DeviceCache = "512MiB",
    host_cache: options.HostCache = "512MiB",
    ranking_ms: options.RankingMs = 50.0,
    pipeline_ms: options.PipelineMs = 200.0,
    tries: Tries = 8,
    as_json: options.AsJson = False,
) -> None:
    """Find the longest history at which P99 of ranking and pipeline hold, one request at a time, by mode.

    Searched as by `relaygr lab slo`: the simulator says where to begin, modes take turns, each probe is kept. All users
    have histories of the length that is tried; those who return do so 2 s later on average. Stage times not given: of
    what --pipeline-ms leaves beside --ranking-ms, retrieval takes 60% and pre-processing 20% in the middle.
    """
    from relaygr.lab.limits import guess_length
    from relaygr.lab.outcome import Budgets

    with errors("lab length"):
        budgets = Budgets(ranking_ms, pipeline_ms)
        stages = _stages(budgets, retrieval_ms, pre_processing_ms)
        base = Workload(
            0.9e3 / pipeline_ms, 1.0, "reuse", reuse, gap_s=2.0, lengths=str(longest), new=new, candidates=candidates,
            longest=longest + max(1024, int(256 * new)), past_s=12.0, arrivals="even", retrieval_ms=stages[0],
            pre_processing_ms=stages[1], stage_spread=stage_spread, seed=seed,
        )  # fmt: skip
        served = options.Served(shape, model, device, dtype, device_cache, host_cache)

        def at(known: "Device") -> "Callable[[Mode, float], Probe]":
            def probe(each: "Mode", value: float) -> "Probe":
                tuned = known.probe(each, base, budgets, int(value), served.name, one_at_a_time=True)
                return tuned.at(length=max(128, int(value) // 128 * 128), requests=60)

            return probe

        def guess(known: "Device", each: "Mode") -> float:
            return guess_length(known, at(known), each, candidates, float(longest), returning=reuse > 0.5)

        search = _Search("length", served, base, budgets, at, guess, tries, highest=float(longest))
        found, start = asyncio.run(search.run(probes, options.modes(mode)))
    _tell(search, found, start, as_json)


@dataclass(frozen=True)
class _Search:
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
        return {"traffic": self.traffic, "searched": hashlib.sha256(self.key.encode()).hexdigest()[:16]}

    def _sent(self, probe: "Probe") -> float:
        return probe.workload.rate if self.what == "rate" else float(probe.workload.lengths)

    async def run(self, probes: Path, modes: "list[Mode]") -> "tuple[Found, Start]":
        from relaygr.lab.limits import Limits
        from relaygr.lab.probe_file import ProbeFile
        from relaygr.serving.modes import Mode

        console = Console(stderr=True)
        file = ProbeFile(probes)
        async with self.served.bench(self.workload.longest) as bench:
            with console.status("measuring, and simulating where to begin"):
                start = await self._start(bench, file, modes)
            limits = Limits(bench, file, lambda line: console.print(line, highlight=False))
            wanted = self.at(start.device)
            guesses = {each: start.guesses[each] for each in modes}
            found = await limits.search(
                wanted, guesses, tries=self.tries, highest=self.highest, sent=self._sent, **self.kept
            )
            held = found.limits.get(Mode.RELAY_HOST_EXTEND)
            for each in Mode:
                beside = self.what == "rate" and each not in modes and each is not Mode.RANDOM_ROUTING  # no router here
                if held and beside:
                    await limits.told(wanted(each, held).tried(1), **self.kept)
            if bench.samples:
                checked = await asyncio.to_thread(bench.check)
                console.print(f"scores: {checked}", highlight=False)
        return found, start

    async def _start(self, bench: "Bench", file: "ProbeFile", modes: "list[Mode]") -> "Start":
        """Where it began before, or begins now; with the guesses of all these modes."""
        from relaygr.lab.probe_file import Start

        start = file.start(self.key) or Start(await bench.measure(), {})
        missing = [each for each in modes if each not in start.guesses]
        if missing:
            more = {each.value: await asyncio.to_thread(self.guess, start.device, each) for each in missing}
            start = Start(start.device, start.guesses | more)
            file.begin(self.key, start)
        return start


def _tell(search: _Search, found: "Found", start: "Start", as_json: bool) -> None:
    from relaygr.serving.modes import Mode

    guesses = {each.value: start.guesses[each] for each in found.limits}
    told = {
        "traffic": search.traffic,
        "found": {each.value: value for each, value in found.limits.items()},
        "simulated": guesses,
        "simulated_off": {
            each.value: guesses[each] / value - 1 for each, value in found.limits.items() if value is not None
        },
        "ratio": {each.value: found.ratio(each) for each in (Mode.FULL, Mode.CACHE) if each in found.limits},
        "best": {each.value: rows for each, rows in found.best.items()},
    }
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    table = Table(title=f"highest {search.what} within the budgets", box=None)
    for head in ("mode", "found", "simulated", "the relay holds", "ranking P99, ms", "reuse"):
        table.add_column(head)
    for each, value in found.limits.items():
        best, ratio = found.best.get(each, {}), found.ratio(each)
        table.add_row(
            each.value, "none" if value is None else f"{value:.4g}", f"{guesses[each]:.4g}",
            "" if ratio is None else f"{ratio:.2f}×", number(best.get("ranking P99")),
            share(best.get("reuse")),
        )  # fmt: skip
    console = Console()
    console.print(table)
    if None in found.limits.values():
        console.print("none: nothing that was tried held, and held again; the same command with more --tries goes on")
    if search.what == "rate":
        sources = search.workload.sources
        hybrid = "; a hybrid: nobody has seen these together" if search.workload.hybrid else ""
        console.print(f"users: {sources['users']}; lengths: {sources['lengths']}{hybrid}", highlight=False)
        if (recorded := search.workload.recorded) is not None:
            share = recorded.returns_within(search.workload.past_s)
            console.print(
                f"{share:.0%} of the recorded returns come within --past-s, {search.workload.past_s:g} s: others count "
                "as newcomers",
                highlight=False,
            )


def _stages(budgets: "Budgets", *given: float | None) -> tuple[float, float]:
    """Milliseconds of retrieval and pre-processing; those not given, by their shares of what the budgets leave."""
    taken = [ms if ms is not None else share * budgets.lead_ms for ms, share in zip(given, STAGES, strict=True)]
    if sum(taken) >= budgets.pipeline_ms:
        raise InvalidInput(
            "pre_processing_ms" if given[0] is None else "retrieval_ms",
            f"leaves nothing to rank in: stages take {sum(taken):g} in the middle of pipeline_ms, "
            f"{budgets.pipeline_ms:g}",
        )
    return taken[0], taken[1]
