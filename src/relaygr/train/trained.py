"""A trained model in a folder, with all that serving needs of it.

folder/
  model.safetensors   the checkpoint that instances serve
  items.safetensors   the catalogue that the gateway serves: items, embeddings of length 1 for retrieval, titles
  training.json       recipe, seed, data set, how training went, figures
  card.md             the same for people
  LICENCE.txt         the data's terms, where they came with it

While it is being trained there are state.safetensors, where the training goes on, and training.lock instead.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from relaygr.cascade.catalogue import Catalogue
from relaygr.errors import InvalidInput
from relaygr.model import RankingModel, checkpoint
from relaygr.train.card import card
from relaygr.train.dataset import Dataset
from relaygr.train.evaluate import Figures
from relaygr.train.objectives import item_vectors
from relaygr.train.recipe import Recipe
from relaygr.train.trainer import STATE, Trained

__all__ = ["LOCK", "TrainedFolder", "catalogue_of", "load_trained", "save_trained"]

LOCK: Final = "training.lock"
"""In the folder that is trained into: held by who does."""


@dataclass(frozen=True)
class TrainedFolder:
    """What a folder of `relaygr train` holds."""

    model: RankingModel
    recipe: Recipe
    seed: int
    items: Catalogue


def catalogue_of(model: RankingModel, dataset: Dataset) -> Catalogue:
    """The items with the embeddings that retrieval searches. A row of zeros, never learnt, points nowhere special.

    Where the data have no titles, an item's id in its source is its title.
    """
    vectors = item_vectors(model).detach().cpu().numpy().copy()
    vectors[~vectors.any(axis=1), 0] = 1.0
    items = dataset.catalogue
    return Catalogue(np.arange(len(items)), vectors, items.sources if items.titles is None else items.titles)


def save_trained(folder: Path, done: Trained, dataset: Dataset, figures: Figures) -> None:
    """Write it; the checkpoint last, so that a folder with one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    catalogue_of(done.model, dataset).save(folder / "items.safetensors")
    about = {
        "recipe": done.recipe.to_dict(),
        "seed": done.seed,
        "data": asdict(dataset.facts),
        "best_epoch": done.best,
        "epochs": [asdict(epoch) for epoch in done.epochs],
        "seconds": round(done.seconds, 1),
        "figures": asdict(figures),
    }
    text = json.dumps(_finite(about), indent=2, ensure_ascii=False)
    (folder / "training.json").write_text(text + "\n", encoding="utf-8")
    (folder / "card.md").write_text(card(done, dataset, figures), encoding="utf-8")
    if dataset.licence_text:
        (folder / "LICENCE.txt").write_text(dataset.licence_text, encoding="utf-8")
    checkpoint.save(done.model, folder / "model.safetensors")


def load_trained(folder: str | Path) -> TrainedFolder:
    """What `save_trained` wrote. InvalidInput where that is not there."""
    folder = Path(folder)
    if (folder / STATE).exists() and not (folder / "model.safetensors").exists():
        problem = f"the training in {folder} is not finished: run the same `relaygr train` again, and it goes on"
        raise InvalidInput("model", problem)
    try:
        about = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        recipe, seed = Recipe.from_dict(about["recipe"]), int(about["seed"])
    except FileNotFoundError as error:
        raise InvalidInput("model", f"{folder} is no folder of `relaygr train`: it has no training.json") from error
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput("model", f"{folder} is no folder of `relaygr train`: {error}") from error
    model = checkpoint.load(folder / "model.safetensors")
    return TrainedFolder(model, recipe, seed, Catalogue.load(folder / "items.safetensors"))


def _finite(value: Any) -> Any:
    """With None for what is not a number: JSON has no NaN."""
    if isinstance(value, Mapping):
        return {key: _finite(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
