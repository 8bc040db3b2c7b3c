"""What `serve all` makes on first use: a model, items, and users' histories."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from relaygr.cascade.catalogue import Catalogue
from relaygr.history import History, LmdbStore
from relaygr.serving.settings import DataSettings

__all__ = ["provision"]

ITEMS: Final = 20_000
USERS: Final = 200


def provision(
    data: Path, progress: Callable[[str], None] = lambda what: None, *, named: DataSettings | None = None
) -> None:
    """Make a default model, items and users' histories in `data`, as far as they are missing and not `named`."""
    named = named or DataSettings()
    data.mkdir(parents=True, exist_ok=True)
    if named.model is None and not (data / "model.safetensors").exists():
        progress("building a model with random weights")
        from relaygr.model import build_model, checkpoint  # torch is waited for where it is needed

        model = build_model("hstu", layers=4, dim=64, heads=2, items=ITEMS, seed=0, scale_length=2048.0)
        checkpoint.save(model, data / "model.safetensors")
    if named.catalogue is None and not (data / "items.safetensors").exists():
        progress(f"drawing {ITEMS:,} items")
        Catalogue.random(ITEMS, 32, seed=0).save(data / "items.safetensors")
    if named.store is None and not (data / "store").exists():
        progress(f"drawing the histories of {USERS} users")
        draw = np.random.default_rng(0)
        now = int(time.time())
        partial = data / "store.partial"
        shutil.rmtree(partial, ignore_errors=True)
        with LmdbStore(partial) as store:
            store.append_many({f"user-{user}": _history(draw, now) for user in range(USERS)})
        partial.rename(data / "store")


def _history(draw: np.random.Generator, now: int) -> History:
    """Behaviours of someone who was here until lately: skewed items, lengths from some hundreds to a few thousand."""
    length = int(np.clip(draw.lognormal(7.0, 0.6), 64, 4096))
    times = now - np.cumsum(draw.integers(1, 3600, length))[::-1]
    return History(draw.zipf(1.3, length) % ITEMS, draw.integers(0, 16, length), times)
