"""Real models on real threads: many callers at once, and every score is the oracle's."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from oracle import assert_scores, oracle_scores
from paged import random_history
from relaygr import Candidates, Engine, EngineConfig, History, Path, PreInferOutcome, build_model
from relaygr.engine.torch_executor import TorchExecutor
from relaygr.errors import InvalidInput
from relaygr.model import RankingModel

CONTEXT = np.array([3, 1, 4])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices run many times faster without a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model(seed: int = 1, **arguments: Any) -> RankingModel:
    choices = {"family": "hstu", "layers": 2, "dim": 16, "heads": 2, "items": 60, "actions": 8, "tasks": 2}
    choices |= {"request_features": 2, "candidate_features": 1}
    choices |= arguments
    return build_model(choices.pop("family"), seed=seed, **choices)  # type: ignore[arg-type]


def engine(served: RankingModel, *, pages: int = 12, host: int = 30, **config: Any) -> Engine:
    size = served.layout.bytes
    settings: dict[str, Any] = {"max_history": 300, "lease_share": 1.0, "pre_infer_share": 1.0}
    sizes = {"device_cache": f"{pages * size}B", "host_cache": f"{host * size}B"}
    return Engine(served, EngineConfig(**(settings | sizes | config)))


def refreshed(old: RankingModel, *, epoch: int) -> RankingModel:
    """The same dense weights with other tables."""
    new = model()
    new.load_state_dict(old.state_dict())
    with torch.no_grad():
        new.get_parameter("embedding.table").add_(1.0)
    new.epoch = epoch
    return new


class Caller:
    """Asks an engine, and compares with the oracle."""

    def __init__(self, served: RankingModel, asked: Engine, seed: int = 0) -> None:
        self.model, self.engine = served, asked
        self.random = np.random.default_rng(seed)
        self.paths: Counter[str] = Counter()

    def history(self, length: int) -> History:
        return random_history(self.random, length)

    async def rank(self, user: str, history: History, **arguments: Any) -> Path:
        served, draw = self.model, self.random
        candidates = Candidates(draw.integers(0, 100, 5), draw.normal(size=(5, 1)))
        request = draw.normal(size=2).astype(np.float32)
        ranked = await self.engine.rank(user, history, candidates, context=CONTEXT, request=request, **arguments)
        assert ranked.used == len(history)
        assert_scores(ranked.scores, oracle_scores(served, history, candidates, context=CONTEXT, request=request))
        self.paths[ranked.path] += 1
        return ranked.path

    async def pre_infer(self, user: str, history: History) -> PreInferOutcome:
        return await self.engine.pre_infer(user, history, context=CONTEXT)


@pytest.mark.parametrize("family", ["hstu", "softmax"])
def test_many_callers_of_few_users_get_the_scores_of_the_oracle(family: str) -> None:
    """In a pool so small that they push each other out, with histories that grow, diverge and are corrected."""

    async def main() -> Counter[str]:
        served = model(family=family)
        async with engine(served, pages=9) as asked:
            caller = Caller(served, asked)
            histories = {f"user {k}": caller.history(length) for k, length in enumerate((20, 130, 200, 250, 128))}

            async def visits(user: str) -> None:
                base = histories[user]
                for visit in range(6):
                    new = caller.history(5)
                    times = np.full(5, int(base.timestamps[-1]))
                    grown = base.append(new.items, new.actions, times)
                    await asyncio.gather(
                        caller.pre_infer(user, base),
                        caller.rank(user, base),
                        caller.rank(user, base),
                        caller.rank(user, grown),
                    )
                    base = grown if visit % 3 else History(base.items ^ 1, base.actions, base.timestamps)

            await asyncio.gather(*(visits(user) for user in histories))
            return caller.paths

    paths = asyncio.run(main())
    assert sum(paths.values()) == 5 * 6 * 3
    assert paths[Path.FULL]
    assert paths[Path.EXTENDED]
    assert paths[Path.WAITED]


def test_every_path_of_a_real_engine_gives_the_scores_of_the_oracle() -> None:
    async def main() -> None:
        served = model()
        async with engine(served, pages=8) as asked:
            caller = Caller(served, asked)
            history = caller.history(300)
            assert await caller.rank("u1", history[:290]) is Path.FULL
            assert await caller.rank("u1", history[:290]) is Path.RESIDENT
            assert await caller.rank("u1", history) is Path.EXTENDED
            for k in range(4):
                await caller.rank(f"other {k}", caller.history(300))
            assert await caller.rank("u1", history) in (Path.RELOADED, Path.FULL), "as the machine's speed has it"
            assert await caller.pre_infer("u2", history) is PreInferOutcome.COMPUTED
            assert await caller.rank("u2", history) is Path.RESIDENT
            both = await asyncio.gather(*(caller.rank("cat", history) for _ in range(2)))
            assert both == [Path.FULL, Path.WAITED]

    asyncio.run(main())


def test_ranks_that_run_during_a_swap_are_scored_by_the_model_they_began_with() -> None:
    async def main() -> None:
        models = [model(seed) for seed in range(1, 6)]
        async with engine(models[0]) as asked:
            callers = [Caller(served, asked, seed) for seed, served in enumerate(models)]
            history = callers[0].history(300)
            tasks = []
            for caller in callers:
                if caller is not callers[0]:
                    await asked.swap_model(caller.model)
                tasks += [asyncio.create_task(caller.rank(f"user {k % 3}", history)) for k in range(6)]
                await asyncio.sleep(0)
            await asyncio.gather(*tasks)
            assert asked.status().version == models[-1].version()

    asyncio.run(main())


def test_of_swaps_at_once_the_last_is_served() -> None:
    async def main() -> None:
        models = [model(seed) for seed in range(1, 9)]
        async with engine(models[0]) as asked:
            await asyncio.gather(*(asked.swap_model(served) for served in models[1:]))
            caller = Caller(models[-1], asked)
            assert await caller.rank("u1", caller.history(100)) is Path.FULL

    asyncio.run(main())


@pytest.mark.parametrize("other", [{"layers": 3}, {"heads": 1}, {"head_dim": 4}])
def test_a_model_with_pages_of_another_shape_is_refused(other: dict[str, Any]) -> None:
    async def main() -> None:
        served = model()
        async with engine(served) as asked:
            caller = Caller(served, asked)
            history = caller.history(100)
            await caller.rank("u1", history)
            with pytest.raises(InvalidInput, match=r"^model: has pages of"):
                await asked.swap_model(model(**other))
            with pytest.raises(InvalidInput, match=r"^model: "):
                await asked.swap_model("hstu")  # type: ignore[arg-type]
            assert await caller.rank("u1", history) is Path.RESIDENT

    asyncio.run(main())


def test_tables_that_changed_while_their_epoch_did_not_are_refused() -> None:
    async def main() -> None:
        served = model()
        async with engine(served) as asked:
            caller = Caller(served, asked)
            history = caller.history(100)
            await caller.rank("u1", history)
            with pytest.raises(InvalidInput, match=r"^epoch: "):
                await asked.swap_model(refreshed(served, epoch=0))
            assert await caller.rank("u1", history) is Path.RESIDENT
            same = model()
            await asked.swap_model(same)
            assert await Caller(same, asked).rank("u1", history) is Path.RESIDENT
            new = refreshed(served, epoch=1)
            await asked.swap_model(new)
            assert await Caller(new, asked).rank("u1", history) is Path.FULL

    asyncio.run(main())


def test_a_swap_that_was_cancelled_is_not_compared_with() -> None:
    """Changed tables are held against the model that is served."""

    async def main() -> None:
        served = model()
        async with engine(served) as asked:
            caller = Caller(served, asked)
            history = caller.history(100)
            await caller.rank("u1", history)
            swap = asyncio.create_task(asked.swap_model(model(seed=2)))
            await asyncio.sleep(0)
            swap.cancel()
            await asyncio.gather(swap, return_exceptions=True)
            with pytest.raises(InvalidInput, match=r"^epoch: "):
                await asked.swap_model(refreshed(served, epoch=0))
            assert await caller.rank("u1", history) is Path.RESIDENT

    asyncio.run(main())


def test_a_device_that_prepares_is_waited_for_though_that_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hears that it ended may close the device, and its thread cannot be stopped."""
    go, ended = threading.Event(), threading.Event()
    prepare = TorchExecutor._prepare

    def slowly(self: TorchExecutor, served: RankingModel) -> Any:
        assert go.wait(60)
        result = prepare(self, served)
        ended.set()
        return result

    async def main() -> None:
        served, executor = model(), TorchExecutor()
        executor.open(served, EngineConfig(device_cache="1MiB", host_cache="0", max_history=300))
        monkeypatch.setattr(TorchExecutor, "_prepare", slowly)
        task = asyncio.create_task(executor.prepare(served))
        for _ in range(2):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()
        executor.close()

    asyncio.run(main())


