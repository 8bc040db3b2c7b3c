"""What is launched on a GPU is right whenever the device comes to it: on the CPU, on a device that is pretended."""

import asyncio
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from relaygr.engine import mailbox
from relaygr.engine.cost import CostModel
from relaygr.engine.faults import Faults, FaultyExecutor
from relaygr.engine.step import Executor
from relaygr.engine.trays import Trays
from relaygr.errors import Unavailable
from relaygr.kernels import mail
from relaygr.model import RankingModel
from relaygr.model.config import Family
from relaygr.model.tray import Laid, Tray

require("triton", "pip install relaygr[triton]")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: see test_cuda")

from pretended_cuda import Device, PretendedCuda, pretend  # noqa: E402
from relaygr.kernels import mail_triton  # noqa: E402

ITEMS, ACTIONS, LONGEST, FEATURES = 60, 4, 420, 2


@pytest.fixture(autouse=True)
def cheap_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies pass for free: what is not in device memory is reloaded where it can be."""
    monkeypatch.setattr(CostModel, "copy_s", lambda self, pages: 0.0)


@pytest.fixture(autouse=True)
def trays(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How many are held, none in the end, though nothing is collected that holds itself. What lay on a tray is gone as
    soon as nobody holds it."""
    count = Counter[str]()
    take, give = Laid.__init__, Laid.__del__

    def taken(self: Laid, *args: Any) -> None:
        take(self, *args)
        count["held"] += 1

    def given(self: Laid) -> None:
        self.tray.memory[:] = bytes(len(self.tray.memory))
        count["held"] -= 1
        give(self)

    monkeypatch.setattr(Laid, "__init__", taken)
    monkeypatch.setattr(Laid, "__del__", given)
    gc.collect()
    gc.disable()
    yield count
    gc.enable()


def model(seed: int = 0, features: int = FEATURES, *, epoch: int = 0, family: Family = "hstu") -> RankingModel:
    """Of one dense version for each seed, whatever its epoch: only the tables differ."""
    made = build_model(
        family, layers=3, dim=16, heads=1, items=ITEMS, seed=seed, actions=ACTIONS, tasks=2,
        scale_length=300.0 if family == "hstu" else None, request_features=features, candidate_features=features,
    )  # fmt: skip
    with torch.no_grad():
        made.embedding.table.mul_(1.0 + epoch)
    made.epoch = epoch
    return made


def config(served: RankingModel, **more: Any) -> EngineConfig:
    page = served.layout.bytes
    return EngineConfig(
        device_cache=f"{12 * page}B", host_cache=f"{60 * page}B", max_history=LONGEST, pre_infer_share=1.0, **more
    )


class Caller:
    """Does what callers do, in an order drawn from the seed, and compares every score with a dense float64 oracle."""

    def __init__(self, engine: Engine, served: Sequence[RankingModel], seed: int) -> None:
        """`served`: by epoch."""
        self.engine, self.served = engine, served
        self.paths: Counter[str] = Counter()
        self.epochs: Counter[int] = Counter()
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
        count, wide = (
            int(draw.choice([1, 3, 16, 30], p=[0.3, 0.4, 0.25, 0.05])),
            self.served[0].config.candidate_features,
        )
        features = draw.random((count, wide), np.float32) if wide and draw.random() < 0.5 else None
        request = draw.random(wide, np.float32) if wide and draw.random() < 0.5 else None
        candidates = Candidates(draw.integers(0, ITEMS * 2, count), features)
        answer = engine.begin_rank(user, history, candidates, request=request)
        if draw.random() < 0.1:
            for _ in range(draw.integers(0, 20)):
                await asyncio.sleep(0)
            answer.cancel()
        try:
            ranked = await answer
        except asyncio.CancelledError:
            return
        except Unavailable:  # the device failed again and again: said, not hidden
            self.lost += 1
            return
        self.paths[ranked.path] += 1
        self.epochs[ranked.epoch] += 1
        served = self.served[ranked.epoch]
        assert_scores(ranked.scores, oracle_scores(served, history, candidates, request=request))

    async def turns(self, count: int, at_once: int) -> None:
        async def work() -> None:
            for _ in range(count // at_once):
                await self.turn()

        await asyncio.gather(*(work() for _ in range(at_once)))


def run(
    served: RankingModel, executor: Executor, seed: int, turns: int, refuses: float = 0.0
) -> tuple[Caller, Counter[str]]:
    """What callers saw, and the device's faults."""

    async def main(device: Device) -> tuple[Caller, Counter[str]]:
        if isinstance(executor, FaultyExecutor):
            executor.active = False
        async with Engine(served, config(served), executor=executor) as engine:
            if isinstance(executor, FaultyExecutor):
                executor.active = True
            device.refuses = refuses
            weigh_at_random(engine, seed)
            caller = Caller(engine, [served], seed)
            await asyncio.wait_for(caller.turns(turns, at_once=5), 300)
            return caller, Counter(engine.status().faults)

    with pretend(seed) as device:
        return asyncio.run(main(device))


@pytest.mark.parametrize(
    ("seed", "features", "family"), [(0, FEATURES, "hstu"), (1, 0, "hstu"), (2, FEATURES, "softmax")]
)
def test_scores_are_right_in_whatever_order_streams_go_on(
    seed: int, features: int, family: Family, trays: Counter[str]
) -> None:
    caller, faults = run(model(seed, features, family=family), PretendedCuda(), seed, 150)
    assert not faults
    assert {"RESIDENT", "WAITED", "EXTENDED", "RELOADED", "FULL"} >= set(caller.paths)
    assert {"RESIDENT", "EXTENDED", "RELOADED", "FULL"} <= set(caller.paths), caller.paths
    del caller
    assert trays["held"] == 0


@pytest.mark.parametrize("seed", range(2))
def test_faults_are_misses(seed: int) -> None:
    executor = FaultyExecutor(PretendedCuda(), Faults(refuse=0.05, fail=0.08, fail_after=0.08), seed)
    caller, faults = run(model(seed), executor, seed, 150)
    assert faults["step"]
    assert caller.lost < 10


@pytest.mark.parametrize("seed", range(2))
def test_what_was_posted_and_not_launched_is_a_miss_and_lets_go_of_its_trays(seed: int, trays: Counter[str]) -> None:
    caller, faults = run(model(seed), PretendedCuda(), seed, 150, refuses=0.08)
    assert faults["step"] >= 5
    assert caller.lost < 10
    del caller
    assert trays["held"] == 0


def test_letters_are_not_written_over_before_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "LETTERS", 1)
    monkeypatch.setattr(mailbox, "LETTERS", 1)
    monkeypatch.setattr(mail_triton, "_LETTERS", 1)
    _, faults = run(model(), PretendedCuda(), 0, 100)
    assert not faults


