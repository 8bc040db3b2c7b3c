"""The engine on a GPU, in bf16: whatever is cached, copied, replayed or lost, scores are those of full inference.

Run by hand where there is a GPU: pytest -m gpu. What is allowed is what bf16 itself costs: the largest difference
between full inference in bf16 and in float32, over the same requests.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engines import weigh_at_random
from relaygr import Candidates, Engine, EngineConfig, History, build_model
from relaygr.engine import pinned
from relaygr.engine.cost import CostModel
from relaygr.engine.faults import Faults, FaultyExecutor
from relaygr.engine.torch_executor import TorchExecutor
from relaygr.errors import Unavailable
from relaygr.model import RankingModel
from relaygr.model.config import Family
from relaygr.model.inputs import NO_CONTEXT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

ITEMS, ACTIONS, LONGEST, FEATURES = 2000, 8, 1600, 3


@pytest.fixture(autouse=True)
def cheap_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies pass for free: a GPU computes models as small as these faster than it reloads them, and would not."""
    monkeypatch.setattr(CostModel, "copy_s", lambda self, pages: 0.0)


def model(family: Family = "hstu", *, epoch: int = 0, seed: int = 0) -> RankingModel:
    """Of one dense version, whatever its epoch: only the tables differ."""
    made = build_model(
        family, layers=3, dim=128, heads=2, items=ITEMS, seed=seed, actions=ACTIONS, tasks=2,
        scale_length=float(LONGEST) if family == "hstu" else None, request_features=2, candidate_features=FEATURES,
    )  # fmt: skip
    if epoch:
        draw = torch.Generator().manual_seed(epoch)
        with torch.no_grad():
            made.embedding.table.add_(torch.randn(made.embedding.table.shape, generator=draw), alpha=0.5)
        made.epoch = epoch
    return made


def config(
    *, dtype: str = "bfloat16", pages: int = 32, host: int = 120, longest: int = LONGEST, **more: Any
) -> EngineConfig:
    page = 3 * 2 * 128 * 128 * (4 if dtype == "float32" else 2)
    sizes: dict[str, Any] = {"device_cache": f"{pages * page}B", "host_cache": f"{host * page}B"}
    return EngineConfig(device="cuda", dtype=dtype, max_history=longest, pre_infer_share=1.0, **sizes, **more)


@dataclass
class Asked:
    """One rank and its answer."""

    history: History
    candidates: Candidates
    request: npt.NDArray[np.float32] | None
    context: npt.NDArray[np.int64]
    epoch: int = 0
    scores: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))


