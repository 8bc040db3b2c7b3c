"""The training loop."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from relaygr.errors import InvalidInput
from relaygr.files import replacing
from relaygr.model import RankingModel
from relaygr.train.dataset import UNKNOWN, Dataset
from relaygr.train.objectives import losses
from relaygr.train.recipe import Optimiser, Recipe
from relaygr.train.scoring import next_item_metrics, next_item_ranks, ranking_metrics, ranking_scores
from relaygr.train.sequences import Batch, Sequences, device_of
from relaygr.train.split import Split, Targets, split

__all__ = ["STATE", "Epoch", "Trained", "fresh_model", "train"]

STATE: Final = "state.safetensors"
"""In the folder of a training that is not finished: where it goes on."""

_VALIDATION: Final = 20_000
"""Targets that a look at the validation part takes at most."""


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to."""

    epoch: int
    losses: dict[str, float]
    valid: dict[str, float] | None
    """Figures on the validation part, where it was looked at."""
    seconds: float


@dataclass(frozen=True)
class Trained:
    """A model at its best epoch."""

    model: RankingModel
    recipe: Recipe
    seed: int
    best: int
    """The epoch that was best on the validation part."""
    epochs: list[Epoch]
    seconds: float


def fresh_model(recipe: Recipe, dataset: Dataset, seed: int) -> RankingModel:
    """A model to begin with: small embeddings, layers that keep the size of what they are given."""
    model = RankingModel(recipe.model_config(dataset))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            last = name.rpartition(".")[2]
            if last.endswith("norm_weight"):
                parameter.fill_(1.0)
            elif last.endswith("bias"):
                parameter.zero_()
            else:
                scale = recipe.optimiser.embedding_scale
                if not name.startswith("embedding."):
                    scale = math.sqrt(2 / sum(parameter.shape))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        if recipe.optimiser.positions != "noise":
            model.embedding.positions.copy_(_waves(model.embedding.positions.shape) * recipe.optimiser.embedding_scale)
            model.embedding.positions.requires_grad_(recipe.optimiser.positions == "waves")
    return model


def _waves(shape: torch.Size) -> torch.Tensor:
    """Sines and cosines of the rows' numbers, from one row to thousands in a turn, with a mean square of 1."""
    rows, dim = shape
    rates = 10_000.0 ** -(torch.arange(0, dim, 2) / dim)
    angles = torch.arange(rows)[:, None] * rates
    return math.sqrt(2) * torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :dim]


def train(
    dataset: Dataset,
    recipe: Recipe,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    folder: Path | None = None,
    resumed: Callable[[int], None] = lambda epochs: None,
    progress: Callable[[Epoch], None] = lambda epoch: None,
) -> Trained:
    """Train, and return the model of the epoch that was best on the validation part.

    With a `folder`, the state after each epoch is kept there; called again with the same recipe and seed, training
    goes on from it and ends as if it had never stopped: `resumed` is told after how many epochs. `progress` gets each
    epoch when it is kept. Same data, recipe, seed and CPU: same model.
    """
    if recipe.objective.ranking and not (dataset.labels != UNKNOWN).any():
        raise InvalidInput(
            "objective.ranking",
            "the data has no labels; import some with --columns label:NAME=COLUMN, or set ranking = 0 in the recipe",
        )
    run = _Run(dataset, recipe, seed, device_of(device), folder)
    run.resume()
    if run.epochs:
        resumed(len(run.epochs))
    for epoch in range(len(run.epochs), recipe.optimiser.epochs):
        if run.is_over():
            break
        done = run.epoch(epoch)
        run.keep()
        progress(done)
    return run.result()


