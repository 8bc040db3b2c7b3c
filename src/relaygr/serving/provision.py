"""What `serve all` makes on first use: the default model, its items, and users' histories."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relaygr import default
from relaygr.errors import InvalidInput
from relaygr.history import History, LmdbStore
from relaygr.history.longer import lengthened
from relaygr.serving.settings import DataSettings

__all__ = ["World", "provision"]


@dataclass(frozen=True)
class World:
    """Who there is to serve: users of the default model's data, whose histories are lengthened by resampling their own
    behaviour; the same for the same seed."""

    users: int = 200
    """They are called user-0, user-1 …"""
    typical: int = 1100
    """Behaviours of half of the users at least."""
    spread: float = 0.6
    """How far lengths are apart: the deviation of their logarithms."""
    longest: int = 4096
    seed: int = 0

    def histories(self, now: int) -> dict[str, History]:
        """Of people who were here until lately."""
        draw = np.random.default_rng(self.seed)
        real = default.histories()
        chosen = np.resize(draw.permutation(len(real)), self.users)
        return {f"user-{user}": self._history(real[one], draw, now) for user, one in enumerate(chosen)}

    def _history(self, real: History, draw: np.random.Generator, now: int) -> History:
        length = int(np.clip(draw.lognormal(np.log(self.typical), self.spread), 64, self.longest))
        long = lengthened(real, length, draw)
        long = long[max(0, len(long) - length) :]
        later = now - int(draw.integers(1, 3600)) - int(long.timestamps[-1])
        return History(long.items, long.actions, long.timestamps + later)


def provision(
    data: Path,
    progress: Callable[[str], None] = lambda what: None,
    *,
    named: DataSettings | None = None,
    world: World | None = None,
) -> None:
    """Put the default model, its items and users' histories into `data`, as far as missing and not `named`.

    The model's card and the terms that its data come with go along.
    """
    try:
        data.mkdir(parents=True, exist_ok=True)
        _fill(data, progress, named or DataSettings(), world or World())
    except OSError as error:
        raise InvalidInput("data-dir", f"{data} cannot be filled: {error.strerror or error}") from error


def _fill(data: Path, progress: Callable[[str], None], named: DataSettings, world: World) -> None:
    if named.model is None and not (data / "model.safetensors").exists():
        progress("copying the default model")
        for path in (default.CARD, default.LICENCE):
            shutil.copyfile(path, data / path.name)
        partial = data / "model.partial"
        shutil.copyfile(default.MODEL, partial)
        partial.rename(data / "model.safetensors")
    if named.catalogue is None and not (data / "items.safetensors").exists():
        progress(f"listing {default.ITEMS:,} items")
        default.catalogue().save(data / "items.safetensors")
    if named.store is None and not (data / "store").exists():
        progress(f"lengthening the histories of {world.users} users")
        partial = data / "store.partial"
        shutil.rmtree(partial, ignore_errors=True)
        with LmdbStore(partial) as store:
            store.append_many(world.histories(int(time.time())))
        partial.rename(data / "store")