class Caller:
    """Does what callers do, in an order drawn from the seed, and keeps every answer."""

    def __init__(self, engine: Engine, seed: int, users: int) -> None:
        self.engine = engine
        self.answers: list[Asked] = []
        self.paths: Counter[str] = Counter()
        self.lost = 0
        self._draw = np.random.default_rng(seed)
        self._histories = {f"u{k}": self._behaviours(int(self._draw.integers(0, 900))) for k in range(users)}
        self._contexts = {user: self._draw.integers(0, 50, self._draw.integers(0, 3)) for user in self._histories}

    def _behaviours(self, count: int) -> History:
        draw = self._draw
        return History(
            draw.integers(0, ITEMS * 2, count),
            draw.integers(0, ACTIONS, count),
            np.sort(draw.integers(0, 10**6, count)),
        )

    def _grow(self, user: str) -> None:
        history, count = self._histories[user], int(self._draw.choice([1, 3, 40, 200]))
        if len(history) + count <= LONGEST:
            more = self._behaviours(count)
            last = int(history.timestamps[-1]) if len(history) else 0
            self._histories[user] = history.append(more.items, more.actions, last + more.timestamps)

    def _correct(self, user: str) -> None:
        history = self._histories[user]
        if len(history):
            cut = int(self._draw.integers(0, len(history)))
            items = history.items.copy()
            items[cut] = (items[cut] + 1) % ITEMS
            self._histories[user] = History(items, history.actions, history.timestamps)

    async def turn(self) -> None:
        draw, engine = self._draw, self.engine
        user = str(draw.choice(list(self._histories)))
        context = self._contexts[user]
        kind = draw.choice(
            ["rank", "pre_infer", "relay", "grow", "correct", "evict"], p=[0.5, 0.1, 0.2, 0.14, 0.03, 0.03]
        )
        if kind == "grow":
            self._grow(user)
        elif kind == "correct":
            self._correct(user)
        elif kind == "evict":
            await engine.evict(user)
        history = self._histories[user]
        if kind in ("pre_infer", "relay"):
            await engine.pre_infer(user, history, context=context)
        if kind != "pre_infer":
            count = int(draw.choice([1, 7, 128, 300, 700, 2500], p=[0.1, 0.2, 0.3, 0.25, 0.1, 0.05]))
            features = draw.random((count, FEATURES), np.float32) if draw.random() < 0.5 else None
            asked = Asked(
                history,
                Candidates(draw.integers(0, ITEMS, count), features),
                draw.random(2, np.float32) if draw.random() < 0.5 else None,
                context,
            )
            try:
                ranked = await engine.rank(user, history, asked.candidates, context=context, request=asked.request)
            except Unavailable:  # the device failed again and again: said, not hidden
                self.lost += 1
                return
            assert ranked.used == len(history)
            asked.epoch, asked.scores = ranked.epoch, ranked.scores
            self.answers.append(asked)
            self.paths[ranked.path] += 1

    async def turns(self, count: int, at_once: int) -> None:
        async def work() -> None:
            while self._left > 0:
                self._left -= 1
                await self.turn()

        self._left = count
        await asyncio.gather(*(work() for _ in range(at_once)))


async def in_full(engine: Engine, asked: Asked) -> npt.NDArray[np.float32]:
    """The same request with nothing cached."""
    await engine.evict("in full")
    ranked = await engine.rank("in full", asked.history, asked.candidates, context=asked.context, request=asked.request)
    assert ranked.path == "FULL"
    return ranked.scores


async def assert_exact(engine: Engine, answers: list[Asked], models: dict[int, RankingModel]) -> None:
    """Against full inference, one request at a time, by the engine that gave the answers and by one in float32."""
    worst = allowed = 0.0
    for epoch, served in models.items():
        if engine.status().epoch != epoch:
            await engine.swap_model(served)
        async with Engine(served, config(dtype="float32", host=0)) as exact:
            for asked in answers:
                if asked.epoch == epoch:
                    half, single = await in_full(engine, asked), await in_full(exact, asked)
                    allowed = max(allowed, float(np.abs(half - single).max()))
                    worst = max(worst, float(np.abs(asked.scores - half).max()))
    assert worst <= allowed, f"{len(answers)} ranks: worst {worst:.2e}, allowed {allowed:.2e}"


