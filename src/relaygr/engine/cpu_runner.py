"""Steps and copies on a CPU: a thread for each, so that the event loop goes on meanwhile."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from relaygr.engine.canary import Canary
from relaygr.engine.hot_rows import HotRowCache
from relaygr.engine.runner import split_scores
from relaygr.engine.step import Direction, PageCopy, PageSpoiled, Progress, Served, Step, StepResult
from relaygr.model import AppendBatch, RankingModel, ScoreBatch

__all__ = ["CpuRunner"]


class CpuRunner:
    """One step at a time, and one copy."""

    depth = 1

    def __init__(self, pages: torch.Tensor, host_pages: torch.Tensor, *, canary: bool = False) -> None:
        self.pages = pages
        self.host_pages = host_pages
        self._canary = Canary(pages, len(host_pages)) if canary else None
        self._steps = ThreadPoolExecutor(1, "relaygr-steps")
        self._copies = ThreadPoolExecutor(1, "relaygr-copies")

    def trays(self, model: RankingModel) -> None:
        return None

    def serve(self, served: Served, hot: HotRowCache | None, progress: Progress) -> None:
        pass

    def launch(self, step: Step) -> "asyncio.Future[StepResult]":
        return asyncio.get_running_loop().run_in_executor(self._steps, self.run, step)

    def copy(self, copy: PageCopy) -> "asyncio.Future[float]":
        return asyncio.get_running_loop().run_in_executor(self._copies, self.move, copy)

    def facts(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._steps.shutdown()
        self._copies.shutdown()

    def run(self, step: Step) -> StepResult:
        """Run it here and now."""
        began = time.perf_counter()
        model = step.served.model
        assert isinstance(model, RankingModel)
        if self._canary is not None and self._canary.check(step):
            raise PageSpoiled("a page does not hold what was written to it")
        for old, new in step.page_copies:
            self.pages[new].copy_(self.pages[old])
        if step.appends:
            model.append(AppendBatch.pack(model.config, step.appends), self.pages)
            if self._canary is not None:
                self._canary.wrote(step)
        scores = []
        if step.scores:
            packed = model.score(ScoreBatch.pack(model.config, step.scores), self.pages)
            scores = split_scores(step, packed.numpy())
        return StepResult(scores, time.perf_counter() - began)

    def move(self, copy: PageCopy) -> float:
        """Copy here and now."""
        began = time.perf_counter()
        inward = copy.direction is Direction.IN
        source, target = (self.host_pages, self.pages) if inward else (self.pages, self.host_pages)
        for old, new in zip(copy.source.tolist(), copy.target.tolist(), strict=True):
            target[new].copy_(source[old])
        if self._canary is not None:
            self._canary.moved(copy)
        return time.perf_counter() - began
