"""A device without a model: costs are given, time passes on the event loop, and pages hold checkable contents.

The "KV" of a token is a number that depends on it and on every token before it, read from the page of the token
before; a score adds up every number of the prefix. So a page that was lost, reused, overwritten or never written shows
as a wrong score, as it would with a model, and what the right one is needs no model: `simulated_scores`.
"""

import asyncio
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from relaygr.config import EngineConfig
from relaygr.engine.cost import CostModel
from relaygr.engine.step import (
    Capacity,
    Direction,
    Model,
    PageCopy,
    Served,
    Step,
    StepResult,
)
from relaygr.errors import InvalidInput
from relaygr.history import PAGE, History
from relaygr.model.batch import AppendRow, ScoreRow
from relaygr.model.candidates import Items
from relaygr.model.config import ModelConfig
from relaygr.model.inputs import ModelInputs

__all__ = ["H200", "SimulatedCosts", "SimulatedExecutor", "SimulatedModel", "simulated_scores"]

T = TypeVar("T")
Numbers = npt.NDArray[np.uint64]

_POISON = np.uint64(0xDEADBEEFDEADBEEF)
_SCORE_MASK = np.uint64(2**24 - 1)


@dataclass(frozen=True)
class SimulatedCosts:
    """Seconds: of a step (fixed, per new token, per pair of token and key, per candidate, per pair) and of a copy."""

    step: float = 100e-6
    token: float = 0.1e-6
    pair: float = 0.02e-9
    candidate: float = 0.2e-6
    candidate_pair: float = 0.03e-9
    copy: float = 20e-6
    page: float = 40e-6

    def of_step(self, step: Step) -> float:
        features = CostModel.features(
            [(row.high - row.low, row.low) for row in step.appends],
            [(len(row.candidates), row.tokens) for row in step.scores],
        )
        prices = (self.step, self.token, self.pair, self.candidate, self.candidate_pair)
        return sum(price * amount for price, amount in zip(prices, features, strict=True))


H200: Final = SimulatedCosts(
    step=1.83e-4, token=9.15e-8, pair=1.618e-11, candidate=0.0, candidate_pair=2.917e-11, copy=1.275e-4, page=3.904e-5
)
"""Of 8 layers of 512, bf16, one NVIDIA H200: the engine's profile (benchmarks/results/headline-h200-plan-d512.json)."""


class SimulatedModel(ModelInputs):
    """Something to serve: a name, an epoch, and the rules for inputs."""

    def __init__(self, name: str = "simulated", *, epoch: int = 0, actions: int = 16, tasks: int = 1) -> None:
        self.config = ModelConfig("hstu", 1, 1, 1, 1, items=2**62, actions=actions, tasks=tasks)
        self.epoch = epoch
        self.name = name

    def version(self) -> str:
        return self.name


