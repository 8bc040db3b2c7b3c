"""`relaygr config`: the file that configures servers."""

from pathlib import Path
from typing import Annotated

import typer

from relaygr.cli.output import errors, tell
from relaygr.serving.all import DEFAULTS
from relaygr.serving.settings import Settings, mistakes, render

__all__ = ["config"]


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
    What stays is said: for `serve all`, whose defaults are others, print it with `--serve-all`.
    """
    defaults = DEFAULTS if serve_all else Settings()
    with errors("config"):
        if check is None:
            typer.echo(render(defaults), nl=False)
            return
    wrong = mistakes(check, defaults)
    for mistake in wrong:
        tell("config", mistake)
    if wrong:
        raise typer.Exit(1)
    typer.echo(f"{check} is fine.")
