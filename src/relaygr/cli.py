"""The `relaygr` command."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from relaygr.errors import RelayError
from relaygr.lab.demo import Demo, DemoResult, run_demo
from relaygr.serving.all import DEFAULTS, run_all
from relaygr.serving.run import run_gateway, run_instance
from relaygr.serving.settings import Overrides, Settings, read, render

__all__ = ["app"]

app = typer.Typer(
    help="RelayGR: serve long-sequence generative recommenders.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
_DEFAULTS = Demo()
_SETTINGS = Settings()
serve = typer.Typer(help="Run the servers.", no_args_is_help=True)
app.add_typer(serve, name="serve")

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The settings; see `relaygr config`. Options come before the file."),
]
Store = Annotated[Path | None, typer.Option(help="The folder of the history store.")]


def _host(default: str) -> Any:
    return typer.Option(help="The address to listen on.", show_default=default)


def _port(default: int) -> Any:
    return typer.Option(min=0, max=65535, help="The port; 0 takes a free one.", show_default=str(default))


def _device(default: str) -> Any:
    return typer.Option(help="Where the model runs: cpu, cuda, cuda:1 …", show_default=default)


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


@app.command()
def config(
    check: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tell whether this file is fine instead of printing one.")
    ] = None,
    serve_all: Annotated[
        bool, typer.Option("--serve-all", help="With the defaults of `serve all`: small, for a CPU.")
    ] = False,
) -> None:
    """Print the file that configures all servers: every key with its default and what it means.

    Keep what you change and delete the rest: `relaygr config > relaygr.toml`. The servers read it with `--config`.
    """
    defaults = DEFAULTS if serve_all else _SETTINGS
    with _errors("config"):
        if check is None:
            typer.echo(render(defaults), nl=False)
        else:
            read(check, base=defaults)
            typer.echo(f"{check} is fine.")


@serve.command("all")
def serve_all(
    file: ConfigFile = None,
    host: Annotated[str | None, _host(DEFAULTS.gateway.host)] = None,
    port: Annotated[int | None, _port(DEFAULTS.gateway.port)] = None,
    instances: Annotated[int, typer.Option(min=1, help="Instances to run.")] = 2,
    data_dir: Annotated[
        Path, typer.Option(help="Where model, items and histories are kept; filled on first use.")
    ] = Path("relaygr-data"),
    device: Annotated[str | None, _device(DEFAULTS.engine.device)] = None,
    ranking_budget_ms: Annotated[
        float | None, typer.Option(help="Time a rank may take.", show_default=f"{DEFAULTS.cascade.ranking_ms:g}")
    ] = None,
    pipeline_budget_ms: Annotated[
        float | None, typer.Option(help="Time a request may take.", show_default=f"{DEFAULTS.cascade.pipeline_ms:g}")
    ] = None,
) -> None:
    """Run a gateway and its instances on this machine, in one command.

    `POST /v1/recommend {"user": "user-7", "k": 10}` runs the whole cascade; `POST /v1/behaviours` appends what a user
    did. The first call makes a model with random weights, items and users. Ctrl-C stops everything.
    """
    given: Overrides = {
        "gateway": {"host": host, "port": port},
        "engine": {"device": device},
        "cascade": {"ranking_budget_ms": ranking_budget_ms, "pipeline_budget_ms": pipeline_budget_ms},
    }
    with _errors("serve all"), Console(stderr=True).status("starting") as status:

        def ready(address: str) -> None:
            status.stop()
            typer.echo(f"gateway serves on {address}")

        settings = read(file, given, DEFAULTS)
        asyncio.run(run_all(settings, data_dir, instances, ready, lambda what: status.update(what)))


@serve.command()
def gateway(
    file: ConfigFile = None,
    host: Annotated[str | None, _host(_SETTINGS.gateway.host)] = None,
    port: Annotated[int | None, _port(_SETTINGS.gateway.port)] = None,
    store: Store = None,
    catalogue: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="The items that can be recommended.")
    ] = None,
) -> None:
    """Serve the cascade over instances that run already.

    The file names them, each slot with its address, under `[gateway.instances]`; they are probed, and used once they
    answer. `POST /v1/recommend` and `POST /v1/behaviours` are its calls. SIGTERM drains it.
    """
    given: Overrides = {
        "gateway": {"host": host, "port": port},
        "data": {"store": _path(store), "catalogue": _path(catalogue)},
    }
    with _errors("serve gateway"):
        asyncio.run(run_gateway(read(file, given), lambda address: typer.echo(f"gateway serves on {address}")))


@serve.command()
def instance(
    file: ConfigFile = None,
    model: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="The checkpoint to serve; here or in the file.")
    ] = None,
    slot: Annotated[
        str | None,
        typer.Option(help="Its stable name, the same after a restart.", show_default=_SETTINGS.instance.slot),
    ] = None,
    host: Annotated[str | None, _host(_SETTINGS.instance.host)] = None,
    port: Annotated[int | None, _port(_SETTINGS.instance.port)] = None,
    store: Store = None,
    device: Annotated[str | None, _device(_SETTINGS.engine.device)] = None,
) -> None:
    """Serve one model: an engine process behind HTTP.

    `POST /v1/pre-infer` makes a history's prefix ready and answers at admission; `POST /v1/rank` scores candidates on a
    history, whatever is cached. `GET /v1/status`, `/healthz` and `/readyz` tell how it is. SIGTERM drains it.
    """
    given: Overrides = {
        "instance": {"slot": slot, "host": host, "port": port},
        "engine": {"device": device},
        "data": {"model": _path(model), "store": _path(store)},
    }
    with _errors("serve instance"):
        settings = read(file, given)
        name = settings.instance.slot
        asyncio.run(run_instance(settings, lambda address: typer.echo(f"{name} serves on {address}")))


def _path(given: Path | None) -> str | None:
    return None if given is None else str(given)


@contextlib.contextmanager
def _errors(command: str) -> Iterator[None]:
    """What goes wrong on purpose is said in a line; the status tells that it did."""
    try:
        yield
    except RelayError as error:
        Console(stderr=True).print(f"[red]relaygr {command}:[/] {escape(str(error))}", soft_wrap=True)
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
