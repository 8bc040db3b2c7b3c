"""The `relaygr` command. Each command imports what it runs when it runs: `--help` does not wait for torch."""

from importlib import metadata
from typing import Annotated

import typer

from relaygr.cli.config import config
from relaygr.cli.data import data
from relaygr.cli.demo import demo
from relaygr.cli.evaluate import evaluate
from relaygr.cli.haproxy import haproxy
from relaygr.cli.lab import lab
from relaygr.cli.serve import serve
from relaygr.cli.train import train

__all__ = ["app"]

app = typer.Typer(
    help="RelayGR: serve long-sequence generative recommenders.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command()(demo)
app.command()(config)
app.command()(haproxy)
app.add_typer(serve, name="serve")
app.add_typer(data, name="data")
app.add_typer(lab, name="lab")
app.command()(train)
app.command()(evaluate)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"relaygr {metadata.version('relaygr')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is, and end.")
    ] = False,
) -> None:
    """RelayGR pre-infers the long part of a user's history while the earlier stages of the cascade run."""
