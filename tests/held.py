"""A real device that a test holds back. Import it in any test as `held`."""

import asyncio

from relaygr.engine.step import Step, StepResult
from relaygr.engine.torch_executor import TorchExecutor

__all__ = ["HeldExecutor"]


class HeldExecutor(TorchExecutor):
    """Steps begin when they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.go.set()
        self.tokens = 0
        """Of histories, run so far."""

    def launch(self, step: Step) -> "asyncio.Future[StepResult]":
        return asyncio.ensure_future(self._held(step))

    async def _held(self, step: Step) -> StepResult:
        await self.go.wait()
        self.tokens += sum(row.high - row.low for row in step.appends)
        return await super().launch(step)
