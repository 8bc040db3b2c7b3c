"""`relaygr train`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relaygr.bars import progress_bar
from relaygr.cli.output import errors
from relaygr.errors import InvalidInput

if TYPE_CHECKING:
    from relaygr.train.trainer import Epoch

__all__ = ["train"]


def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or a .toml file of one's own.")],
    source: Annotated[Path, typer.Argument(metavar="DATA", help="A folder of `relaygr data import`.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder for the model.")],
    seed: Annotated[int, typer.Option(min=0, help="The same seed trains the same model on the same CPU.")] = 0,
    device: Annotated[str, typer.Option(help="Where it is trained: cpu, or cuda, in bfloat16 there.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as JSON, for machines.")] = False,
) -> None:
    """Train a model, choose its epoch on the validation part, and judge it once on the test part.

    Recipes of the package: **ml-1m** and **ml-1m-hstu** (next items), **ml-1m-long** (on up to 512 behaviours),
    **kuairand-pure** (clicks, long views, likes), **ml-latest-small** (next items and ratings: the default model).
    Stopped, it goes on where it was when called again. OUT gets `model.safetensors`, which instances serve,
    `items.safetensors`, the catalogue for the gateway, and `card.md`, which tells what the model is and how good.
    """
    with errors("train"), progress_bar() as bar:
        from relaygr.train import dataset as datasets
        from relaygr.train.evaluate import evaluate
        from relaygr.train.recipe import read
        from relaygr.train.trained import save_trained
        from relaygr.train.trainer import train as run

        wanted = read(recipe)
        if (out / "model.safetensors").exists():
            raise InvalidInput("out", f"{out} holds a trained model already: remove it, or name another folder")
        ties = wanted.sequence.ties
        dataset = datasets.load(source, ties=ties)
        task = bar.add_task("training", total=wanted.optimiser.epochs)

        def show(epoch: "Epoch") -> None:
            shown = {**epoch.losses, **{k: v for k, v in (epoch.valid or {}).items() if k != "choice"}}
            figures = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
            bar.update(task, completed=epoch.epoch + 1, description=f"epoch {epoch.epoch}: {figures}")

        done = run(dataset, wanted, seed=seed, device=device, folder=out, progress=show)
        bar.update(task, description="judging")
        other = datasets.load(source, ties="reversed" if ties == "file" else "file")
        figures = evaluate(done.model, wanted, dataset, other, device=device)
        save_trained(out, done, dataset, figures)
        (out / "state.safetensors").unlink(missing_ok=True)
    if as_json:
        told = {"folder": str(out), "best_epoch": done.best, "seconds": done.seconds, "figures": asdict(figures)}
        typer.echo(json.dumps(told))
    else:
        typer.echo((out / "card.md").read_text(encoding="utf-8"), nl=False)
