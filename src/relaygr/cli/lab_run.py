"""`relaygr lab run`, `slo` and `length`: what really happens, in process or over HTTP."""

import asyncio
import functools
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from relaygr.bars import progress_bar
from relaygr.cli.output import errors
from relaygr.lab.workload import Profile

if TYPE_CHECKING:
    from relaygr.lab.bench import Bench
    from relaygr.lab.limits import Found
    from relaygr.lab.probe import Device, Probe
    from relaygr.serving.modes import Mode

__all__ = ["length", "run", "slo"]

Shape = Annotated[str, typer.Option(help="Random weights of a named shape: d64, d256, d512, d1024, dlrmv3.")]
Model = Annotated[Path | None, typer.Option(help="A checkpoint, model.safetensors, in place of a shape.")]
DeviceName = Annotated[str, typer.Option("--device", help="cpu, cuda …")]
DType = Annotated[str, typer.Option(help="float32, bfloat16, float16.")]
DeviceCache = Annotated[str, typer.Option(help="Memory for prefixes on the device.")]
HostCache = Annotated[str, typer.Option(help="Memory for prefixes on the host.")]
RankingMs = Annotated[float, typer.Option(min=0.001, help="What ranking may take.")]
PipelineMs = Annotated[float, typer.Option(min=0.001, help="What a request may take in all.")]
Modes = Annotated[list[str] | None, typer.Option("--mode", help="Once for each; not given: full, cache and the relay.")]
Probes = Annotated[Path, typer.Argument(help="A file of probes, one JSON line each; what is in it is not run again.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what came out as JSON, for machines.")]


def run(
    trace: Annotated[Path, typer.Argument(help="A trace of relaygr lab workload.")],
    out: Annotated[Path, typer.Argument(help="The records to write, a Parquet file: one row for each request.")],
    url: Annotated[
        str | None, typer.Option(help="A gateway to send to, such as http://127.0.0.1:8000; not given: in process.")
    ] = None,
    name: Annotated[str, typer.Option(help="Over HTTP: what users are called, with a number behind.")] = "lab",
    mode: Annotated[
        str, typer.Option(help="The mode to serve in; over HTTP, the mode that the servers are in.")
    ] = "relay+host+extend",
    shape: Shape = "d64",
    model: Model = None,
    device: DeviceName = "cpu",
    dtype: DType = "float32",
    device_cache: DeviceCache = "512MiB",
    host_cache: HostCache = "512MiB",
    ranking_ms: RankingMs = 50.0,
    pipeline_ms: PipelineMs = 200.0,
    check: Annotated[
        int,
        typer.Option(min=0, help="About how many answers are checked against full inference; over HTTP: of --model."),
    ] = 8,
    as_json: AsJson = False,
) -> None:
    """Send a trace's requests at their times, whatever the answers do, and write what became of each.

    Latency counts from when a request was to be sent. The past of the trace is sent, too, and not counted. In process,
    the engine, the trigger and admission are real, and the stages before ranking take what the trace says; over HTTP,
    a gateway and its instances serve, and stages take what they take. A sample of scores is checked.
    """
    from relaygr.lab.histories import Histories
    from relaygr.lab.outcome import Budgets, Run
    from relaygr.lab.records import save_records
    from relaygr.lab.run import Sample
    from relaygr.lab.trace import Trace

    with errors("lab run"):
        chosen, requests = _modes([mode])[0], Trace.load(trace)
        budgets = Budgets(ranking_ms, pipeline_ms)
        longest = int(requests.length.max(initial=1))
        samples: list[Sample] = []

        async def in_process(bar: Progress) -> tuple[Run, dict[str, Any] | None]:
            task = bar.add_task(chosen.value, total=len(requests))
            async with _bench(shape, model, device, dtype, device_cache, host_cache, longest) as bench:
                most = int(requests.candidates.max(initial=1))
                probe = _probe(chosen, budgets, await bench.measure(), longest, most)
                advance = functools.partial(_advance, bar, task)
                found = await bench.run(probe, advance, sampled=check, trace=requests)
                return found, await asyncio.to_thread(bench.check) if bench.samples else None

        async def over_http(bar: Progress, address: str) -> tuple[Run, dict[str, Any] | None]:
            from relaygr.lab.oracle import check as compare
            from relaygr.lab.over_http import replay_over_http
            from relaygr.model import checkpoint

            task = bar.add_task(address, total=len(requests))
            loaded = checkpoint.load(model) if model is not None else None
            items = loaded.config.items if loaded is not None else 1000
            found = await replay_over_http(
                address, requests, chosen, Histories(items, 2), name,
                lambda what, done, of: bar.update(task, description=what, completed=done, total=of),
                samples, check if loaded is not None else 0,
            )  # fmt: skip
            if loaded is None or not samples:
                return found, None
            checked = await asyncio.to_thread(compare, loaded, samples, "cpu", dtype)
            return found, asdict(checked) | {"holds": checked.holds}

        with progress_bar() as bar:
            found, checked = asyncio.run(in_process(bar) if url is None else over_http(bar, url))
        told = found.told(budgets) | {"budgets_ms": [ranking_ms, pipeline_ms], "oracle": checked}
        save_records(out, found.records, told | {"trace": requests.made})
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    table = Table(box=None, show_header=False)
    for key, value in told.items():
        table.add_row(key, _cell(value))
    Console().print(table)


