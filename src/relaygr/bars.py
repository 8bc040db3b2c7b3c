"""How long work is shown to whoever waits for it."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["progress_bar"]


def progress_bar(console: Console | None = None) -> Progress:
    """A bar on stderr, or where the console writes, gone when done: what a task does, how far it is, for how long.

    Where nobody looks, nothing is drawn. A terminal of 80 columns has room for what a task does in 40.
    """
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
