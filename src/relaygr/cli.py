"""The `relaygr` command."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from relaygr.cascade import PipelineConfig
from relaygr.config import EngineConfig, OnMiss
from relaygr.errors import RelayError
from relaygr.lab.demo import Demo, DemoResult, run_demo
from relaygr.relay import TriggerConfig
from relaygr.serving.all import AllSettings, run_all
from relaygr.serving.run import InstanceSettings, run_instance

__all__ = ["app"]

app = typer.Typer(
    help="RelayGR: serve long-sequence generative recommenders.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
_DEFAULTS = Demo()
_INSTANCE = InstanceSettings(model="")
_ENGINE = EngineConfig()
_ALL = AllSettings(data=Path())
serve = typer.Typer(help="Run the servers.", no_args_is_help=True)
app.add_typer(serve, name="serve")


@app.callback()
def main() -> None:
    """RelayGR pre-infers the long part of a user's history while the earlier stages of the cascade run."""


@app.command()
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


@serve.command("all")
def serve_all(
    port: Annotated[int, typer.Option(min=0, max=65535, help="The gateway's port; 0 takes a free one.")] = 8000,
    instances: Annotated[int, typer.Option(min=1, help="Instances to run.")] = 2,
    data_dir: Annotated[
        Path, typer.Option(help="Where model, items and histories are kept; filled on first use.")
    ] = Path("relaygr-data"),
    ranking_budget_ms: Annotated[float, typer.Option(help="Time a rank may take.")] = _ALL.pipeline.ranking_ms,
    pipeline_budget_ms: Annotated[float, typer.Option(help="Time a request may take.")] = _ALL.pipeline.pipeline_ms,
) -> None:
    """Run a gateway and its instances on this machine, in one command.

    `POST /v1/recommend {"user": "user-7", "k": 10}` runs the whole cascade; `POST /v1/behaviours` appends what a user
    did. The first call makes a model with random weights, items and users. Ctrl-C stops everything.
    """
    console = Console(stderr=True)
    try:
        with console.status("starting") as status:

            def ready(address: str) -> None:
                status.stop()
                typer.echo(f"gateway serves on {address}")

            settings = AllSettings(
                data=data_dir,
                port=port,
                instances=instances,
                pipeline=PipelineConfig(pipeline_ms=pipeline_budget_ms, ranking_ms=ranking_budget_ms),
                trigger=TriggerConfig(ranking_budget_ms=ranking_budget_ms),
            )
            asyncio.run(run_all(settings, ready, lambda what: status.update(what)))
    except RelayError as error:
        console.print(f"[red]relaygr serve all:[/] {error}")
        raise typer.Exit(1) from error


@serve.command()
def instance(
    model: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="The checkpoint to serve.")],
    slot: Annotated[str, typer.Option(help="Its stable name, the same after a restart.")] = _INSTANCE.slot,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = _INSTANCE.host,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = _INSTANCE.port,
    store: Annotated[Path | None, typer.Option(help="The folder of the history store.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1 …")] = _ENGINE.device,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = _ENGINE.dtype,
    device_cache: Annotated[str, typer.Option(help="Memory for KV pages on the device.")] = _ENGINE.device_cache,
    host_cache: Annotated[str, typer.Option(help="Memory for KV pages on the host.")] = _ENGINE.host_cache,
    on_miss: Annotated[str, typer.Option(help="full, or truncate: rank on the newest behaviours that fit.")] = "full",
) -> None:
    """Serve one model: an engine process behind HTTP.

    `POST /v1/pre-infer` makes a history's prefix ready and answers at admission; `POST /v1/rank` scores candidates on a
    history, whatever is cached. `GET /v1/status`, `/healthz` and `/readyz` tell how it is. SIGTERM drains it.
    """
    try:
        settings = InstanceSettings(
            model=str(model),
            slot=slot,
            host=host,
            port=port,
            store=None if store is None else str(store),
            engine=EngineConfig(
                device=device,
                dtype=dtype,
                device_cache=device_cache,
                host_cache=host_cache,
                on_miss=cast(OnMiss, on_miss),
            ),
        )
        asyncio.run(run_instance(settings, lambda at: typer.echo(f"{slot} serves on http://{host}:{at}")))
    except RelayError as error:
        Console(stderr=True).print(f"[red]relaygr serve instance:[/] {error}")
        raise typer.Exit(1) from error


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