def slo(
    probes: Annotated[
        Path, typer.Argument(help="A file of probes, one JSON line each; what is in it is not run again.")
    ],
    lengths: Annotated[str, typer.Option(help="Behaviours of users: kuairand-1k, ml-1m, or a number.")] = "2048",
    profile: Annotated[Profile, typer.Option(help="How users come back.")] = "refresh",
    reuse: Annotated[float, typer.Option(help="Profile reuse: the share of requests by users who return.")] = 0.0,
    candidates: Annotated[int, typer.Option(help="Items to rank.")] = 64,
    mode: Modes = None,
    shape: Shape = "d64",
    model: Model = None,
    device: DeviceName = "cpu",
    dtype: DType = "float32",
    device_cache: DeviceCache = "512MiB",
    host_cache: HostCache = "512MiB",
    ranking_ms: RankingMs = 50.0,
    pipeline_ms: PipelineMs = 200.0,
    tries: Annotated[int, typer.Option(min=1, help="Probes of each mode at most.")] = 6,
    as_json: AsJson = False,
) -> None:
    """Find the highest rate at which P99 of ranking and pipeline hold and 99 of 100 requests are answered, by mode.

    The simulator, with costs measured here, says where to begin; then modes take turns on the real engine, and what is
    found is confirmed by another run. Each probe is a line of the file as soon as it is done: call it again, and it
    goes on where it was ended. The other modes are measured at the rate that the relay was found to hold.
    """
    from relaygr.lab.limits import guess_rate
    from relaygr.lab.outcome import Budgets
    from relaygr.lab.workload import Workload
    from relaygr.serving.modes import Mode

    with errors("lab slo"):
        modes, budgets = _modes(mode), Budgets(ranking_ms, pipeline_ms)
        base = Workload(
            1.0,
            1.0,
            profile,
            reuse,
            lengths=lengths,
            candidates=candidates,
            past_s=16.0,
            **_stages(budgets),
        )
        typical, longest = _lengths(base)
        bench = _bench(shape, model, device, dtype, device_cache, host_cache, longest)

        def at(known: "Device") -> "Callable[[Mode, float], Probe]":
            def probe(each: "Mode", rate: float) -> "Probe":
                tuned = _probe(each, budgets, known, longest - 1024, candidates)
                return replace(tuned, workload=base).at(rate=_digits(rate))

            return probe

        def guess(known: "Device", each: "Mode") -> float:
            returning = profile != "reuse" or reuse > 0
            return guess_rate(known, at(known), each, typical, candidates, returning=returning)

        found, guesses = asyncio.run(_search(bench, probes, modes, at, guess, tries, others=list(Mode)))
    _tell("rate", found, guesses, as_json)


