"""`relaygr train`."""

import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relaygr.bars import progress_bar
from relaygr.cli.output import INTERRUPTED, errors
from relaygr.errors import InvalidInput
from relaygr.files import alone

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
    with errors("train"), _Told() as told:
        from relaygr.train import dataset as datasets
        from relaygr.train.evaluate import evaluate
        from relaygr.train.recipe import read
        from relaygr.train.trained import LOCK, save_trained
        from relaygr.train.trainer import STATE
        from relaygr.train.trainer import train as run

        wanted = read(recipe)
        _refuse_trained(out)
        ties = wanted.sequence.ties
        dataset = datasets.load(source, ties=ties)
        with alone(
            out / LOCK, "out", f"another `relaygr train` trains into {out}: wait for it, or name another folder"
        ):
            _refuse_trained(out)
            told.begins(wanted.optimiser.epochs)
            done = run(dataset, wanted, seed=seed, device=device, folder=out, resumed=told.resumed, progress=told.epoch)
            told.judging()
            other = datasets.load(source, ties="reversed" if ties == "file" else "file")
            figures = evaluate(done.model, wanted, dataset, other, device=device)
            save_trained(out, done, dataset, figures)
            (out / STATE).unlink(missing_ok=True)
            (out / LOCK).unlink(missing_ok=True)
    if as_json:
        what = {"folder": str(out), "best_epoch": done.best, "seconds": done.seconds, "figures": asdict(figures)}
        typer.echo(json.dumps(what))
    else:
        typer.echo((out / "card.md").read_text(encoding="utf-8"), nl=False)


def _refuse_trained(out: Path) -> None:
    if (out / "model.safetensors").exists():
        raise InvalidInput("out", f"{out} holds a trained model already: remove it, or name another folder")


class _Told:
    """What is told of a training: a line for each epoch, on a terminal a bar below them, and how to go on where it is
    interrupted."""

    def __init__(self) -> None:
        self._bar = progress_bar()
        self._task = self._bar.add_task("reading the data", total=None)
        self._epochs = self._done = 0
        self._seconds: list[float] = []
        """Of the epochs of this call."""

    def __enter__(self) -> "_Told":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._bar.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            after = f"after epoch {self._done}; the same command goes on" if self._done else "before an epoch was done"
            self._print(f"stopped {after}")
            raise typer.Exit(INTERRUPTED)

    def begins(self, epochs: int) -> None:
        self._epochs = epochs
        self._bar.update(self._task, description=f"epoch 1 of {epochs}", total=epochs)

    def resumed(self, epochs: int) -> None:
        self._done = epochs
        if epochs < self._epochs:
            self._print(f"going on at epoch {epochs + 1} of {self._epochs}")
        self._bar.update(self._task, description=f"epoch {epochs + 1} of {self._epochs}", completed=epochs)

    def epoch(self, epoch: "Epoch") -> None:
        self._done = epoch.epoch + 1
        self._seconds.append(epoch.seconds)
        left_s = sum(self._seconds) / len(self._seconds) * (self._epochs - self._done)
        left = f"{timedelta(seconds=round(left_s))} left"
        shown = {**epoch.losses, **{k: v for k, v in (epoch.valid or {}).items() if k != "choice"}}
        figures = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
        self._print(f"epoch {self._done} of {self._epochs}, {left}: {figures}")
        following = f"epoch {min(self._done + 1, self._epochs)} of {self._epochs}, {left}"
        self._bar.update(self._task, description=following, completed=self._done)

    def judging(self) -> None:
        self._bar.update(self._task, description="judging")

    def _print(self, line: str) -> None:
        self._bar.console.print(line, soft_wrap=True, highlight=False)