def run(main: Awaitable[None]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(main, 300)

    asyncio.run(whole())


@pytest.mark.parametrize("family", ["hstu", "softmax"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("canary", [False, True])
def test_random_interleavings_give_the_scores_of_full_inference(family: Family, seed: int, canary: bool) -> None:
    async def main() -> None:
        served = model(family)
        async with Engine(served, config(canary=canary)) as engine:
            if seed:  # heads go, too
                weigh_at_random(engine, seed)
            caller = Caller(engine, seed, users=12)
            await caller.turns(300, at_once=8)
            status = engine.status()
            assert status.faults == {}
            assert bool(seed) <= bool(status.device_shortened)
            assert {"RESIDENT", "EXTENDED", "RELOADED", "FULL"} <= set(caller.paths), caller.paths
            await assert_exact(engine, caller.answers, {0: served})

    run(main())


@pytest.mark.parametrize("seed", range(2))
def test_faults_are_misses(seed: int) -> None:
    async def main() -> None:
        served = model()
        device = FaultyExecutor(TorchExecutor(), Faults(refuse=0.04, fail=0.08, fail_after=0.08), seed)
        device.active = False
        async with Engine(served, config(), executor=device) as engine:
            weigh_at_random(engine, seed)
            device.active = True
            caller = Caller(engine, seed, users=12)
            await caller.turns(300, at_once=8)
            assert sum(engine.status().faults.values()) >= 5, engine.status().faults
            device.active = False
            assert caller.lost < len(caller.answers) / 20
            await assert_exact(engine, caller.answers, {0: served})

    run(main())


@pytest.mark.parametrize("family", ["hstu", "softmax"])
def test_models_are_swapped_under_load(family: Family) -> None:
    """A model that is captured while another serves must not reach into what that one computes."""

    async def main() -> None:
        models = {epoch: model(family, epoch=epoch) for epoch in range(5)}
        async with Engine(models[0], config()) as engine:
            caller, swapped = Caller(engine, 5, users=12), False

            async def work() -> None:
                while not swapped:
                    await caller.turn()

            load = [asyncio.create_task(work()) for _ in range(8)]
            for epoch in list(models)[1:]:
                await engine.swap_model(models[epoch])
            swapped = True
            await asyncio.gather(*load)
            answers = {epoch: [asked for asked in caller.answers if asked.epoch == epoch] for epoch in models}
            assert all(answers[epoch] for epoch in range(4)), Counter(asked.epoch for asked in caller.answers)
            await assert_exact(engine, [asked for each in answers.values() for asked in each[-300:]], models)

    run(main())


def test_prefixes_come_back_whole_from_memory_that_was_pinned_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_CHUNK_BYTES", 5 * 3 * 2 * 128 * 128 * 2)  # of five pages

    async def main() -> None:
        served, draw = model(), np.random.default_rng(8)
        async with Engine(served, config()) as engine:
            histories = [Caller(engine, seed, users=0)._behaviours(1200 + 60 * seed) for seed in range(6)]
            answers, paths = [], Counter[str]()
            for _ in range(3):  # the device has room for two of them or three
                for user, history in enumerate(histories):
                    asked = Asked(history, Candidates(draw.integers(0, ITEMS, 64)), None, NO_CONTEXT)
                    ranked = await engine.rank(f"u{user}", history, asked.candidates)
                    asked.scores = ranked.scores
                    answers.append(asked)
                    paths[ranked.path] += 1
                    while engine.status().write_back_waiting or engine.status().copies_in_flight:  # noqa: ASYNC110
                        await asyncio.sleep(1e-3)
            assert paths["RELOADED"] >= 6, (paths, engine.status())
            assert engine.status().faults == {}
            await assert_exact(engine, answers, {0: served})

    run(main())


def test_engines_of_one_process_do_not_reach_into_each_other() -> None:
    """One serves while others open, capture and close beside it, and captures, too, while they serve."""

    async def main() -> None:
        models = {epoch: model(epoch=epoch) for epoch in range(3)}
        others: list[tuple[RankingModel, list[Asked]]] = []
        async with Engine(models[0], config()) as engine:
            caller, over = Caller(engine, 6, users=12), False

            async def work() -> None:
                while not over:
                    await caller.turn()

            async def beside(family: Family, seed: int) -> None:
                served, before = model(family, seed=seed), len(caller.answers)
                async with Engine(served, config()) as other:
                    assert len(caller.answers) > before, "nothing was answered while it opened"
                    asking = Caller(other, seed, users=6)
                    await asking.turns(60, at_once=4)
                    await other.swap_model(model(family, seed=seed, epoch=1))
                    others.append((served, [asked for asked in asking.answers if asked.epoch == 0]))

            load = [asyncio.create_task(work()) for _ in range(6)]
            await asyncio.gather(beside("softmax", 1), beside("hstu", 2), engine.swap_model(models[1]))
            await asyncio.gather(beside("hstu", 3), engine.swap_model(models[2]))
            over = True
            await asyncio.gather(*load)
            of = {epoch: [asked for asked in caller.answers if asked.epoch == epoch][-300:] for epoch in models}
            await assert_exact(engine, [asked for each in of.values() for asked in each], models)
        for served, answers in others:
            async with Engine(served, config()) as again:
                await assert_exact(again, answers, {0: served})

    run(main())


@pytest.mark.parametrize("family", ["hstu", "softmax"])
def test_tables_in_host_memory_give_the_same_scores(family: Family) -> None:
    async def main() -> None:
        served = model(family)
        async with Engine(served, config(tables="host")) as engine:
            caller = Caller(engine, 3, users=12)
            await caller.turns(200, at_once=8)
            await assert_exact(engine, caller.answers, {0: served})

    run(main())


def test_long_histories_are_the_same_in_whatever_pieces_they_run() -> None:
    """Several at once, in steps of many and of few chunks, which are cut by rounds of the device."""
    lengths = (9_000, 20_500, 43_000)

    async def main() -> None:
        served = build_model("hstu", layers=3, dim=128, heads=2, items=ITEMS, seed=0, scale_length=40_000.0)
        draw = np.random.default_rng(0)
        histories = [History(draw.integers(0, ITEMS, n), draw.integers(0, 8, n), np.arange(n) * 60) for n in lengths]
        items = draw.integers(0, ITEMS, 99)

        async def scores(dtype: str, step_ms: float) -> npt.NDArray[np.float32]:
            wanted = config(dtype=dtype, pages=700, host=0, longest=45_000, step_ms=step_ms)
            async with Engine(served, wanted) as engine:
                ranked = await asyncio.gather(*(engine.rank(f"u{len(each)}", each, items) for each in histories))
                assert engine.status().faults == {}
                return np.stack([each.scores for each in ranked])

        exact = await scores("float32", 50.0)
        whole, cut = await scores("bfloat16", 1000.0), await scores("bfloat16", 0.3)
        noise = float(np.abs(whole - exact).max())
        assert noise < 0.1 * exact.std(), f"{noise:.2e} off, where scores differ by {exact.std():.2e}"
        assert np.abs(cut - whole).max() <= noise

    run(main())


def test_what_is_too_large_to_replay_scores_alike() -> None:
    async def main() -> None:
        served = model()
        draw = np.random.default_rng(0)
        async with Engine(served, config()) as engine:
            caller = Caller(engine, 0, users=1)
            history, items = caller._behaviours(1500), draw.integers(0, ITEMS, 3000)
            together = (await engine.rank("u1", history, items)).scores
            parts = [(await engine.rank("u1", history, part)).scores for part in np.split(items, 5)]
            assert np.abs(together - np.concatenate(parts)).max() <= 2e-2 * np.abs(together).max()

    run(main())


def test_a_spoiled_page_is_noticed_and_computed_again() -> None:
    async def main() -> None:
        served = model()
        executor = TorchExecutor()
        async with Engine(served, config(canary=True), executor=executor) as engine:
            caller = Caller(engine, 0, users=1)
            history, items = caller._behaviours(700), np.arange(100)
            right = (await engine.rank("u1", history, items)).scores
            executor._runner.pages[:, 1, 0, 5, 0, 3] += 1  # type: ignore[attr-defined]
            torch.cuda.synchronize()
            again = await engine.rank("u1", history, items)
            assert again.path == "FULL"
            assert np.array_equal(again.scores, right)
            assert engine.status().faults["step"] >= 1

    run(main())


def test_the_device_gives_its_memory_back() -> None:
    async def main() -> None:
        async with Engine(model(), config()) as engine:
            await engine.rank("u1", Caller(engine, 0, users=1)._behaviours(300), np.arange(10))

    for _ in range(3):
        run(main())
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    run(main())
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before
