"""`relaygr data`: data sets in one columnar form."""

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from relaygr.bars import progress_bar
from relaygr.cli.output import errors
from relaygr.errors import InvalidInput

if TYPE_CHECKING:
    from relaygr.history.quantiles import Quantiles
    from relaygr.train.importing import Imported

__all__ = ["data"]

data = typer.Typer(help="Import behaviours, lengthen them, put them into a store.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print what came of it as JSON, for machines.")]
DataSet = Annotated[Path, typer.Argument(metavar="DATA", help="A folder of `relaygr data import`.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not hold a data set.")]


class Form(StrEnum):
    """Where rows come from."""

    MOVIELENS = "movielens"
    KUAIRAND = "kuairand"
    TABLE = "table"


@data.command("import")
def import_(
    form: Annotated[Form, typer.Argument(help="movielens, kuairand, or table: any CSV or Parquet file.")],
    source: Annotated[Path, typer.Argument(exists=True, help="The folder, or for `table` the file, to read.")],
    out: Out,
    columns: Annotated[
        str | None,
        typer.Option(help="For `table`: which column is what, user=A,item=B,timestamp=C,action=D,label:NAME=E."),
    ] = None,
    milliseconds: Annotated[bool, typer.Option(help="For `table`: timestamps are in milliseconds.")] = False,
    licence: Annotated[str, typer.Option(help="For `table`: the data's terms, in a line.")] = "",
    as_json: AsJson = False,
) -> None:
    """Bring behaviours into one form: Parquet files of user, item, action, timestamp and labels.

    **movielens** takes any release (1M, 10M, latest-small, 20M, 25M, 32M, 100K); **kuairand** takes Pure, 1K and 27K;
    **table** takes `--columns "user=uid,item=iid,timestamp=ts,label:click=clicked"`. Rows need no order: histories are
    sorted by time, and of one time by the order of the file. Rows that repeat another are left out, and counted. The
    licence comes along, into LICENCE.txt, and is shown: keep to it.
    """
    with errors("data import"), Console(stderr=True).status(f"reading {source}"):
        from relaygr.train.importing import number
        from relaygr.train.kuairand import read_kuairand
        from relaygr.train.movielens import read_movielens
        from relaygr.train.table import read_columns, read_mapped

        if form is not Form.TABLE and (columns or milliseconds or licence):
            raise InvalidInput("columns", f"milliseconds and licence are for `table`; {form} knows its own")
        if form is Form.TABLE:
            if columns is None:
                raise InvalidInput("columns", 'are needed: --columns "user=A,item=B,timestamp=C"')
            rows = read_mapped(source, read_columns(columns), milliseconds=milliseconds, licence=licence)
        else:
            rows = (read_movielens if form is Form.MOVIELENS else read_kuairand)(source)
        made = number(rows)
        _save(out, made)
    _tell(out, made, as_json)


@data.command()
def lengthen(
    source: DataSet,
    out: Out,
    lengths: Annotated[
        str, typer.Option(help="Points SHARE:LENGTH of the distribution of lengths, between which it is log-linear.")
    ] = "0:512,0.5:2048,0.99:16384,1:32768",
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Grow real histories to a distribution of lengths. What comes out is synthetic, and says so.

    Sessions are drawn from each user's own and put before the first real one, with gaps drawn from the user's own. The
    real history stays at the end, as it was; what is made up has no labels, so it is read and never learnt from.
    """
    with errors("data lengthen"), progress_bar() as bar:
        from relaygr.train import dataset as datasets
        from relaygr.train.lengthen import lengthen as grow

        task = bar.add_task("lengthening", total=None)
        made = grow(
            datasets.load(source),
            _quantiles(lengths),
            seed=seed,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        _save(out, made)
    _tell(out, made, as_json)


@data.command()
def store(
    source: DataSet,
    out: Annotated[
        str,
        typer.Argument(metavar="STORE", help="A folder, made if missing, or redis://host:6379/0.", show_default=False),
    ],
    as_json: AsJson = False,
) -> None:
    """Put every user's history into a store, which servers read. Users who are there already are replaced."""
    with errors("data store"), progress_bar() as bar:
        from relaygr.history import LmdbStore, open_store
        from relaygr.history.opening import REDIS
        from relaygr.train import dataset as datasets

        loaded = datasets.load(source)
        task = bar.add_task("storing", total=loaded.users)
        with open_store(out) if out.startswith(REDIS) else LmdbStore(out, durable=False) as histories:
            for user, name in enumerate(loaded.names):
                history = loaded.history(user)
                histories.replace(name, history.items, history.actions, history.timestamps)
                bar.advance(task)
    told = {"store": out, "users": loaded.users, "behaviours": len(loaded)}
    typer.echo(json.dumps(told) if as_json else f"{loaded.users:,} users with {len(loaded):,} behaviours are in {out}.")


def _quantiles(text: str) -> "Quantiles":
    from relaygr.history.quantiles import Quantiles

    try:
        points = tuple((float(share), float(length)) for share, length in (part.split(":") for part in text.split(",")))
    except ValueError as error:
        raise InvalidInput("lengths", f"{text!r} are no points SHARE:LENGTH, as in 0.5:2048,0.99:16384") from error
    try:
        return Quantiles(points, "set directly", seen=False)
    except InvalidInput as error:
        raise InvalidInput("lengths", error.problem) from error


def _save(out: Path, made: "Imported") -> None:
    from relaygr.train import dataset as datasets

    if (out / "dataset.json").exists():
        raise InvalidInput("out", f"{out} holds a data set already: remove it, or name another folder")
    datasets.save(out, made.facts, made.items, made.rows, made.licence_text)


def _tell(out: Path, made: "Imported", as_json: bool) -> None:
    told = {
        "folder": str(out),
        "behaviours": len(made.rows),
        "users": len(made.rows.names),
        "items": len(made.items),
        **asdict(made.facts),
    }
    if as_json:
        typer.echo(json.dumps(told, ensure_ascii=False))
        return
    facts = made.facts
    typer.echo(
        f"{out}: {len(made.rows):,} behaviours of {len(made.rows.names):,} users, {len(made.items):,} items, labels "
        f"{', '.join(facts.labels) or 'none'}.{' Synthetic.' if facts.synthetic else ''}"
    )
    for line in (*facts.notes, f"Licence: {facts.licence}.", *([f"Cite: {facts.citation}"] if facts.citation else [])):
        typer.echo(line)
