"""What `serve all` makes on first use: a model, items, and users' histories."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relaygr.cascade.catalogue import Catalogue
from relaygr.history import History, LmdbStore
from relaygr.serving.settings import DataSettings

__all__ = ["World", "provision"]


@dataclass(frozen=True)
class World:
    """What there is to serve: random, but the same for the same seed."""

    items: int = 20_000
    users: int = 200
    """They are called user-0, user-1 …"""
    typical: int = 1100
    """Behaviours of half of the users at least."""
    spread: float = 0.6
    """How far lengths are apart: the deviation of their logarithms."""
    longest: int = 4096
    layers: int = 4
    dim: int = 64
    heads: int = 2
    seed: int = 0

    def histories(self, now: int) -> dict[str, History]:
        """Of people who were here until lately, with skewed tastes."""
        draw = np.random.default_rng(self.seed)
        return {f"user-{user}": self._history(draw, now) for user in range(self.users)}

    def _history(self, draw: np.random.Generator, now: int) -> History:
        length = int(np.clip(draw.lognormal(np.log(self.typical), self.spread), 64, self.longest))
        times = now - np.cumsum(draw.integers(1, 3600, length))[::-1]
        return History(draw.zipf(1.3, length) % self.items, draw.integers(0, 16, length), times)


def provision(
    data: Path,
    progress: Callable[[str], None] = lambda what: None,
    *,
    named: DataSettings | None = None,
    world: World | None = None,
) -> None:
    """Make a default model, items and users' histories in `data`, as far as they are missing and not `named`."""
    named, world = named or DataSettings(), world or World()
    data.mkdir(parents=True, exist_ok=True)
    if named.model is None and not (data / "model.safetensors").exists():
        progress("building a model with random weights")
        from relaygr.model import build_model, checkpoint  # torch is waited for where it is needed

        model = build_model(
            "hstu",
            layers=world.layers,
            dim=world.dim,
            heads=world.heads,
            items=world.items,
            seed=world.seed,
            scale_length=2048.0,
        )
        checkpoint.save(model, data / "model.safetensors")
    if named.catalogue is None and not (data / "items.safetensors").exists():
        progress(f"drawing {world.items:,} items")
        Catalogue.random(world.items, 32, seed=world.seed).save(data / "items.safetensors")
    if named.store is None and not (data / "store").exists():
        progress(f"drawing the histories of {world.users} users")
        partial = data / "store.partial"
        shutil.rmtree(partial, ignore_errors=True)
        with LmdbStore(partial) as store:
            store.append_many(world.histories(int(time.time())))
        partial.rename(data / "store")
