"""`relaygr lab`: experiments."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from relaygr.bars import progress_bar
from relaygr.cli import lab_options as options
from relaygr.cli.lab_limits import EPILOG, length, slo
from relaygr.cli.lab_report import report
from relaygr.cli.lab_run import run
from relaygr.cli.lab_told import rows
from relaygr.cli.output import errors
from relaygr.lab.outputs import checked_file
from relaygr.lab.workload import Workload

__all__ = ["lab"]

lab = typer.Typer(help="Experiments: whether the relay pays on your traffic and hardware.", no_args_is_help=True)
lab.command()(run)
lab.command(epilog=EPILOG)(slo)
lab.command(epilog=EPILOG)(length)
lab.command()(report)

_DEFAULT = Workload(100.0, 60.0)


@lab.callback()
def main() -> None:
    """Experiments."""


@lab.command()
def workload(
    out: Annotated[Path, typer.Argument(help="The trace to write, a Parquet file.")],
    rate: Annotated[float, typer.Option(help="Requests a second, on average. More users, not shorter gaps.")] = 100.0,
    seconds: Annotated[float, typer.Option(help="How long it lasts.")] = 60.0,
    profile: options.Profile = _DEFAULT.profile,
    reuse: options.Reuse = _DEFAULT.reuse,
    gap_s: options.GapS = _DEFAULT.gap_s,
    skew: options.Skew = _DEFAULT.skew,
    recorded: options.Recorded = None,
    lengths: options.Lengths = None,
    longest: options.Longest = _DEFAULT.longest,
    new: options.New = _DEFAULT.new,
    candidates: options.Candidates = _DEFAULT.candidates,
    retrieval_ms: options.RetrievalMs = _DEFAULT.retrieval_ms,
    pre_processing_ms: options.PreProcessingMs = _DEFAULT.pre_processing_ms,
    stage_spread: options.StageSpread = _DEFAULT.stage_spread,
    arrivals: options.Arrivals = _DEFAULT.arrivals,
    past_s: options.PastS = _DEFAULT.past_s,
    seed: options.Seed = _DEFAULT.seed,
    as_json: options.AsJson = False,
) -> None:
    """Write a trace of requests: who asks when, with how long a history, and what the stages before ranking take.

    Arrivals do not wait for answers. Profiles: `refresh` (8 requests on average, 2 to 10 s apart), `globo` (sessions
    and gaps of a news portal, Globo.com), `reuse` (a share set directly). At a higher rate there are more users; the
    gaps of each stay what they were; so it is with recorded users. Lengths not given, nor recorded: kuairand-1k. A
    trace that joins facts of two sources says that it is a hybrid.
    """
    with errors("lab workload"):
        checked_file("trace", out)
        wanted = Workload(
            rate, seconds, profile, reuse, gap_s, skew, _DEFAULT.lengths, longest, new, candidates, retrieval_ms or 0.0,
            pre_processing_ms or 0.0, stage_spread, arrivals, past_s, seed,
        )  # fmt: skip
        trace = options.with_own(wanted, recorded, lengths).trace()
        trace.save(out)
    present = trace.at >= 0
    told: dict[str, Any] = {
        "requests": int(present.sum()),
        "past": int((~present).sum()),
        "users": len(set(trace.user[present].tolist())),
        "rate": float(present.sum() / seconds),
        "returning": trace.returning,
        "hybrid": trace.made["hybrid"],
        "sources": trace.made["sources"],
    }
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    table = Table(box=None, show_header=False)
    for name, value in told.items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    Console().print(table)


@lab.command()
def simulate(
    trace: Annotated[Path, typer.Argument(help="A trace of relaygr lab workload.")],
    costs: Annotated[
        Path, typer.Argument(help="What work costs on the device: an instance's answer to GET /v1/status, saved.")
    ],
    mode: options.Modes = None,
    ranking_ms: options.RankingMs = 50.0,
    target_ms: Annotated[
        float | None,
        typer.Option(help="The ranking time the trigger aims at; not given: a tenth of what ranking may take."),
    ] = None,
    pipeline_ms: options.PipelineMs = 200.0,
    device_cache: Annotated[
        str | None, typer.Option(help="Memory for prefixes on the device; not given: the instance's.")
    ] = None,
    host_cache: Annotated[
        str | None, typer.Option(help="Memory for prefixes on the host; not given: the instance's.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Replay a trace in virtual time, on a device that takes as long as yours was measured to, mode after mode.

    The trigger, admission, scheduler and expander are the real ones; the device and the network are not. It tells in
    seconds whether the relay is likely to pay on your traffic; what it says is a forecast, to be measured.
    """
    from relaygr.config import EngineConfig
    from relaygr.lab.device import Device
    from relaygr.lab.outcome import Budgets
    from relaygr.lab.trace import Trace

    with errors("lab simulate"):
        modes = options.modes(mode)
        requests, told = Trace.load(trace), _told(costs)
        longest = int(requests.length.max(initial=1))
        config = EngineConfig(
            device_cache=device_cache or f"{told.device_pages * told.page_bytes}B",
            host_cache=host_cache or f"{told.host_pages * told.page_bytes}B",
            max_history=longest,
        )
        device, budgets = Device(told.costs, told.page_bytes, config), Budgets(ranking_ms, pipeline_ms)
        sent = Workload(1.0, 1.0, candidates=int(requests.candidates.max(initial=1)))
        runs = []
        with progress_bar() as bar:
            for each in modes:
                task = bar.add_task(each.value, total=len(requests))
                probe = device.probe(each, sent, budgets, longest)
                if target_ms is not None:
                    probe = replace(probe, tuning=replace(probe.tuning, target_ms=target_ms))
                runs.append(device.run(probe, options.advance(bar, task), trace=requests).told(budgets))
    if as_json:
        typer.echo(json.dumps({"budgets_ms": [ranking_ms, pipeline_ms], "simulated": True, "runs": runs}, indent=2))
        return
    table = Table(title=f"simulated; budgets {ranking_ms:g} / {pipeline_ms:g} ms", box=None)
    table.add_column("")
    for each in modes:
        table.add_column(each.value)
    for name, cells in rows(runs):
        table.add_row(name, *cells)
    Console().print(table)


@dataclass(frozen=True)
class _Told:
    """What an instance's status says of its device."""

    costs: Any
    page_bytes: int
    device_pages: int
    host_pages: int


def _told(path: Path) -> _Told:
    from relaygr.engine.simulated import SimulatedCosts
    from relaygr.errors import InvalidInput

    if not path.exists():
        raise InvalidInput("costs", f"{path} does not exist")
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
        status = status.get("engine", status)
        steps, copies = status["cost_model"]["steps"], status["cost_model"]["copies"]
        costs = SimulatedCosts(*map(float, steps), *map(float, copies))
        return _Told(costs, *(int(status[name]) for name in ("page_bytes", "device_pages", "host_pages")))
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput("costs", f"{path} is not what an instance (no gateway) answers to GET /v1/status") from error
