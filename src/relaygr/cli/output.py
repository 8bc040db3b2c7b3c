"""How commands say what went wrong."""

import contextlib
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from relaygr.errors import RelayError

__all__ = ["errors", "progress_bar"]


@contextlib.contextmanager
def errors(command: str) -> Iterator[None]:
    """What goes wrong on purpose is said in a line; the status tells that it did."""
    try:
        yield
    except RelayError as error:
        Console(stderr=True).print(f"[red]relaygr {command}:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error


def progress_bar() -> Progress:
    """A bar on stderr, gone when done: what a task does, how far it is, for how long."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
