"""A short measurement of what work costs on this device, before the first request."""

import contextlib
import math

import numpy as np

from relaygr.cache import Pages, Tier
from relaygr.engine.cost import CostModel
from relaygr.engine.step import Direction, Executor, PageCopy, Served, Step
from relaygr.errors import Unavailable
from relaygr.history import PAGE, History
from relaygr.model.batch import AppendRow, ScoreRow
from relaygr.model.candidates import Candidates
from relaygr.model.inputs import NO_CONTEXT

__all__ = ["profile"]

Sample = tuple[tuple[float, ...], float]
"""What was run, as features of the cost model, and the seconds it took."""

_REPEATS = 2
_SHORTEST = 2048
_LONGEST = 32768
_ENOUGH_S = 0.01
_CANDIDATES = (16, 256)


async def profile(
    executor: Executor, served: Served, device: Tier, host: Tier, cost: CostModel, max_history: int
) -> None:
    """Run a few shapes of steps and copies on scratch pages, and fit the cost model to their times.

    Longer histories are tried until a step takes long enough to tell what a token costs: on a fast device short ones
    all take the same. Shapes that fail are left out; Unavailable if all of them do. All pages are given back.
    """
    steps: list[Sample] = []
    copies: list[Sample] = []
    longest = min(_SHORTEST, max_history)
    while True:
        await _measure(executor, served, device, host, longest, steps, copies)
        if longest == min(_LONGEST, max_history) or max(seconds for _, seconds in steps) >= _ENOUGH_S:
            break
        longest = min(4 * longest, _LONGEST, max_history)
    cost.steps.profile([(features, seconds) for features, seconds in steps if seconds > 0])
    cost.copies.profile([(features, seconds) for features, seconds in copies if seconds > 0])


async def _measure(
    executor: Executor,
    served: Served,
    device: Tier,
    host: Tier,
    longest: int,
    steps: list[Sample],
    copies: list[Sample],
) -> None:
    """Add samples of histories up to `longest`."""
    pages = device.pool.take(-(-longest // PAGE))
    on_host = host.pool.take(min(len(pages), host.pool.total))
    try:
        steps += await _steps(executor, served, pages, longest)
        for count in sorted({min(1, len(on_host)), len(on_host) // 2, len(on_host)} - {0}):
            for direction, source, target in ((Direction.OUT, pages, on_host), (Direction.IN, on_host, pages)):
                # As those come in that a rank waits for.
                copy = PageCopy(direction, source[:count], target[:count], nearly=lambda: None, nearly_at=0.0)
                for _ in range(_REPEATS):
                    with contextlib.suppress(Exception):
                        copies.append(((1.0, float(count)), await executor.copy(copy)))
    finally:
        device.pool.unpin(pages)
        host.pool.unpin(on_host)


async def _steps(executor: Executor, served: Served, pages: Pages, longest: int) -> list[Sample]:
    """Of appends that together fill a prefix, and of scores on parts of it."""
    draw = np.random.default_rng(0)
    history = History(
        draw.integers(0, served.model.config.items, longest),
        draw.integers(0, served.model.config.actions, longest),
        np.arange(longest) * 60,
    )
    shapes: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []
    low = 0
    for size in (1, 16, 128, 512, longest):
        high = min(low + size, longest)
        if high > low:
            shapes.append(([(high - low, low)], []))
        low = high
    for count in _CANDIDATES:
        shapes += [([], [(count, tokens)]) for tokens in sorted({1, longest // 2, longest} - {0})]
    best: dict[tuple[float, ...], float] = {}
    failure: Exception | None = None
    for repeat in range(_REPEATS + 1):
        for appends, scores in shapes:
            step = Step(
                served,
                [AppendRow(history, NO_CONTEXT, cached, cached + new, pages) for new, cached in appends],
                [ScoreRow(Candidates(np.arange(m)), None, tokens, tokens, pages) for m, tokens in scores],
            )
            try:
                result = await executor.launch(step)
            except Exception as error:
                failure = error
                continue
            if repeat:  # the first round warms up; of the others, what disturbed the device least counts
                features = CostModel.features(appends, scores)
                best[features] = min(result.seconds, best.get(features, math.inf))
    if not best:
        raise Unavailable(f"the device runs nothing: {failure}") from failure
    return list(best.items())