def length(
    probes: Annotated[
        Path, typer.Argument(help="A file of probes, one JSON line each; what is in it is not run again.")
    ],
    longest: Annotated[int, typer.Option(help="The longest history tried.")] = 32_768,
    reuse: Annotated[float, typer.Option(help="The share of requests by users who return.")] = 0.0,
    candidates: Annotated[int, typer.Option(help="Items to rank.")] = 64,
    mode: Modes = None,
    shape: Shape = "d64",
    model: Model = None,
    device: DeviceName = "cpu",
    dtype: DType = "float32",
    device_cache: DeviceCache = "512MiB",
    host_cache: HostCache = "512MiB",
    ranking_ms: RankingMs = 50.0,
    pipeline_ms: PipelineMs = 200.0,
    tries: Annotated[int, typer.Option(min=1, help="Probes of each mode at most.")] = 6,
    as_json: AsJson = False,
) -> None:
    """Find the longest history at which P99 of ranking and pipeline hold, one request at a time, by mode.

    Searched as by `relaygr lab slo`: the simulator says where to begin, modes take turns, each probe is kept.
    """
    from relaygr.lab.limits import guess_length
    from relaygr.lab.outcome import Budgets
    from relaygr.lab.workload import Workload

    with errors("lab length"):
        modes, budgets = _modes(mode), Budgets(ranking_ms, pipeline_ms)
        base = Workload(
            0.9e3 / pipeline_ms, 1.0, "reuse", reuse, gap_s=2.0, candidates=candidates, longest=1 << 24, past_s=6.0,
            arrivals="even", **_stages(budgets),
        )  # fmt: skip
        bench = _bench(shape, model, device, dtype, device_cache, host_cache, longest + 1024)

        def at(known: "Device") -> "Callable[[Mode, float], Probe]":
            def probe(each: "Mode", value: float) -> "Probe":
                tuned = _probe(each, budgets, known, int(value), candidates)
                tuned = replace(tuned, tuning=replace(tuned.tuning, step_ms=max(tuned.tuning.step_ms, ranking_ms / 2)))
                return replace(tuned, workload=base).at(length=max(128, int(value) // 128 * 128), requests=60)

            return probe

        def guess(known: "Device", each: "Mode") -> float:
            return guess_length(known, at(known), each, candidates, float(longest), returning=reuse > 0.5)

        found, guesses = asyncio.run(_search(bench, probes, modes, at, guess, tries, highest=float(longest)))
    _tell("length", found, guesses, as_json)


async def _search(
    opened: "Bench",
    probes: Path,
    modes: "list[Mode]",
    at: "Callable[[Device], Callable[[Mode, float], Probe]]",
    guess: "Callable[[Device, Mode], float]",
    tries: int,
    *,
    highest: float = 1e9,
    others: "list[Mode] | None" = None,
) -> "tuple[Found, dict[str, float]]":
    from relaygr.lab.limits import Limits
    from relaygr.lab.probe import ProbeFile
    from relaygr.serving.modes import Mode

    console = Console(stderr=True)
    file = ProbeFile(probes)
    async with opened as bench:
        with console.status("measuring, and simulating where to begin"):
            known = await bench.measure()
            guesses = {each: await asyncio.to_thread(guess, known, each) for each in modes}
        limits = Limits(bench, file, lambda line: console.print(line, highlight=False))
        wanted = at(known)
        found = await limits.search(wanted, guesses, tries=tries, highest=highest)
        held = found.limits.get(Mode.RELAY_HOST_EXTEND)
        for each in others or ():
            if held and each not in modes and each is not Mode.RANDOM_ROUTING:  # one instance has no router
                await limits.told(wanted(each, held).seeded(1))
        if bench.samples:
            checked = await asyncio.to_thread(bench.check)
            console.print(f"scores: {checked}", highlight=False)
    return found, {each.value: value for each, value in guesses.items()}


def _tell(what: str, found: "Found", guesses: dict[str, float], as_json: bool) -> None:
    from relaygr.serving.modes import Mode

    told = {
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
    table = Table(title=f"highest {what} within the budgets", box=None)
    for head in ("mode", "found", "simulated", "the relay holds", "ranking P99, ms", "reuse"):
        table.add_column(head)
    for each, value in found.limits.items():
        best, ratio = found.best.get(each, {}), found.ratio(each)
        table.add_row(
            each.value, "none" if value is None else f"{value:.4g}", f"{guesses[each]:.4g}",
            "" if ratio is None else f"{ratio:.2f}×", _cell(best.get("ranking P99")), _cell(best.get("reuse")),
        )  # fmt: skip
    Console().print(table)


def _bench(
    shape: str, model: Path | None, device: str, dtype: str, device_cache: str, host_cache: str, longest: int
) -> "Bench":
    from relaygr.config import EngineConfig
    from relaygr.lab.bench import Bench
    from relaygr.lab.shapes import shaped
    from relaygr.model import checkpoint

    config = EngineConfig(
        device=device, dtype=dtype, device_cache=device_cache, host_cache=host_cache, max_history=longest
    )
    if device == "cpu":
        import torch

        torch.set_num_threads(1)  # the loop needs a core, too
    return Bench(checkpoint.load(model) if model is not None else shaped(shape), config)


def _probe(mode: "Mode", budgets: Any, known: "Device", length: int, candidates: int) -> "Probe":
    """Tuned for histories of this length."""
    from relaygr.lab.probe import Probe
    from relaygr.lab.tuning import Tuning
    from relaygr.lab.workload import Workload

    alone_s = known.full_s(length, candidates)
    return Probe(mode, Workload(1.0, 1.0), budgets, Tuning.of(budgets, mode, known.costs.step, alone_s))


def _modes(names: list[str] | None) -> "list[Mode]":
    from relaygr.errors import InvalidInput
    from relaygr.serving.modes import Mode

    unknown = [name for name in names or () if name not in list(Mode)]
    if unknown:
        raise InvalidInput("mode", f"is {unknown[0]!r}; choose from {', '.join(Mode)}")
    return [Mode(name) for name in names or (Mode.FULL, Mode.CACHE, Mode.RELAY_HOST_EXTEND)]


def _stages(budgets: Any) -> dict[str, Any]:
    """What the pipeline leaves to the stages before ranking: most of it, and at P99 nearly all."""
    return {
        "retrieval_ms": 0.6 * budgets.lead_ms,
        "pre_processing_ms": 0.2 * budgets.lead_ms,
        "stage_spread": 1.25,
    }


def _lengths(workload: Any) -> tuple[float, int]:
    """The middle, and more than the longest."""
    points = [value for _, value in workload.length_quantiles.points]
    return statistics.median(points), min(int(max(points)), workload.longest) + 1024


def _digits(rate: float) -> float:
    return float(f"{rate:.3g}")


def _advance(bar: Progress, task: Any, done: int, of: int) -> None:
    bar.update(task, completed=done)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key} {_cell(part)}" for key, part in value.items())
    if isinstance(value, list):
        return " – ".join(_cell(part) for part in value)
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
