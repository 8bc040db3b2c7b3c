"""Engines in virtual time over a device that a test looks into and makes fail. Import it in any test as `engines`."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, ParamSpec

import numpy as np
import numpy.typing as npt

from relaygr import Engine, EngineConfig, History, PreInferOutcome, Ranked
from relaygr.clock import VirtualClock, VirtualTimeLoop, run_virtual
from relaygr.engine.simulated import SimulatedCosts, SimulatedExecutor, SimulatedModel, simulated_scores
from relaygr.engine.step import Direction, PageCopy, Step, StepResult
from relaygr.history import PAGE
from relaygr.model.config import MAX_CONTEXT

__all__ = [
    "COSTS",
    "PAGE_BYTES",
    "Bench",
    "DeviceLost",
    "WatchedDevice",
    "corrected",
    "in_virtual_time",
    "opened",
    "weigh_at_random",
]

P = ParamSpec("P")

PAGE_BYTES = 1024
COSTS = SimulatedCosts(step=100e-6, token=10e-6, pair=0.0, candidate=1e-6, candidate_pair=0.0, copy=100e-6, page=100e-6)
"""A page of new tokens takes 1.28 ms, a copied page 0.1 ms: reloading is worth it."""


class DeviceLost(Exception):
    """What a watched device fails with."""


class WatchedDevice(SimulatedExecutor):
    """Remembers every copy, and fails or hangs where a test says so."""

    def __init__(self, costs: SimulatedCosts = COSTS, *, depth: int = 1) -> None:
        super().__init__(costs, page_bytes=PAGE_BYTES, depth=depth)
        self.copies: list[PageCopy] = []
        self.fails: Callable[[Step | PageCopy], bool] = lambda work: False
        """Whether this work is lost: it takes its time, writes rubbish where it may write, and its future fails."""
        self.hangs_s: Callable[[Step | PageCopy], float] = lambda work: 0.0
        """How much longer than it should this work takes."""

    @property
    def appended(self) -> int:
        """Tokens run so far."""
        return sum(row.high - row.low for step in self.launched for row in step.appends)

    @property
    def page_copies(self) -> int:
        """Pages copied inside the device tier before they were rewritten."""
        return sum(len(step.page_copies) for step in self.launched)

    @property
    def reloads(self) -> int:
        return sum(copy.direction is Direction.IN for copy in self.copies)

    @property
    def writes(self) -> int:
        return sum(copy.direction is Direction.OUT for copy in self.copies)

    def forget(self) -> None:
        """Count from here."""
        self.launched.clear()
        self.copies.clear()

    def launch(self, step: Step) -> "asyncio.Future[StepResult]":
        self.launched.append(step)
        seconds = self._costs.of_step(step)
        self._follow(step)
        lost = self.fails(step)

        def work() -> StepResult:
            scores = self._run(step)
            if lost:
                for row in step.appends:
                    where = np.arange(row.low, row.high)
                    self._pages[np.asarray(row.pages)[where // PAGE], where % PAGE] = 0xBAD
                raise DeviceLost("in a step")
            return StepResult(scores, seconds)

        return self._after("steps", seconds + self.hangs_s(step), work)

    def copy(self, copy: PageCopy) -> "asyncio.Future[float]":
        self.copies.append(copy)
        seconds = self._costs.copy + self._costs.page * len(copy.source)
        inward = copy.direction is Direction.IN
        source, target = (self._host, self._pages) if inward else (self._pages, self._host)

        lost = self.fails(copy)

        def move() -> float:
            target[copy.target] = 0xBAD if lost else source[copy.source]
            if lost:
                raise DeviceLost("in a copy")
            return seconds

        late = seconds + self.hangs_s(copy)
        self._announce(copy, late)
        return self._after(copy.direction, late, move)


class Bench:
    """An engine, its device and its model; every score it gives is checked."""

    def __init__(self, engine: Engine, device: WatchedDevice, model: SimulatedModel) -> None:
        self.engine, self.device, self.model = engine, device, model

    @property
    def now(self) -> float:
        return self.engine.clock.now()

    def state(self) -> dict[str, Any]:
        """What the engine holds now, without what it has counted."""
        counted = {"paths", "outcomes", "faults", "device_busy_s", "wait_ms", "written_back", "device_evictions"}
        counted |= {"host_evictions", "device_shortened", "host_shortened", "resident_left_by_earlier", "prepared"}
        counted |= {"cost_model", "cost_model_version", "cost_model_error"}
        return {name: value for name, value in asdict(self.engine.status()).items() if name not in counted}

    async def rank(
        self,
        user: str,
        history: History,
        *,
        candidates: int = 3,
        context: npt.NDArray[np.int64] | None = None,
        within: float | None = None,
    ) -> Ranked:
        """Rank `within` seconds. The scores must be those of the model served when the call was made."""
        model, items = self.model, np.arange(candidates) * 31 + 7
        deadline = None if within is None else self.now + within
        ranked = await self.engine.rank(user, history, items, context=context, deadline=deadline)
        if ranked.path == "TRUNCATED":
            history = history[len(history) - ranked.used :]
        assert ranked.used == len(history)
        if ranked.epoch == model.epoch:
            right = simulated_scores(model, history, items, context)
            assert np.array_equal(ranked.scores, right), f"a wrong score by {ranked.path}"
        return ranked

    async def pre_infer(
        self,
        user: str,
        history: History,
        *,
        context: npt.NDArray[np.int64] | None = None,
        within: float | None = None,
    ) -> PreInferOutcome:
        deadline = None if within is None else self.now + within
        return await self.engine.pre_infer(user, history, context=context, deadline=deadline)

    async def swap(self, model: SimulatedModel) -> None:
        await self.engine.swap_model(model)
        self.model = model

    async def settle(self) -> None:
        """Until nothing runs: every build has ended, every copy is done."""
        while True:
            await asyncio.sleep(1e-3)
            status = self.engine.status()
            if not (status.steps_in_flight or status.copies_in_flight or status.builds_under_way):
                return

    async def push_out(self, *users: str) -> None:
        """Other users rank, until these are in the device tier no longer. Leases would keep them there."""
        assert self.engine._loop is not None
        await self.settle()
        visits = 0
        while any(self.engine._loop.tier.find(user) for user in users):
            visits += 1
            assert visits < 100, "they are kept"
            await self.rank(f"passer-by {visits}", History([visits] * PAGE, [0] * PAGE, [0] * PAGE))
        await self.settle()
        self.device.forget()


@asynccontextmanager
async def opened(
    *,
    spare: int = 8,
    host: int = 0,
    model: SimulatedModel | None = None,
    device: WatchedDevice | None = None,
    max_history: int = 400,
    **config: Any,
) -> AsyncIterator[Bench]:
    """An engine with `spare` device pages beside what is always kept for a rank, and `host` pages in host memory."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    device = device or WatchedDevice()
    model = model or SimulatedModel()
    reserve = -(-(max_history + MAX_CONTEXT) // PAGE) + 1
    settings = EngineConfig(
        device_cache=f"{(reserve + spare) * PAGE_BYTES}B",
        host_cache=f"{host * PAGE_BYTES}B",
        max_history=max_history,
        **{"lease_share": 1.0, "pre_infer_share": 1.0, **config},
    )
    async with Engine(model, settings, clock=VirtualClock(loop), executor=device) as engine:
        device.forget()
        yield Bench(engine, device, model)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is a coroutine, run in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtual(test(*args, **kwargs))

    return run


def weigh_at_random(engine: Engine, seed: int) -> None:
    """Whatever prefixes are worth: any of them goes next, and any part of it."""
    assert engine._loop is not None
    draw = np.random.default_rng(seed)
    for tier in (engine._loop.tier, engine._loop.host):
        tier.worth = lambda held: draw.random(len(held.last))
        tier.in_parts = lambda held: draw.random(len(held.last)) < 0.9


def corrected(history: History, at: int) -> History:
    """The same history, but for the item of one behaviour."""
    items = history.items.copy()
    items[at] += 1
    return History(items, history.actions, history.timestamps, start=history.start)
