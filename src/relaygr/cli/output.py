"""How commands say what went wrong."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.markup import escape

from relaygr.errors import RelayError

__all__ = ["INTERRUPTED", "errors", "interrupted", "tell"]

INTERRUPTED: Final = 130
"""The status that a shell gives what Ctrl-C ended."""


@contextlib.contextmanager
def errors(command: str) -> Iterator[None]:
    """What goes wrong on purpose is said in a line; the status tells that it did."""
    try:
        yield
    except RelayError as error:
        tell(command, error)
        raise typer.Exit(1) from error


@contextlib.contextmanager
def interrupted(command: str, kept: Path) -> Iterator[None]:
    """Ctrl-C ends a command that goes on from a file when it is called again, and that is said in a line."""
    try:
        yield
    except KeyboardInterrupt as error:
        there = f"the same command goes on from what was measured, which is in {kept}"
        said = there if kept.exists() else "nothing was measured yet"
        Console(stderr=True).print(escape(f"relaygr {command}: stopped; {said}"), soft_wrap=True, highlight=False)
        raise typer.Exit(INTERRUPTED) from error


def tell(command: str, error: RelayError) -> None:
    """Say it in a line."""
    Console(stderr=True).print(f"[red]relaygr {command}:[/] {escape(str(error))}", soft_wrap=True)
