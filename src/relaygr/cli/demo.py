"""`relaygr demo`."""

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from relaygr.bars import progress_bar
from relaygr.cli.output import errors
from relaygr.lab.demo import STAGES, Demo, DemoResult, run_demo

__all__ = ["demo"]

_DEFAULTS = Demo()


def demo(
    requests: Annotated[int, typer.Option(min=1, help="Requests of each replay.")] = _DEFAULTS.requests,
    users: Annotated[int, typer.Option(min=2, help="Users who come back.")] = _DEFAULTS.users,
    length: Annotated[int, typer.Option(min=1, help="Behaviours of a user, about.")] = _DEFAULTS.length,
    candidates: Annotated[int, typer.Option(min=1, max=1000, help="Items to rank.")] = _DEFAULTS.candidates,
    instances: Annotated[int, typer.Option(min=1, help="Instances to run.")] = _DEFAULTS.instances,
    seed: Annotated[int, typer.Option(min=0, help="Of histories and requests.")] = _DEFAULTS.seed,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, for machines.")] = False,
) -> None:
    """Serve users who come back, without the relay and with it, by real servers on this machine.

    It runs `relaygr serve all` twice, in the modes `full` and `relay+host+extend`, on copies of the same data, and
    sends both the same requests at the same times. Between two visits users do more, which the relay appends to what it
    has kept. `path` says what a rank still needed. Scores are compared, too.
    """
    console = Console(stderr=True)
    wanted = Demo(requests, users, length, candidates, instances, seed=seed)
    with errors("demo"), progress_bar(console) as bar:
        task = bar.add_task("starting", total=None)
        result = asyncio.run(
            run_demo(
                wanted,
                lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None),
            )
        )
    if as_json:
        ratios = {"ranking_p50_ratio": result.ranking_p50_ratio, "ranking_p99_ratio": result.ranking_p99_ratio}
        typer.echo(json.dumps({**asdict(result), **ratios}, indent=2))
    else:
        _show(result)
    if any(replay.failed for replay in result.replays):
        console.print("[red]Some requests were not answered.[/]")
        raise typer.Exit(1)
    if result.difference > result.allowed:
        console.print("[red]The scores differ by more than rounding.[/]")
        raise typer.Exit(1)


def _show(result: DemoResult) -> None:
    demo, console = result.demo, Console()
    title = (
        f"{result.requests} requests of {demo.users} users, {result.rate:.1f} a second; "
        f"{demo.length} behaviours, {demo.candidates} candidates"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("")
    for replay in result.replays:
        table.add_column(replay.mode, justify="right")
    for stage in STAGES:
        for quantile in ("p50", "p99"):
            times = (f"{replay.stages_ms[stage][quantile]:.1f}" for replay in result.replays)
            table.add_row(f"{stage.replace('_', '-')} {quantile.upper()}, ms", *times)
    for quantile in ("p50", "p99"):
        times = (f"{replay.answered_ms[quantile]:.1f}" for replay in result.replays)
        table.add_row(f"answered {quantile.upper()}, ms", *times)
    table.add_row("found a prefix", *(f"{replay.reuse:.0%}" for replay in result.replays))
    for path in sorted({path for replay in result.replays for path in replay.paths}):
        table.add_row(f"path {path}", *(str(replay.paths.get(path, 0)) for replay in result.replays))
    for decision in sorted({decision for replay in result.replays for decision in replay.decisions}):
        table.add_row(f"signal {decision}", *(str(replay.decisions.get(decision, 0)) for replay in result.replays))
    console.print(table)
    console.print(f"Retrieval takes {demo.retrieval_ms:g} ms at least here, as over millions of items.")
    middle, slowest = _told(result.ranking_p50_ratio), _told(result.ranking_p99_ratio)
    console.print(f"Ranking by relay: {middle} in the middle, {slowest} at P99.")
    share = result.difference / result.allowed
    console.print(f"Largest difference of scores: {result.difference:.1e}, {share:.1%} of what rounding allows.")


def _told(ratio: float) -> str:
    return f"{ratio:.1f}× shorter" if ratio >= 1 else f"{1 / ratio:.1f}× longer"
