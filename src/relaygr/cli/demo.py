"""`relaygr demo`."""

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from relaygr.errors import RelayError
from relaygr.lab.demo import Demo, DemoResult, run_demo

__all__ = ["demo"]

_DEFAULTS = Demo()


def demo(
    users: Annotated[int, typer.Option(min=1, help="Users who come back.")] = _DEFAULTS.users,
    visits: Annotated[int, typer.Option(min=1, help="Visits of each user.")] = _DEFAULTS.visits,
    length: Annotated[int, typer.Option(min=1, help="Behaviours in the first user's history.")] = _DEFAULTS.length,
    candidates: Annotated[int, typer.Option(min=1, help="Items to rank on each visit.")] = _DEFAULTS.candidates,
    seed: Annotated[int, typer.Option(help="Of the model, the histories and the candidates.")] = _DEFAULTS.seed,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, for machines.")] = False,
) -> None:
    """Rank users who come back with new behaviours, by relay and in full, on this machine's CPU.

    Both ways run the same model. The relay makes the prefix of the history while the earlier stages of the cascade
    would run, keeps it, and extends it on the next visit; `path` says what a rank still needed. Scores are compared.
    """
    console = Console(stderr=True)
    columns = (TextColumn("visits"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("visits", total=users * visits)
        wanted = Demo(users=users, visits=visits, length=length, candidates=candidates, seed=seed)
        try:
            result = asyncio.run(run_demo(wanted, lambda done, total: bar.update(task, completed=done)))
        except RelayError as error:
            console.print(f"[red]relaygr demo:[/] {error}")
            raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps({**asdict(result), "speedup": result.speedup, "paths": result.paths}, indent=2))
    else:
        _show(result)
    if result.largest_difference > 1.0:
        console.print("[red]The scores differ by more than rounding.[/]")
        raise typer.Exit(1)


def _show(result: DemoResult) -> None:
    demo = result.demo
    console = Console()
    title = f"{demo.layers} layers, d {demo.dim}, {demo.candidates} candidates, float32 on the CPU"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False, collapse_padding=True)
    for heading in ("user", "visit", "history", "signal", "path", "relay ms", "full ms", "ratio", "max |Δ|"):
        table.add_column(heading, justify="left" if heading in ("user", "signal", "path") else "right", no_wrap=True)
    for v in result.visits:
        ratio = f"{v.full_ms / v.relay_ms:.1f}×"
        table.add_row(
            *(v.user, str(v.visit), str(v.length), v.signal, v.path),
            *(f"{v.relay_ms:.1f}", f"{v.full_ms:.1f}", ratio, f"{v.difference:.0e}"),
        )
    console.print(table)
    paths = ", ".join(f"{path} {count}" for path, count in sorted(result.paths.items()))
    share = 100 * result.largest_difference
    console.print(f"Ranking by relay: {result.speedup:.1f}× faster at the median ({paths}).")
    console.print(f"Largest difference of scores: {share:.1f}% of what rounding allows.")