class SimulatedExecutor:
    """Steps take their cost one after the other; copies theirs, inward and outward each in order."""

    def __init__(
        self,
        costs: SimulatedCosts | None = None,
        *,
        page_bytes: int = 2**20,
        depth: int = 1,
        seed: int = 0,
        remember: bool = True,
        contents: bool = True,
    ) -> None:
        """`contents`: whether pages hold anything and scores say what; without, only time passes."""
        self.depth = depth
        self.launched: list[Step] = []
        """Every step, for tests to look at; none unless `remember`."""
        self._remember = remember
        self._contents = contents
        self._costs = costs or SimulatedCosts()
        self._page_bytes = page_bytes
        self._random = random.Random(seed)
        self._busy_until: dict[str, float] = {}
        self._pages: Numbers = np.empty((0, PAGE), np.uint64)
        self._host: Numbers = np.empty((0, PAGE), np.uint64)

    def open(self, model: Model, config: EngineConfig) -> Capacity:
        capacity = Capacity(
            config.device_bytes() // self._page_bytes, config.host_bytes // self._page_bytes, self._page_bytes
        )
        if not capacity.device:
            raise InvalidInput("device_cache", f"is less than one page, {self._page_bytes} bytes")
        held = PAGE if self._contents else 0
        self._pages = np.full((capacity.device, held), _POISON, np.uint64)
        self._host = np.full((capacity.host, held), _POISON, np.uint64)
        return capacity

    @property
    def host_pages(self) -> int:
        return len(self._host)

    def facts(self) -> dict[str, float]:
        return {}

    async def prepare(self, model: Model) -> Served:
        return Served(model, model.version(), model.epoch)

    def close(self) -> None:
        self._busy_until.clear()

    def launch(self, step: Step) -> "asyncio.Future[StepResult]":
        if self._remember:
            self.launched.append(step)
        seconds = self._costs.of_step(step)
        self._follow(step)
        return self._after("steps", seconds, lambda: StepResult(self._run(step), seconds))

    def copy(self, copy: PageCopy) -> "asyncio.Future[float]":
        seconds = self._costs.copy + self._costs.page * len(copy.source)
        inward = copy.direction is Direction.IN
        source, target = (self._host, self._pages) if inward else (self._pages, self._host)
        early = source[copy.source].copy() if self._random.random() < 0.5 else None  # a copy may read at any time
        target[copy.target] = _POISON

        def move() -> float:
            target[copy.target] = source[copy.source] if early is None else early
            return seconds

        self._announce(copy, seconds)
        return self._after(copy.direction, seconds, move)

    def _follow(self, step: Step) -> None:
        """A step that reads what is still being copied ends behind the copy."""
        if step.reloads:
            behind = max(self._busy_until.get(stream, 0.0) for stream in ("steps", Direction.IN))
            self._busy_until["steps"] = behind

    def _announce(self, copy: PageCopy, seconds: float) -> None:
        """Say that the copy is nearly done, when it is; call it before `_after`."""
        if copy.nearly is not None and copy.nearly_at < 1:
            loop = asyncio.get_running_loop()
            begin = max(loop.time(), self._busy_until.get(copy.direction, 0.0))
            loop.call_at(begin + copy.nearly_at * seconds, copy.nearly)

    def _after(self, stream: str, seconds: float, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Do the work when the stream has come to it and `seconds` have passed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._busy_until[stream] = max(loop.time(), self._busy_until.get(stream, 0.0)) + seconds

        def finish() -> None:
            try:
                result = work()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        loop.call_at(self._busy_until[stream], finish)
        return future

    def _run(self, step: Step) -> list[npt.NDArray[np.float32]]:
        if not self._contents:
            tasks = step.served.model.config.tasks
            return [np.zeros((len(row.candidates), tasks), np.float32) for row in step.scores]
        for old, new in step.page_copies:
            self._pages[new] = self._pages[old]
        for append in step.appends:
            self._append(step.served, append)
        return [self._score(step.served, row) for row in step.scores]

    def _append(self, served: Served, row: AppendRow) -> None:
        pages = np.asarray(row.pages)
        before = np.uint64(0)
        if row.low:
            before = self._pages[pages[(row.low - 1) // PAGE], (row.low - 1) % PAGE]
        numbers = _token_numbers(served.version, served.epoch, row.history, row.context)[row.low : row.high]
        positions = np.arange(row.low, row.high)
        self._pages[pages[positions // PAGE], positions % PAGE] = before + np.cumsum(numbers, dtype=np.uint64)

    def _score(self, served: Served, row: ScoreRow) -> npt.NDArray[np.float32]:
        held = self._pages[np.asarray(row.pages)].reshape(-1)[: row.tokens]
        return _scores(held, row.candidates.kept, served.model.config.tasks)


def simulated_scores(
    model: SimulatedModel,
    history: History,
    candidates: npt.NDArray[np.int64],
    context: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.float32]:
    """The right scores, computed at once without pages."""
    ids = model.check_context(context)
    numbers = _token_numbers(model.version(), model.epoch, history, ids)
    return _scores(np.cumsum(numbers, dtype=np.uint64), np.asarray(candidates), model.config.tasks)


def _token_numbers(version: str, epoch: int, history: History, context: npt.NDArray[np.int64]) -> Numbers:
    """A number for each token of context and history: what it is, where it stands, and which model reads it."""
    whose = np.uint64(sum(version.encode()) * 1_000_003 + epoch * 7919)
    behaviours = (
        history.items.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        + history.actions.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
        + history.gaps(0, len(history)).astype(np.uint64) * np.uint64(0x165667B19E3779F9)
    )
    tokens = np.concatenate((context.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93) + np.uint64(1), behaviours))
    mixed = (tokens + np.arange(len(tokens), dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)) ^ whose
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    numbers: Numbers = mixed ^ (mixed >> np.uint64(29))
    return numbers


def _scores(held: Numbers, items: Items, tasks: int) -> npt.NDArray[np.float32]:
    mixed = items.astype(np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= held @ _odd(len(held))
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed >>= np.uint64(20)
    mixed &= _SCORE_MASK
    column = mixed.astype(np.float32)[:, None]
    return column if tasks == 1 else np.repeat(column, tasks, axis=1)


@functools.lru_cache(maxsize=256)
def _odd(count: int) -> Numbers:
    """The first odd numbers: what the numbers of a prefix are weighed by."""
    return np.arange(count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
