"""Injected faults are the same for the same seed, do what they say, and leave steps in their order."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from behaviours import numbered
from relaygr.clock import run_virtual
from relaygr.config import EngineConfig
from relaygr.engine.faults import Faults, FaultyExecutor, InjectedFault
from relaygr.engine.simulated import SimulatedCosts, SimulatedExecutor, SimulatedModel, simulated_scores
from relaygr.engine.step import Direction, PageCopy, Served, Step, StepResult
from relaygr.model.batch import AppendRow, ScoreRow
from relaygr.model.candidates import Candidates

MODEL = SimulatedModel()
HISTORY = numbered(100)
CANDIDATES = np.arange(3)
NO_CONTEXT = np.empty(0, np.int64)
PAGE_0 = np.zeros(1, np.int64)
SOME = Faults(refuse=0.1, fail=0.2, fail_after=0.2, delay=0.2, hang=0.1)
COSTS = SimulatedCosts(step=1e-3, token=0.0, pair=0.0, candidate=0.0, candidate_pair=0.0, copy=1e-3, page=0.0)


class Rig:
    """A faulty executor over a simulated one with a page in each tier."""

    def __init__(self, faults: Faults, seed: int = 0) -> None:
        self.inner = SimulatedExecutor(COSTS, page_bytes=1, depth=3)
        self.faulty = FaultyExecutor(self.inner, faults, seed)
        self.faulty.open(MODEL, EngineConfig(device_cache="2", host_cache="2"))
        self.served = Served(MODEL, MODEL.version(), MODEL.epoch)
        self.ended: list[int] = []

    def append(self) -> Step:
        return Step(self.served, [AppendRow(HISTORY, NO_CONTEXT, 0, 100, PAGE_0)], [])

    def score(self) -> Step:
        return Step(self.served, [], [ScoreRow(Candidates(CANDIDATES), None, 100, 100, PAGE_0)])

    def launch(self, number: int, step: Step) -> "asyncio.Future[StepResult] | None":
        """None where it was refused."""
        try:
            future = self.faulty.launch(step)
        except InjectedFault:
            return None
        future.add_done_callback(lambda _: self.ended.append(number))
        return future

    async def right(self) -> bool:
        """Whether the page holds what the append writes."""
        self.faulty.active = False
        result = await self.faulty.launch(self.score())
        return np.array_equal(result.scores[0], simulated_scores(MODEL, HISTORY, CANDIDATES))


def now() -> float:
    return asyncio.get_running_loop().time()


async def outcome(work: Coroutine[Any, Any, Any] | asyncio.Future[Any] | None) -> str:
    """What became of a launch, and when."""
    if work is None:
        return "refused"
    try:
        await work
    except InjectedFault as fault:
        return f"{fault} at {now():.4f}"
    return f"done at {now():.4f}"


async def run(seed: int, count: int = 40) -> list[str]:
    rig = Rig(SOME, seed)
    outcomes = []
    for number in range(count):
        if number % 4 == 3:
            copy = PageCopy(Direction.OUT, PAGE_0, PAGE_0)
            try:
                outcomes.append(await outcome(rig.faulty.copy(copy)))
            except InjectedFault:
                outcomes.append("refused")
        else:
            outcomes.append(await outcome(rig.launch(number, rig.append())))
    return outcomes


def test_the_same_seed_gives_the_same_faults_at_the_same_times_and_another_seed_others() -> None:
    first = run_virtual(run(seed=1))
    assert run_virtual(run(seed=1)) == first
    assert run_virtual(run(seed=2)) != first
    words = Counter(one.split(" at ")[0] for one in first)
    assert set(words) == {"refused", "fail", "fail_after", "hang", "done"}


@given(st.integers(0, 2**32), st.integers(1, 12), st.data())
def test_steps_end_in_the_order_of_their_launches_whatever_happens_to_them(
    seed: int, count: int, data: st.DataObject
) -> None:
    gaps = data.draw(st.lists(st.sampled_from((0.0, 1e-4, 1e-2, 1.0)), min_size=count, max_size=count))

    async def main() -> tuple[list[int], list[int]]:
        rig = Rig(SOME, seed)
        futures = {}
        for number, gap in enumerate(gaps):
            future = rig.launch(number, rig.append())
            if future is not None:
                futures[number] = future
            await asyncio.sleep(gap)
        await asyncio.gather(*futures.values(), return_exceptions=True)
        await asyncio.sleep(0)
        return rig.ended, list(futures)

    ended, launched = run_virtual(main())
    assert ended == launched


def test_a_refused_step_raises_and_does_not_reach_the_device() -> None:
    async def main() -> None:
        rig = Rig(Faults(refuse=1.0))
        with pytest.raises(InjectedFault, match="refused"):
            rig.faulty.launch(rig.append())
        with pytest.raises(InjectedFault, match="refused"):
            rig.faulty.copy(PageCopy(Direction.OUT, PAGE_0, PAGE_0))
        assert rig.inner.launched == []
        assert not await rig.right()

    run_virtual(main())


def test_a_failed_step_did_not_happen() -> None:
    async def main() -> None:
        rig = Rig(Faults(fail=1.0))
        assert (await outcome(rig.launch(0, rig.append()))).startswith("fail at")
        assert rig.inner.launched == []
        assert not await rig.right()

    run_virtual(main())


def test_a_step_that_fails_afterwards_did_happen() -> None:
    async def main() -> None:
        rig = Rig(Faults(fail_after=1.0))
        assert await outcome(rig.launch(0, rig.append())) == "fail_after at 0.0010"
        assert await rig.right()

    run_virtual(main())


def test_a_delayed_step_is_done_later() -> None:
    async def main() -> None:
        rig = Rig(Faults(delay=1.0, delay_s=0.5))
        assert await outcome(rig.launch(0, rig.append())) == "done at 0.5010"
        assert await rig.right()

    run_virtual(main())


def test_a_hanging_step_fails_far_past_its_time() -> None:
    async def main() -> None:
        rig = Rig(Faults(hang=1.0, hang_s=7.0))
        assert await outcome(rig.launch(0, rig.append())) == "hang at 7.0010"

    run_virtual(main())


def test_a_step_behind_a_hanging_one_waits_for_it() -> None:
    async def main() -> None:
        rig = Rig(Faults(hang=1.0, hang_s=7.0))
        first = rig.launch(0, rig.append())
        rig.faulty.active = False
        second = rig.launch(1, rig.append())
        assert await outcome(second) == "done at 7.0010"
        assert await outcome(first) == "hang at 7.0010"
        assert rig.ended == [0, 1]

    run_virtual(main())


def test_a_hanging_copy_holds_up_no_step() -> None:
    async def main() -> None:
        rig = Rig(Faults(hang=1.0, hang_s=7.0))
        copy = rig.faulty.copy(PageCopy(Direction.OUT, PAGE_0, PAGE_0))
        rig.faulty.active = False
        assert await outcome(rig.launch(0, rig.append())) == "done at 0.0010"
        assert (await outcome(copy)).startswith("hang at 7.0")

    run_virtual(main())


def test_a_failed_copy_did_not_happen_and_a_good_one_did() -> None:
    async def main() -> None:
        rig = Rig(Faults(fail=1.0))
        rig.faulty.active = False
        await rig.faulty.launch(rig.append())
        await rig.faulty.copy(PageCopy(Direction.OUT, PAGE_0, PAGE_0))
        there, back = np.ones(1, np.int64), PageCopy(Direction.IN, PAGE_0, np.ones(1, np.int64))
        elsewhere = Step(rig.served, [], [ScoreRow(Candidates(CANDIDATES), None, 100, 100, there)])
        right = simulated_scores(MODEL, HISTORY, CANDIDATES)
        rig.faulty.active = True
        assert (await outcome(rig.faulty.copy(back))).startswith("fail at")
        rig.faulty.active = False
        assert not np.array_equal((await rig.faulty.launch(elsewhere)).scores[0], right)
        await rig.faulty.copy(back)
        assert np.array_equal((await rig.faulty.launch(elsewhere)).scores[0], right)

    run_virtual(main())


def test_no_fault_happens_while_faults_are_switched_off_and_the_seed_goes_on() -> None:
    async def main(off: bool) -> list[str]:
        rig = Rig(SOME, seed=3)
        for _ in range(20):
            rig.faulty.active = not off
            if off:
                assert (await outcome(rig.launch(0, rig.append()))).startswith("done")
            else:
                await outcome(rig.launch(0, rig.append()))
        rig.faulty.active = True
        return [(await outcome(rig.launch(0, rig.append()))).split(" at ")[0] for _ in range(20)]

    assert run_virtual(main(off=True)) == run_virtual(main(off=False))


def test_faults_come_as_often_as_asked() -> None:
    outcomes = Counter(one.split(" at ")[0] for one in run_virtual(run(seed=4, count=2000)))
    assert outcomes["refused"] == pytest.approx(200, abs=50)
    assert outcomes["fail"] == pytest.approx(400, abs=70)
    assert outcomes["fail_after"] == pytest.approx(400, abs=70)
    assert outcomes["hang"] == pytest.approx(200, abs=50)
    assert outcomes["done"] == pytest.approx(800, abs=90)


def test_what_is_not_a_launch_goes_straight_to_the_device() -> None:
    async def main() -> None:
        inner = SimulatedExecutor(page_bytes=1, depth=2)
        faulty = FaultyExecutor(inner, Faults(refuse=1.0), seed=0)
        assert faulty.depth == 2
        capacity = faulty.open(MODEL, EngineConfig(device_cache="5", host_cache="3"))
        assert (capacity.device, capacity.host) == (5, 3)
        assert (await faulty.prepare(MODEL)).model is MODEL
        faulty.close()

    run_virtual(main())
