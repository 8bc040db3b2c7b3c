"""`relaygr evaluate`."""

import asyncio
import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from relaygr.bars import progress_bar
from relaygr.cli.output import errors

__all__ = ["evaluate"]


class Through(StrEnum):
    """What computes the scores."""

    OFFLINE = "offline"
    ENGINE = "engine"


def evaluate(
    model: Annotated[Path, typer.Argument(help="A folder of `relaygr train`.")],
    source: Annotated[Path, typer.Argument(metavar="DATA", help="The data set it was trained on.")],
    length: Annotated[
        int | None, typer.Option(min=1, help="Behaviours read, at most.", show_default="as trained")
    ] = None,
    through: Annotated[
        Through, typer.Option(help="engine: rank the targets by relay in a serving engine, too, and compare.")
    ] = Through.OFFLINE,
    most: Annotated[int, typer.Option(min=1, help="Targets ranked through the engine, at most.")] = 2000,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, for machines.")] = False,
) -> None:
    """Judge a model on the part of the data that it neither learnt from nor was chosen by.

    Next items: HR@10, 50, 200 and NDCG@10 among the whole catalogue, under both rules for behaviours of one time.
    Ranking: AUC, normalized entropy (below 1 is better than always saying the mean) and calibration (predicted over
    real positives) of each label. `--through engine` serves the same targets by relay and says whether the figures
    agree to the last digit; if not, the status is 1.
    """
    with errors("evaluate"), progress_bar() as bar:
        from relaygr.train import dataset as datasets
        from relaygr.train.evaluate import check_fits
        from relaygr.train.evaluate import evaluate as judge
        from relaygr.train.trained import load_trained

        task = bar.add_task("judging", total=None)
        trained = load_trained(model)
        ties = trained.recipe.sequence.ties
        dataset = datasets.load(source, ties=ties)
        check_fits(trained.model, dataset)
        other = datasets.load(source, ties="reversed" if ties == "file" else "file")
        figures = judge(trained.model, trained.recipe, dataset, other, length=length, device=device)
        told: dict[str, Any] = asdict(figures)
        if through is Through.ENGINE:
            from relaygr.train.relayed import compare

            bar.update(task, description="by relay")
            compared = asyncio.run(
                compare(
                    trained.model,
                    trained.recipe,
                    dataset,
                    length=length,
                    most=most,
                    device=device,
                    progress=lambda done, total: bar.update(task, completed=done, total=total),
                )
            )
            told["engine"] = {**asdict(compared), "agree": compared.agree}
    if as_json:
        typer.echo(json.dumps(told))
    else:
        _show(told)
    if "engine" in told and not told["engine"]["agree"]:
        Console(stderr=True).print("[red]Offline and through the engine the figures differ.[/]")
        raise typer.Exit(1)


def _show(told: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"{told['split']}; {told['targets']:,} targets; the newest {told['length']} behaviours", soft_wrap=True
    )
    rows = {"next item": told["next_item"], "ties the other way round": told["next_item_other_ties"]}
    _table("next item", {name: row for name, row in rows.items() if row})
    _table("ranking", told["ranking"] or {})
    if "engine" in told:
        engine = told["engine"]
        for name in ("offline", "relayed"):
            _table(f"{name}, {engine['targets']:,} targets", engine[name])
        paths = ", ".join(f"{path} {count}" for path, count in sorted(engine["paths"].items()))
        console.print(f"Ranked by relay: {paths}. The figures {'agree' if engine['agree'] else 'DIFFER'}.")


def _table(title: str, rows: dict[str, dict[str, float]]) -> None:
    if not rows:
        return
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    table.add_column("")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for name, row in rows.items():
        table.add_row(name, *(_cell(row.get(column)) for column in columns))
    Console().print(table)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
