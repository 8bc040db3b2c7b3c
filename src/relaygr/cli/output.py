"""How commands say what went wrong."""

import contextlib
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape

from relaygr.errors import RelayError

__all__ = ["errors", "tell"]


@contextlib.contextmanager
def errors(command: str) -> Iterator[None]:
    """What goes wrong on purpose is said in a line; the status tells that it did."""
    try:
        yield
    except RelayError as error:
        tell(command, error)
        raise typer.Exit(1) from error


def tell(command: str, error: RelayError) -> None:
    """Say it in a line."""
    Console(stderr=True).print(f"[red]relaygr {command}:[/] {escape(str(error))}", soft_wrap=True)
