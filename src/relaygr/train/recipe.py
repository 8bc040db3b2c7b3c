"""What to train, and how: a TOML file."""

import math
import tomllib
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, Self

from relaygr.errors import InvalidInput
from relaygr.model import ModelConfig
from relaygr.train.dataset import Dataset, Ties
from relaygr.train.split import SplitBy

__all__ = ["Objective", "Optimiser", "Recipe", "Sequence", "names", "read"]

_DECIDED: Final = ("items", "actions", "tasks", "contexts")
"""Fields of a model's config that are no part of a recipe: the data decide them."""


@dataclass(frozen=True)
class Sequence:
    """What a model reads."""

    length: int = 200
    """The most behaviours a prediction is made from: the newest ones."""
    split: SplitBy = "leave-one-out"
    ties: Ties = "file"
    crop: float = 0.0
    """The share of windows learnt from that are cut to a random length at a random place: so a model knows histories
    of every length that begin anywhere, as when long ones are cut."""


@dataclass(frozen=True)
class Objective:
    """What a model learns; both may be learnt at once."""

    next_item: float = 1.0
    """Weight of telling the next behaviour's item from others, at every behaviour; 0: not learnt."""
    ranking: float = 0.0
    """Weight of telling the labels of an item that is a candidate, at every behaviour; 0: not learnt."""
    negatives: int = 0
    """Items drawn for each step that the next one is told from (sampled softmax); 0: all of them."""
    temperature: float = 0.05
    """Similarities are divided by this; embeddings are of length 1."""


@dataclass(frozen=True)
class Optimiser:
    """How it learns: AdamW, a linear warm-up, then a cosine down to `final` of the rate."""

    epochs: int = 100
    batch: int = 128
    """Windows in a step."""
    tokens: int = 0
    """Behaviours in a step, padding included, in place of `batch`: windows of like lengths, so that little is padded,
    and every behaviour counts as much as another; 0: `batch` windows of any length."""
    rate: float = 1e-3
    final: float = 0.0
    warm_up: int = 200
    """Steps."""
    weight_decay: float = 0.0
    beta2: float = 0.98
    clip: float = 1.0
    """Largest norm of a gradient."""
    dropout: float = 0.2
    embedding_scale: float = 0.02
    """Standard deviation of fresh embeddings."""
    positions: Literal["noise", "waves", "fixed"] = "noise"
    """Fresh embeddings of positions are drawn at random, or are sines and cosines, which makes near positions alike;
    fixed: sines and cosines that stay as they are, so that positions few histories reach are no worse than others."""
    average: float = 0.0
    """Weights that are judged and kept are a running mean with this decay per step; 0: the last ones."""
    evaluate_every: int = 1
    """Epochs between looks at the validation part."""
    patience: int = 0
    """Looks without a better one before training ends; 0: train all epochs."""


