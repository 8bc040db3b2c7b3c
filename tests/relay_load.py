"""Users, models whose right scores are known, and senders who ask without a pause: load for any deployment.

Scores are compared with the oracle at every answer. Senders do not retry.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from deployments import Deployment, Ranks, until
from oracle import assert_scores, oracle_scores
from relaygr import History, build_model
from relaygr.errors import DeadlineExceeded, Overloaded, Unavailable
from relaygr.model import checkpoint

__all__ = ["ITEMS", "MODELS", "PLENTY_S", "USERS", "Load", "checked", "history", "saved"]

MODELS = {
    name: build_model("hstu", layers=1, dim=16, heads=2, items=100, seed=seed) for name, seed in (("a", 0), ("b", 1))
}
ITEMS = np.array([5, 6, 7, 8])
USERS = [f"user-{number}" for number in range(18)]
PLENTY_S = 30.0


@cache
def history(user: str) -> History:
    draw = np.random.default_rng(list(user.encode()))
    length = int(draw.integers(150, 400))
    times = np.cumsum(draw.integers(1, 900, length))
    return History(draw.integers(0, 100, length), draw.integers(0, 16, length), times)


@cache
def right(user: str, model: str) -> Any:
    return oracle_scores(MODELS[model], history(user), ITEMS)


def saved(folder: Path) -> Path:
    """The folder, with the models in it."""
    for name, model in MODELS.items():
        checkpoint.save(model, folder / f"{name}.safetensors")
    return folder


async def checked(deployment: Deployment, user: str, models: str = "a", within_s: float = PLENTY_S) -> Ranks:
    """A rank, whose scores are those of one of these models."""
    ranked = await deployment.rank(user, history(user), ITEMS, within_s)
    failures = []
    for model in models:
        try:
            assert_scores(ranked.scores, right(user, model))
            return ranked
        except AssertionError as failure:
            failures.append(failure)
    raise failures[0]


class Load:
    """Senders who ask without a pause and do not retry: a signal, which may fail, then the rank, which may not."""

    def __init__(self, deployment: Deployment, models: str = "a", senders: int = 6) -> None:
        self._deployment, self._models, self._senders = deployment, models, senders
        self.answered = 0
        self.failures: list[BaseException] = []
        self._stop = False

    async def _send(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._stop:
            user = draw.choice(USERS)
            try:
                with contextlib.suppress(Unavailable, Overloaded, DeadlineExceeded):
                    await self._deployment.signal(user, history(user), PLENTY_S)
                await checked(self._deployment, user, self._models)
                self.answered += 1
            except BaseException as failure:
                self.failures.append(failure)
                raise

    async def more(self, count: int) -> None:
        """Wait until so many more are answered."""
        wanted = self.answered + count

        async def answered() -> bool:
            return self.answered >= wanted or bool(self.failures)

        await until(answered)
        assert not self.failures, self.failures

    @contextlib.asynccontextmanager
    async def running(self) -> "AsyncIterator[Load]":
        senders = [asyncio.create_task(self._send(seed)) for seed in range(self._senders)]
        try:
            yield self
        finally:
            self._stop = True
            await asyncio.gather(*senders, return_exceptions=True)
        assert not self.failures, self.failures
