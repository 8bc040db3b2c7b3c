"""With the canary on, a page that does not hold what was written to it is a miss."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paged import random_history
from relaygr import Engine, EngineConfig, History, build_model
from relaygr.engine.canary import Canary
from relaygr.engine.cpu_runner import CpuRunner
from relaygr.engine.step import PageSpoiled, Served, Step
from relaygr.engine.torch_executor import TorchExecutor
from relaygr.kernels import PageLayout
from relaygr.model.batch import AppendRow, ScoreRow
from relaygr.model.candidates import Candidates

MODEL = build_model("hstu", layers=2, dim=16, heads=2, items=100, seed=0, scale_length=500.0)
LAYOUT = PageLayout(2, 2, 8)
ITEMS = np.arange(9)


def served(spare: int = 40, host: int = 40, *, canary: bool = True) -> tuple[Engine, TorchExecutor]:
    executor = TorchExecutor()
    sizes = {"device_cache": f"{(spare + 10) * LAYOUT.bytes}B", "host_cache": f"{host * LAYOUT.bytes}B"}
    config = EngineConfig(max_history=1000, canary=canary, **sizes)  # type: ignore[arg-type]
    return Engine(MODEL, config, executor=executor), executor


def runner(executor: TorchExecutor) -> CpuRunner:
    assert isinstance(executor._runner, CpuRunner)
    return executor._runner


def in_loop(main: Callable[[], Any]) -> None:
    asyncio.run(main())


def test_pages_that_hold_what_was_written_are_served() -> None:
    async def main() -> None:
        draw = np.random.default_rng(0)
        engine, _ = served()
        async with engine:
            history = random_history(draw, 700)
            paths = [(await engine.rank("u1", history[:length], ITEMS)).path for length in (500, 500, 510, 640, 700)]
            assert paths == ["FULL", "RESIDENT", "EXTENDED", "EXTENDED", "EXTENDED"]
            assert engine.status().faults == {}

    in_loop(main)


@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("longer", [0, 10])
def test_what_was_kept_behind_a_head_is_checked_and_the_head_is_not(longer: int, spoiled: bool) -> None:
    async def main() -> None:
        draw = np.random.default_rng(0)
        engine, executor = served(host=0)
        async with engine:
            history = random_history(draw, 510)
            await engine.rank("u1", history[:500], ITEMS)
            assert engine._loop is not None
            held = engine._loop.tier.find("u1")
            assert held is not None
            engine._loop.tier._shorten(held, 2)
            runner(executor).pages[held.pages[:2]] = 7.0
            if spoiled:
                runner(executor).pages[held.pages[3]] += 1.0
            ranked = await engine.rank("u1", history[: 500 + longer], ITEMS)
            assert ranked.path == ("FULL" if spoiled else "EXTENDED")
            assert bool(engine.status().faults) is spoiled

    in_loop(main)


@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("corrected", [False, True])
def test_a_page_that_was_copied_with_a_head_is_what_was_copied(corrected: bool, short: int) -> None:
    async def main() -> None:
        draw = np.random.default_rng(0)
        engine, _ = served(host=0)
        async with engine:
            history, context = random_history(draw, 500), np.arange(3)
            await engine.rank("u1", history, ITEMS, context=context)
            assert engine._loop is not None
            held = engine._loop.tier.find("u1")
            assert held is not None
            if short:
                engine._loop.tier._shorten(held, short)
            other = history[:384]
            if corrected:
                items = history.items.copy()
                items[300] = (items[300] + 1) % 100
                other = History(items, history.actions, history.timestamps)
            for _ in range(2):
                await engine.rank("u1", other, ITEMS, context=context)
            assert engine.status().faults == {}

    in_loop(main)


@pytest.mark.parametrize("seed", range(20))
def test_one_spoiled_value_of_the_prefix_is_noticed(seed: int) -> None:
    async def main() -> None:
        draw = np.random.default_rng(seed)
        engine, executor = served()
        async with engine:
            history = random_history(draw, int(draw.integers(130, 600)))
            right = (await engine.rank("u1", history, ITEMS)).scores
            assert engine._loop is not None
            prefix = engine._loop.tier.find("u1")
            assert prefix is not None
            token = int(draw.integers(0, len(history)))
            place = (int(prefix.pages[token // 128]), *draw.integers(0, 2, 2), token % 128, *draw.integers(0, 2, 2))
            runner(executor).pages[tuple(int(k) for k in place)] += 1e-3
            longer = history.append([1], [1], [int(history.timestamps[-1])]) if seed % 2 else history
            ranked = await engine.rank("u1", longer, ITEMS)
            assert ranked.path == "FULL"
            assert engine.status().faults["step"] >= 1
            if longer is history:
                assert np.array_equal(ranked.scores, right)

    in_loop(main)


def test_a_spoiled_copy_in_host_memory_is_noticed() -> None:
    async def main() -> None:
        engine, executor = served()
        async with engine:
            history = random_history(np.random.default_rng(0), 500)
            right = (await engine.rank("u1", history, ITEMS)).scores
            while not engine.status().written_back:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert engine._loop is not None
            engine._loop.tier.drop("u1")
            runner(executor).host_pages[:, 1, 0, 3] += 1
            ranked = await engine.rank("u1", history, ITEMS)
            assert ranked.path == "FULL"
            assert np.array_equal(ranked.scores, right)

    in_loop(main)


def test_without_the_canary_nothing_is_noticed() -> None:
    """What the tests above rely on: it is the checksums that notice."""

    async def main() -> None:
        engine, executor = served(canary=False)
        async with engine:
            history = random_history(np.random.default_rng(0), 500)
            right = (await engine.rank("u1", history, ITEMS)).scores
            runner(executor).pages[:, 1, 0, 3] += 1
            ranked = await engine.rank("u1", history, ITEMS)
            assert ranked.path == "RESIDENT"
            assert not np.array_equal(ranked.scores, right)

    in_loop(main)


def test_a_page_that_was_never_written_is_not_read() -> None:
    canary = Canary(LAYOUT.allocate(4).zero_(), 0)
    row = ScoreRow(Candidates(ITEMS), None, 5, 5, [2])
    with pytest.raises(PageSpoiled, match="page 2"):
        canary.check(Step(Served(MODEL, "v", 0), [], [row]))


def test_sums_depend_on_places() -> None:
    pages = LAYOUT.allocate(2).zero_()
    canary = Canary(pages, 0)
    canary._filled[next(iter(canary._filled))][:] = 128
    pages[0, 0, 0, 3] = 1.0
    pages[1, 0, 0, 4] = 1.0
    first, second = canary._sum(np.array([0, 1]))
    assert first != second
    assert torch.equal(canary._sum(np.array([0])), first[None])


def test_a_copied_page_holds_what_was_copied_whatever_else_the_step_wrote() -> None:
    pages = LAYOUT.allocate(4).zero_()
    canary = Canary(pages, 0)
    served_ = Served(MODEL, "v", 0)
    history = random_history(np.random.default_rng(0), 400)

    def append(high: int, where: list[int]) -> AppendRow:
        return AppendRow(history, np.empty(0, np.int64), 0, high, where)

    def score(tokens: int, where: list[int]) -> Step:
        return Step(served_, [], [ScoreRow(Candidates(ITEMS), None, tokens, tokens, where)])

    pages[0] = 3.0
    canary.wrote(Step(served_, [append(20, [0])], []))
    pages[1], pages[2] = pages[0], 5.0
    canary.wrote(Step(served_, [append(100, [2])], [], page_copies=[(0, 1)]))
    assert not canary.check(score(20, [1]))
    with pytest.raises(PageSpoiled):
        canary.check(score(21, [1]))
    pages[1] += 1.0
    assert canary.check(score(20, [1]))