@dataclass(frozen=True)
class Recipe:
    """One recipe. Unknown keys are refused."""

    name: str
    about: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig but those that the data decide: items, actions, tasks."""
    sequence: Sequence = field(default_factory=Sequence)
    objective: Objective = field(default_factory=Objective)
    optimiser: Optimiser = field(default_factory=Optimiser)

    def __post_init__(self) -> None:
        for section, name, least in (
            (self.sequence, "length", 1),
            (self.objective, "negatives", 0),
            (self.optimiser, "epochs", 1),
            (self.optimiser, "batch", 1),
            (self.optimiser, "tokens", 0),
            (self.optimiser, "warm_up", 0),
            (self.optimiser, "evaluate_every", 1),
            (self.optimiser, "patience", 0),
        ):
            value = getattr(section, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidInput(name, f"must be an integer of at least {least}, not {value!r}")
        for part, name, low, high in (
            (self.sequence, "crop", 0.0, 1.0),
            (self.objective, "next_item", 0.0, math.inf),
            (self.objective, "ranking", 0.0, math.inf),
            (self.objective, "temperature", 1e-6, math.inf),
            (self.optimiser, "rate", 1e-12, math.inf),
            (self.optimiser, "final", 0.0, 1.0),
            (self.optimiser, "weight_decay", 0.0, math.inf),
            (self.optimiser, "beta2", 0.0, 0.999999),
            (self.optimiser, "clip", 1e-12, math.inf),
            (self.optimiser, "dropout", 0.0, 0.95),
            (self.optimiser, "embedding_scale", 1e-9, math.inf),
            (self.optimiser, "average", 0.0, 0.999999),
        ):
            value = getattr(part, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
                raise InvalidInput(name, f"must be a number from {low:g} to {high:g}, not {value!r}")
        if self.optimiser.positions not in ("noise", "waves", "fixed"):
            raise InvalidInput("positions", f"is {self.optimiser.positions!r}; choose from noise, waves, fixed")
        if not self.objective.next_item and not self.objective.ranking:
            raise InvalidInput("objective", "has neither next_item nor ranking: there is nothing to learn")

    def model_config(self, dataset: Dataset) -> ModelConfig:
        """The model this recipe makes of a data set. InvalidInput lists the keys where one is wrong or missing."""
        known = [each for each in fields(ModelConfig) if each.name not in _DECIDED]
        keys = ", ".join(each.name for each in known)
        for name in self.model:
            if name in _DECIDED:
                raise InvalidInput(f"model.{name}", "is decided by the data")
            if name not in (each.name for each in known):
                raise InvalidInput(f"model.{name}", f"is no key of a recipe's model; it has {keys}")
        values = dict(self.model)
        needed = [each.name for each in known if each.default is MISSING and each.name != "head_dim"]
        for name in needed:
            if name not in values:
                raise InvalidInput(
                    f"model.{name}",
                    f"is missing from the recipe; [model] needs {', '.join(needed)}, of all keys {keys}",
                )
        if "head_dim" not in values:
            dim, heads = values["dim"], values["heads"]
            fit = isinstance(dim, int) and isinstance(heads, int) and heads > 0
            values["head_dim"] = dim // heads if fit else 1  # what does not fit is refused by its own name
        tasks = max(1, len(dataset.facts.labels))
        decided = {"items": len(dataset.catalogue), "actions": dataset.facts.actions, "tasks": tasks, "contexts": 1}
        return ModelConfig.from_dict({**values, **decided})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The opposite of to_dict. Unknown fields raise InvalidInput naming them."""
        sections = {"sequence": Sequence, "objective": Objective, "optimiser": Optimiser}
        _known("recipe", values, cls)
        made: dict[str, Any] = {}
        for name, value in values.items():
            if name in (*sections, "model") and not isinstance(value, dict):
                raise InvalidInput(name, "must be a table")
            if name in sections:
                _known(name, value, sections[name])
                made[name] = sections[name](**value)
            else:
                made[name] = value
        if "name" not in made:
            raise InvalidInput("name", "is missing from the recipe")
        return cls(**made)

    def with_values(self, **sections: dict[str, Any]) -> Self:
        """This recipe with other values: with_values(optimiser={"epochs": 3})."""
        whole = self.to_dict()
        for section, values in sections.items():
            whole[section] = {**whole[section], **values}
        return replace(type(self).from_dict(whole), name=self.name)


def _known(section: str, values: dict[str, Any], kind: Any) -> None:
    known = [each.name for each in fields(kind)]
    for name in values:
        if name not in known:
            raise InvalidInput(name, f"is no key of a recipe's {section}; it has {', '.join(known)}")


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.name.removesuffix(".toml") for path in _shipped().iterdir() if path.name.endswith(".toml"))


def read(recipe: str | Path) -> Recipe:
    """The recipe of that name, or in that file."""
    path = Path(recipe)
    if path.suffix == ".toml":
        source: Any = path
    elif str(recipe) in names():
        source = _shipped() / f"{recipe}.toml"
    else:
        raise InvalidInput("recipe", f"{recipe} is neither a .toml file nor one of {', '.join(names())}")
    try:
        return Recipe.from_dict(tomllib.loads(source.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput("recipe", f"{recipe} cannot be read: {error}") from error


def _shipped() -> Any:
    return resources.files("relaygr.train") / "recipes"
