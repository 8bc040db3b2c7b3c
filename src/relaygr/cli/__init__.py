"""The `relaygr` command. Each command imports what it runs when it runs: `--help` does not wait for torch."""

import typer

from relaygr.cli.config import config
from relaygr.cli.demo import demo
from relaygr.cli.serve import serve

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
app.add_typer(serve, name="serve")


@app.callback()
def main() -> None:
    """RelayGR pre-infers the long part of a user's history while the earlier stages of the cascade run."""