@contextlib.contextmanager
def _coarse() -> Iterator[None]:
    """Inside, a GPU may take products of float32 in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Run:
    """One training run: model, optimiser, and the best weights so far."""

    def __init__(self, dataset: Dataset, recipe: Recipe, seed: int, device: torch.device, folder: Path | None) -> None:
        self.recipe, self.seed, self.device, self.folder = recipe, seed, device, folder
        self.dataset = dataset
        self.split = split(dataset, recipe.sequence.split)
        self.model = fresh_model(recipe, dataset, seed).to(device).train()
        self.sequences = Sequences(dataset, self.model.config, recipe.sequence.length, device)
        self.windows = _Windows(dataset, self.split, recipe.sequence.length + 1, recipe.sequence.crop, device)
        self.steps = 0
        """Of the epoch."""
        self.parameters = dict(self.model.named_parameters())
        self.optimiser = _optimiser(self.parameters, recipe.optimiser, device)
        self.averages = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.best_weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.best = -1
        self.best_figure = -math.inf
        self.step = 0
        self.epochs: list[Epoch] = []

    def is_over(self) -> bool:
        patience, every = self.recipe.optimiser.patience, self.recipe.optimiser.evaluate_every
        return bool(patience) and len(self.epochs) - 1 - self.best > patience * every

    def epoch(self, epoch: int) -> Epoch:
        began = time.perf_counter()
        options = self.recipe.optimiser
        torch.manual_seed(self.seed * 1_000_003 + epoch)  # order, windows, dropout and negatives
        totals: dict[str, torch.Tensor] = {}
        steps = self.windows.epoch(options.batch, options.tokens)
        self.steps = len(steps)
        with _coarse():
            for index, (starts, lengths, longest) in enumerate(steps):
                self._rate(epoch * self.steps + index)
                batch = self.sequences.windows(starts, lengths, longest)
                for name, value in self._step(batch).items():
                    totals[name] = totals[name] + value if name in totals else value
        mean = {name: float(value) / self.steps for name, value in totals.items()}
        if not all(map(math.isfinite, mean.values())):
            raise InvalidInput("rate", f"is too high: in epoch {epoch + 1} the loss is no longer finite")
        look = (epoch + 1) % options.evaluate_every == 0 or epoch + 1 == options.epochs
        valid = self._look(epoch) if look else None
        done = Epoch(epoch, mean, valid, time.perf_counter() - began)
        self.epochs.append(done)
        return done

    def _step(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Learn from one batch; returns the losses before it did."""
        options, objective = self.recipe.optimiser, self.recipe.objective
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            found = losses(self.model, self.sequences, batch, objective, options.dropout)
        loss = torch.stack([getattr(objective, name) * value for name, value in found.items()]).sum()
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), options.clip)
        self.optimiser.step()
        self.step += 1
        if options.average:
            self._average(options.average)
        return {name: value.detach() for name, value in found.items()}

    def _rate(self, step: int) -> None:
        """Set the rate of that step of all; where epochs differ in steps, as if all had as many as this one."""
        options = self.recipe.optimiser
        total = options.epochs * self.steps
        if self.step < options.warm_up:
            share = (self.step + 1) / options.warm_up
        else:
            at = (step - options.warm_up) / max(1, total - options.warm_up)
            share = options.final + (1 - options.final) * 0.5 * (1 + math.cos(math.pi * min(at, 1.0)))
        for group in self.optimiser.param_groups:
            group["lr"] = options.rate * share

    def _average(self, decay: float) -> None:
        decay = min(decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(list(self.averages.values()), [p.detach() for p in self.parameters.values()], 1 - decay)

    def _look(self, epoch: int) -> dict[str, float]:
        """Judge on the validation part; the best weights are kept."""
        judged = self.averages if self.recipe.optimiser.average else self.parameters
        current = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._load(judged)
        figures = self._figures(self.split.valid.sample(_VALIDATION))
        figure = figures["choice"]
        if self.best < 0 or figure > self.best_figure:
            self.best, self.best_figure = epoch, figure
            self.best_weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._load(current)
        return figures

    def _figures(self, targets: Targets) -> dict[str, float]:
        """NDCG@10 chooses where next items are learnt, the mean AUC of the labels else, and where time splits."""
        length = self.recipe.sequence.length
        found: dict[str, float] = {}
        self.model.eval()
        if self.recipe.objective.ranking:
            scores = ranking_scores(self.model, self.sequences, self.dataset, targets, length)
            figures = ranking_metrics(self.dataset, targets, scores)
            found |= {f"{label}_auc": values["auc"] for label, values in figures.items()}
            known = [value for value in found.values() if math.isfinite(value)]
            found["choice"] = float(np.mean(known)) if known else 0.0
        if self.recipe.objective.next_item and not (found and self.recipe.sequence.split == "time"):
            ranks = next_item_ranks(self.model, self.sequences, self.dataset, targets, length)
            found |= next_item_metrics(ranks)
            found["choice"] = found["ndcg@10"]
        self.model.train()
        return found

    def _load(self, weights: Any) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])

    def result(self) -> Trained:
        self._load(self.best_weights)
        model = self.model.eval().requires_grad_(False)
        return Trained(model, self.recipe, self.seed, self.best, self.epochs, sum(e.seconds for e in self.epochs))

    def keep(self) -> None:
        """Write the state, whole or not at all."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            parts = {"weight": parameter, "best": self.best_weights[name], "average": self.averages[name]}
            parts |= self.optimiser.state.get(parameter, {})  # none where nothing was learnt of it
            tensors |= {f"{key}:{name}": part.detach().cpu().contiguous().clone() for key, part in parts.items()}
        about = {
            "recipe": self.recipe.to_dict(),
            "seed": self.seed,
            "step": self.step,
            "best": [self.best, self.best_figure],
            "epochs": [[e.epoch, e.losses, e.valid, e.seconds] for e in self.epochs],
        }
        with replacing(self._state()) as partial:
            save_file(tensors, partial, metadata={"state": json.dumps(about)})

    def resume(self) -> None:
        """Go on from the folder's state, if it has one of this recipe and seed."""
        if self.folder is None or not self._state().exists():
            return
        try:
            with safe_open(self._state(), framework="pt") as file:
                about = json.loads((file.metadata() or {})["state"])
                tensors = {name: file.get_tensor(name).to(self.device) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise InvalidInput("folder", f"{self._state()} cannot be read: {error}") from error
        if about["recipe"] != json.loads(json.dumps(self.recipe.to_dict())) or about["seed"] != self.seed:
            raise InvalidInput(
                "folder", f"{self.folder} holds a run of another recipe or seed: remove it, or name another folder"
            )
        self._load({name: tensors[f"weight:{name}"] for name in self.parameters})
        for name, parameter in self.parameters.items():
            if f"step:{name}" in tensors:
                self.optimiser.state[parameter] = {
                    key: tensors[f"{key}:{name}"] for key in ("exp_avg", "exp_avg_sq", "step")
                }
            self.best_weights[name] = tensors[f"best:{name}"]
            self.averages[name] = tensors[f"average:{name}"]
        self.step = about["step"]
        self.best, self.best_figure = about["best"]
        self.epochs = [Epoch(*values) for values in about["epochs"]]

    def _state(self) -> Path:
        assert self.folder is not None
        return self.folder / STATE


def _optimiser(
    parameters: dict[str, torch.nn.Parameter], options: Optimiser, device: torch.device
) -> torch.optim.AdamW:
    decayed = [p for p in parameters.values() if p.ndim > 1]
    plain = [p for p in parameters.values() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    betas = (0.9, options.beta2)
    return torch.optim.AdamW(groups, lr=options.rate, betas=betas, fused=device.type == "cuda")


class _Windows:
    """The windows of an epoch: for each user the newest behaviours, and of a long history as many more, drawn anywhere
    in it, as it is times longer than a window. The share `crop` of them is then cut shorter, anywhere."""

    def __init__(self, dataset: Dataset, parts: Split, width: int, crop: float, device: torch.device) -> None:
        stop: npt.NDArray[np.int64] = parts.train_stop
        users = np.flatnonzero(stop >= 2)
        counts = np.ceil(stop[users] / width).astype(np.int64)
        owners = np.repeat(users, counts)
        self._low = torch.from_numpy(dataset.offsets[owners])
        self._stop = torch.from_numpy(stop[owners])
        self._lengths = torch.from_numpy(np.minimum(stop[owners], width))
        self._newest = torch.from_numpy(np.concatenate(([True], owners[1:] != owners[:-1]))) if len(owners) else None
        self._crop = crop
        self._device = device

    def __len__(self) -> int:
        return len(self._low)

    def epoch(self, batch: int, tokens: int = 0) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """Starts and lengths of each step's windows, in a new order, and the longest length of the step.

        A step has `batch` windows, or with `tokens` as many of like lengths as come to so many behaviours.
        """
        if self._newest is None:
            raise InvalidInput("data", "no user has two behaviours to learn from")
        lengths, newest = self._lengths, self._newest
        if self._crop:
            cropped = torch.rand(len(self)) < self._crop
            shorter = (2 * (lengths / 2) ** torch.rand(len(self))).long().clamp(min=2)  # log-uniform
            lengths, newest = torch.where(cropped, shorter, lengths), newest & ~cropped
        room = self._stop - lengths
        drawn = (torch.rand(len(self)) * (room + 1)).long().minimum(room)
        starts = self._low + torch.where(newest, room, drawn)
        order = torch.randperm(len(self))
        if tokens:
            near = lengths[order] * (1 + 0.2 * torch.rand(len(self)))  # not the same windows together each time
            order = order[near.argsort()]
            bounds = _bounds(lengths[order].tolist(), tokens)
            bounds = [bounds[index] for index in torch.randperm(len(bounds)).tolist()]
        else:
            bounds = [(low, low + batch) for low in range(0, len(self), batch)]
        steps = []
        for low, high in bounds:
            own = order[low:high]
            steps.append((starts[own].to(self._device), lengths[own].to(self._device), int(lengths[own].max())))
        return steps


def _bounds(lengths: list[int], tokens: int) -> list[tuple[int, int]]:
    """Runs of windows that come to at most so many behaviours, padding included; one that is longer is a run."""
    bounds, low, longest = [], 0, 0
    for high, length in enumerate(lengths):
        longest = max(longest, length)
        if high > low and longest * (high + 1 - low) > tokens:
            bounds.append((low, high))
            low, longest = high, length
    return [*bounds, (low, len(lengths))]
