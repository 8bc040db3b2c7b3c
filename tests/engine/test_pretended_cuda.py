"""What is launched on a GPU is right whenever the device comes to it: on the CPU, on a device that is pretended."""

import asyncio
import os
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from engines import weigh_at_random
from optional import require
from oracle import assert_scores, oracle_scores
from relaygr import Candidates, Engine, EngineConfig, History, build_model
from relaygr.engine.cost import CostModel
from relaygr.engine.faults import Faults, FaultyExecutor
from relaygr.engine.step import Executor
from relaygr.errors import Unavailable
from relaygr.kernels import mail
from relaygr.model import RankingModel

require("triton", "pip install relaygr[triton]")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: see test_cuda")

from pretended_cuda import PretendedCuda, pretend  # noqa: E402

ITEMS, ACTIONS, LONGEST, FEATURES = 60, 4, 420, 2


@pytest.fixture(autouse=True)
def cheap_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies pass for free: what is not in device memory is reloaded where it can be."""
    monkeypatch.setattr(CostModel, "copy_s", lambda self, pages: 0.0)


def model(seed: int = 0, features: int = FEATURES) -> RankingModel:
    return build_model(
        "hstu", layers=3, dim=16, heads=1, items=ITEMS, seed=seed, actions=ACTIONS, tasks=2, scale_length=300.0,
        request_features=features, candidate_features=features,
    )  # fmt: skip


def config(served: RankingModel, **more: Any) -> EngineConfig:
    page = served.layout.bytes
    return EngineConfig(
        device_cache=f"{12 * page}B", host_cache=f"{60 * page}B", max_history=LONGEST, pre_infer_share=1.0, **more
    )


class Caller:
    """Does what callers do, in an order drawn from the seed, and compares every score with a dense float64 oracle."""

    def __init__(self, engine: Engine, served: RankingModel, seed: int) -> None:
        self.engine, self.served = engine, served
        self.paths: Counter[str] = Counter()
        self.lost = 0
        self._draw = np.random.default_rng(seed)
        self._histories = {f"u{k}": self._behaviours(int(self._draw.integers(0, LONGEST))) for k in range(6)}

    def _behaviours(self, count: int) -> History:
        draw = self._draw
        times = np.sort(draw.integers(0, 10**6, count))
        return History(draw.integers(0, ITEMS * 2, count), draw.integers(0, ACTIONS, count), times)

    async def turn(self) -> None:
        draw, engine = self._draw, self.engine
        user = str(draw.choice(list(self._histories)))
        history = self._histories[user]
        kinds = {"rank": 0.5, "pre_infer": 0.1, "relay": 0.15, "grow": 0.15, "correct": 0.05, "evict": 0.05}
        kind = draw.choice(list(kinds), p=list(kinds.values()))
        if kind == "grow" and len(history) < LONGEST - 30:
            more, last = self._behaviours(int(draw.integers(1, 30))), int(history.timestamps[-1]) if len(history) else 0
            history = self._histories[user] = history.append(more.items, more.actions, last + more.timestamps)
        if kind == "correct" and len(history):
            items = history.items.copy()
            items[draw.integers(0, len(items))] += 1
            history = self._histories[user] = History(items, history.actions, history.timestamps)
        if kind == "evict":
            await engine.evict(user)
        if kind in ("pre_infer", "relay"):
            await engine.pre_infer(user, history)
        if kind == "pre_infer":
            return
        count, wide = int(draw.choice([1, 3, 16, 30], p=[0.3, 0.4, 0.25, 0.05])), self.served.config.candidate_features
        features = draw.random((count, wide), np.float32) if wide and draw.random() < 0.5 else None
        request = draw.random(wide, np.float32) if wide and draw.random() < 0.5 else None
        candidates = Candidates(draw.integers(0, ITEMS * 2, count), features)
        try:
            ranked = await engine.rank(user, history, candidates, request=request)
        except Unavailable:  # the device failed again and again: said, not hidden
            self.lost += 1
            return
        self.paths[ranked.path] += 1
        assert_scores(ranked.scores, oracle_scores(self.served, history, candidates, request=request))

    async def turns(self, count: int, at_once: int) -> None:
        async def work() -> None:
            for _ in range(count // at_once):
                await self.turn()

        await asyncio.gather(*(work() for _ in range(at_once)))


def run(served: RankingModel, executor: Executor, seed: int, turns: int, **more: Any) -> tuple[Caller, Counter[str]]:
    """What callers saw, and the device's faults."""

    async def main() -> tuple[Caller, Counter[str]]:
        if isinstance(executor, FaultyExecutor):
            executor.active = False
        async with Engine(served, config(served, **more), executor=executor) as engine:
            if isinstance(executor, FaultyExecutor):
                executor.active = True
            weigh_at_random(engine, seed)
            caller = Caller(engine, served, seed)
            await asyncio.wait_for(caller.turns(turns, at_once=5), 300)
            return caller, Counter(engine.status().faults)

    with pretend(seed):
        return asyncio.run(main())


@pytest.mark.parametrize(("seed", "features"), [(0, FEATURES), (1, 0), (2, FEATURES)])
def test_scores_are_right_in_whatever_order_streams_go_on(seed: int, features: int) -> None:
    caller, faults = run(model(seed, features), PretendedCuda(), seed, 150)
    assert not faults
    assert {"RESIDENT", "WAITED", "EXTENDED", "RELOADED", "FULL"} >= set(caller.paths)
    assert {"RESIDENT", "EXTENDED", "RELOADED", "FULL"} <= set(caller.paths), caller.paths


@pytest.mark.parametrize("seed", range(2))
def test_faults_are_misses(seed: int) -> None:
    executor = FaultyExecutor(PretendedCuda(), Faults(refuse=0.05, fail=0.08, fail_after=0.08), seed)
    caller, faults = run(model(seed), executor, seed, 150)
    assert faults["step"]
    assert caller.lost < 10


def test_a_device_that_fetches_something_else_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    from relaygr.kernels import mail_triton

    collect = mail_triton.collect

    def wrong(letters: mail.Mail, inputs: mail.Inputs) -> None:
        collect(letters, inputs)
        inputs.items[:1] += 1

    monkeypatch.setattr(mail_triton, "collect", wrong)
    with pytest.raises(RuntimeError, match="does not fetch the items laid out for it"):
        run(model(), PretendedCuda(), 0, 5)


def test_models_are_swapped_while_steps_are_in_flight() -> None:
    async def main() -> None:
        served = [model(seed) for seed in range(3)]
        async with Engine(served[0], config(served[0]), executor=PretendedCuda()) as engine:
            for number, each in enumerate(served):
                caller = Caller(engine, each, number)
                await caller.turns(30, at_once=5)
                if number < 2:
                    await engine.swap_model(served[number + 1])
            facts = engine.status().prepared
            assert facts["graphs"] >= 15

    with pretend(3):
        asyncio.run(main())
