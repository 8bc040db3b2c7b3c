"""A device that stays open while engines come and go on it: one in another mode costs no new graphs and no memory."""

import asyncio
from types import TracebackType
from typing import Self

from relaygr.config import EngineConfig
from relaygr.engine.step import Capacity, Executor, Model, PageCopy, Served, Step, StepResult

__all__ = ["StandingExecutor"]


class StandingExecutor:
    """Hands the one executor it was given to one engine after the other. An async context manager.

    What engines configure for themselves is theirs; model, memory, kernels and graphs are the same for all. An engine
    that wants no host tier has none; apart from that, sizes are those given here.
    """

    def __init__(self, executor: Executor, model: Model, config: EngineConfig) -> None:
        self.config = config
        self._executor = executor
        self._model = model
        self._capacity: Capacity
        self._served: Served
        self._host = True
        self._in_use = False

    async def __aenter__(self) -> Self:
        self._capacity = self._executor.open(self._model, self.config)
        try:
            self._served = await self._executor.prepare(self._model)
        except BaseException:
            self._executor.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.close()

    @property
    def depth(self) -> int:
        return self._executor.depth

    @property
    def host_pages(self) -> int:
        return self._executor.host_pages if self._host else 0

    @property
    def ready_host_pages(self) -> int:
        """Whether or not the engine that is open wants any."""
        return self._executor.host_pages

    def facts(self) -> dict[str, float]:
        return self._executor.facts()

    def open(self, model: Model, config: EngineConfig) -> Capacity:
        if self._in_use:
            raise RuntimeError("another engine is open on this device")
        if model is not self._model:
            raise RuntimeError("this device was opened for another model")
        self._in_use = True
        self._host = bool(config.host_bytes)
        return self._capacity if self._host else self._capacity._replace(host=0)

    async def prepare(self, model: Model) -> Served:
        return self._served

    def launch(self, step: Step) -> "asyncio.Future[StepResult]":
        return self._executor.launch(step)

    def copy(self, copy: PageCopy) -> "asyncio.Future[float]":
        return self._executor.copy(copy)

    def close(self) -> None:
        self._in_use = False
