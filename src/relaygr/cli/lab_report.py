"""`relaygr lab report`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from relaygr.cli.output import errors

__all__ = ["report"]


def report(
    out: Annotated[Path, typer.Argument(help="The folder to write report.html and its figures to.")],
    results: Annotated[
        list[Path], typer.Argument(help="Files of probes (.jsonl) and of headlines (.json), any number of them.")
    ],
) -> None:
    """Make one page from result files: it needs nothing else, and can be sent as it is. Figures are PNGs beside it.

    Probes are what `relaygr lab slo` and `relaygr lab length` write, headlines what `benchmarks/headline.py` does.
    """
    from relaygr.lab.report import load_results, write_report

    with errors("lab report"):
        page, *figures = write_report(load_results(results), out)
    Console().print(f"{page} and {len(figures)} figures", highlight=False, soft_wrap=True)