def test_a_prefix_of_older_tables_serves_where_that_is_allowed_and_the_answer_says_so() -> None:
    async def main() -> None:
        served = model()
        async with engine(served, accept_epochs=1) as asked:
            history = Caller(served, asked).history(100)
            before = await asked.rank("u1", history, [1, 2])
            await asked.swap_model(refreshed(served, epoch=1))
            after = await asked.rank("u1", history, [1, 2])
            assert (before.path, after.path) == (Path.FULL, Path.RESIDENT)
            assert (before.epoch, after.epoch) == (0, 0)
            assert not np.array_equal(before.scores, after.scores), "candidates are read from the new tables"
            anew = await asked.rank("u2", history, [1, 2])
            assert (anew.path, anew.epoch) == (Path.FULL, 1)

    asyncio.run(main())


def test_a_real_engine_can_be_opened_again() -> None:
    async def main() -> None:
        served = model()
        asked = engine(served)
        caller = Caller(served, asked)
        history = caller.history(100)
        for _ in range(2):
            async with asked:
                assert await caller.rank("u1", history) is Path.FULL
                assert await caller.rank("u1", history) is Path.RESIDENT

    asyncio.run(main())


def test_closing_a_real_engine_ends_every_call_and_its_threads() -> None:
    async def main() -> None:
        served = model()
        async with engine(served) as asked:
            caller = Caller(served, asked)
            calls = [asyncio.create_task(caller.rank(f"user {k}", caller.history(300))) for k in range(20)]
            await asyncio.sleep(0)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer).__name__ for answer in answers} <= {"Unavailable", "Path"}
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("relaygr-")]

    asyncio.run(main())


def test_a_model_in_half_precision_is_near_the_oracle() -> None:
    async def main() -> None:
        served = model()
        async with engine(served, dtype="float16", pages=20) as asked:
            caller = Caller(served, asked)
            history = caller.history(200)
            items = np.arange(5)
            full = await asked.rank("u1", history, items)
            resident = await asked.rank("u1", history, items)
            assert (full.path, resident.path) == (Path.FULL, Path.RESIDENT)
            right = oracle_scores(served, history, items)
            for ranked in (full, resident):
                assert ranked.scores.dtype == np.float32
                assert np.abs(ranked.scores - right).max() <= 0.02 * max(1.0, float(np.abs(right).max()))
            assert served.layout.dtype is torch.float32, "the caller's model is left as it was"

    asyncio.run(main())


def test_an_epoch_that_comes_back_with_other_tables_is_refused() -> None:
    async def main() -> None:
        first = model()
        async with engine(first, accept_epochs=1) as served:
            await served.swap_model(refreshed(first, epoch=1))
            await served.swap_model(first)
            with pytest.raises(InvalidInput, match="epoch"):
                await served.swap_model(refreshed(first, epoch=0))

    asyncio.run(main())