@pytest.mark.parametrize("fits", [0, 1, 6])
def test_ranks_are_answered_where_memory_to_pin_is_short(fits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From when the engine has opened on."""
    pin, opened = Trays._pin, False

    def some(self: Trays, rows: int, free: list[Tray], most_bytes: float) -> bool:
        if not opened:
            return pin(self, rows, free, most_bytes)
        return False

    async def main() -> None:
        nonlocal opened
        served = model()
        async with Engine(served, config(served), executor=PretendedCuda()) as engine:
            assert engine._loop is not None
            trays = engine._loop.served.trays
            assert trays is not None
            for _, free in trays._free:
                del free[fits:]
            opened = True
            caller = Caller(engine, [served], fits)
            await asyncio.wait_for(caller.turns(80, at_once=8), 300)
            assert not engine.status().faults
            assert not caller.lost

    monkeypatch.setattr(Trays, "_pin", some)
    with pretend(fits):
        asyncio.run(main())


def test_a_device_with_nothing_to_pin_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trays, "_pin", lambda self, rows, free, most_bytes: False)
    with pytest.raises(RuntimeError, match="no memory can be pinned for what is to be scored"):
        run(model(), PretendedCuda(), 0, 5)


Spoil = Callable[[mail.Inputs], object]


@pytest.mark.parametrize(
    ("part", "spoil", "candidate_features"),
    [
        ("starts", lambda inputs: inputs.starts[:1].add_(1), FEATURES),
        ("cached", lambda inputs: inputs.cached.clamp_(max=100), FEATURES),
        ("positions", lambda inputs: inputs.positions.zero_(), FEATURES),
        ("table", lambda inputs: inputs.table[:, 2:].zero_(), FEATURES),
        ("items", lambda inputs: inputs.items[:1].add_(1), FEATURES),
        ("dense", lambda inputs: inputs.dense.zero_() if inputs.dense is not None else None, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layers", [False, True])
def test_a_device_that_fetches_something_else_does_not_open(
    part: str, spoil: Spoil, candidate_features: int, layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether launches are whole or by layers: the second of each check is."""
    collect, calls = mail_triton.collect, 0

    def wrong(letters: mail.Mail, inputs: mail.Inputs) -> None:
        nonlocal calls
        collect(letters, inputs)
        if inputs.starts[-1]:  # not while it is captured, with nobody there
            calls += 1
            if calls > layers:
                spoil(inputs)

    served = build_model(
        "hstu", layers=2, dim=16, heads=1, items=ITEMS, seed=0, actions=ACTIONS, scale_length=300.0,
        request_features=2, candidate_features=candidate_features,
    )  # fmt: skip
    monkeypatch.setattr(mail_triton, "collect", wrong)
    with pytest.raises(RuntimeError, match=f"does not fetch the {part} laid out for it"):
        run(served, PretendedCuda(), 0, 5)


def test_models_are_swapped_under_load(trays: Counter[str]) -> None:
    async def main() -> None:
        served = [model(epoch=epoch) for epoch in range(3)]
        async with Engine(served[0], config(served[0]), executor=PretendedCuda()) as engine:
            caller, swapped = Caller(engine, served, 3), False

            async def work() -> None:
                while not swapped:
                    await caller.turn()

            load = [asyncio.create_task(work()) for _ in range(5)]
            for epoch in range(3):
                if epoch:
                    await engine.swap_model(served[epoch])
                while caller.epochs[epoch] < 25 and not any(task.done() for task in load):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            swapped = True
            await asyncio.wait_for(asyncio.gather(*load), 300)
            assert min(caller.epochs[epoch] for epoch in range(3)) >= 25
            assert not engine.status().faults

    with pretend(3):
        asyncio.run(main())
    assert trays["held"] == 0
