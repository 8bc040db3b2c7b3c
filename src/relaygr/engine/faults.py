"""Seeded faults on the seam between loop and device: failures, delays, hangs."""

import asyncio
import random
from dataclasses import dataclass
from typing import TypeVar

from relaygr.config import EngineConfig
from relaygr.engine.step import (
    Capacity,
    Executor,
    Model,
    PageCopy,
    Served,
    Step,
    StepResult,
)

__all__ = ["Faults", "FaultyExecutor", "InjectedFault"]

T = TypeVar("T")


class InjectedFault(Exception):
    """The device failed because a test wanted it to."""


@dataclass(frozen=True)
class Faults:
    """How likely each fault is for one launch or copy."""

    refuse: float = 0.0
    """The device does not take the work: the call raises."""
    fail: float = 0.0
    """The work is lost: it does not happen, and its future fails."""
    fail_after: float = 0.0
    """The work happens, and its future fails all the same."""
    delay: float = 0.0
    delay_s: float = 0.02
    hang: float = 0.0
    hang_s: float = 5.0
    """A hang is a delay far past any deadline, and then a failure."""


class FaultyExecutor:
    """An executor with faults, the same for the same seed and sequence of calls. Steps still end in order."""

    def __init__(self, inner: Executor, faults: Faults, seed: int) -> None:
        self.active = True
        """Tests switch faults off to let an engine start or settle."""
        self._inner = inner
        self._faults = faults
        self._random = random.Random(seed)
        self._last: asyncio.Future[None] | None = None

    def open(self, model: Model, config: EngineConfig) -> Capacity:
        return self._inner.open(model, config)

    @property
    def depth(self) -> int:
        return self._inner.depth

    @property
    def host_pages(self) -> int:
        return self._inner.host_pages

    def facts(self) -> dict[str, float]:
        return self._inner.facts()

    async def prepare(self, model: Model) -> Served:
        return await self._inner.prepare(model)

    def close(self) -> None:
        self._inner.close()

    def launch(self, step: Step) -> "asyncio.Future[StepResult]":
        kind = self._draw()
        work = None if kind == "fail" else self._inner.launch(step)
        before, self._last = self._last, asyncio.get_running_loop().create_future()
        return asyncio.ensure_future(self._deliver(kind, work, before, self._last))

    def copy(self, copy: PageCopy) -> "asyncio.Future[float]":
        kind = self._draw()
        work = None if kind == "fail" else self._inner.copy(copy)
        return asyncio.ensure_future(self._deliver(kind, work, None, None))

    def _draw(self) -> str | None:
        """Which fault this call meets."""
        drawn = self._random.random()
        if not self.active:
            return None
        for kind in ("refuse", "fail", "fail_after", "delay", "hang"):
            drawn -= getattr(self._faults, kind)
            if drawn < 0:
                if kind == "refuse":
                    raise InjectedFault("refused")
                return kind
        return None

    async def _deliver(
        self,
        kind: str | None,
        work: "asyncio.Future[T] | None",
        before: "asyncio.Future[None] | None",
        mine: "asyncio.Future[None] | None",
    ) -> T:
        """The result of the work, or its fault, after that of the launch before."""
        try:
            try:
                result = await work if work is not None else None
            finally:
                if kind in ("delay", "hang"):
                    await asyncio.sleep(self._faults.delay_s if kind == "delay" else self._faults.hang_s)
                if before is not None:
                    await before
            if kind in ("fail", "fail_after", "hang") or result is None:
                raise InjectedFault(kind)
            return result
        finally:
            if mine is not None:
                mine.set_result(None)
