"""What callers do wrong is said by name and leaves nothing behind; an engine that is not open says so."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from behaviours import numbered
from engines import PAGE_BYTES, WatchedDevice, in_virtual_time, opened
from relaygr import Candidates, Engine, EngineConfig, History, Path, PreInferOutcome, Ranked, build_model
from relaygr.clock import VirtualClock, VirtualTimeLoop
from relaygr.engine.simulated import SimulatedModel
from relaygr.errors import DeadlineExceeded, InvalidInput, Overloaded, Unavailable

GOOD: dict[str, Any] = {"user": "u1", "history": numbered(10), "candidates": np.arange(3)}

BAD_FOR_BOTH: list[tuple[str, dict[str, Any]]] = [
    ("user", {"user": b"u1"}),
    ("user", {"user": 7}),
    ("user", {"user": None}),
    ("user", {"user": ""}),
    ("history", {"history": None}),
    ("history", {"history": [1, 2, 3]}),
    ("history", {"history": numbered(401)}),
    ("actions", {"history": History([1], [16], [0])}),
    ("context", {"context": np.arange(65)}),
    ("context", {"context": [-1]}),
    ("context", {"context": [1.5]}),
    ("context", {"context": np.zeros((2, 2), np.int64)}),
    ("context", {"context": "u1"}),
    ("deadline", {"deadline": True}),
    ("deadline", {"deadline": math.nan}),
    ("deadline", {"deadline": math.inf}),
    ("deadline", {"deadline": "soon"}),
    ("deadline", {"deadline": 10**400}),
]
BAD_FOR_RANK: list[tuple[str, dict[str, Any]]] = [
    ("candidates", {"candidates": []}),
    ("candidates", {"candidates": np.empty(0, np.int64)}),
    ("candidates", {"candidates": None}),
    ("candidates", {"candidates": [1.0, 2.0]}),
    ("candidates", {"candidates": np.arange(3, dtype=np.float32)}),
    ("candidates", {"candidates": [3, -1]}),
    ("candidates", {"candidates": np.arange(4).reshape(2, 2)}),
    ("candidates", {"candidates": ["a"]}),
    ("candidates", {"candidates": np.array([2**63], np.uint64)}),
    ("features", {"candidates": lambda: Candidates([1, 2], np.ones((2, 3)))}),
    ("features", {"candidates": lambda: Candidates([1, 2], np.ones((1, 2)))}),
    ("features", {"candidates": lambda: Candidates([1, 2], np.full((2, 2), np.nan))}),
    ("request", {"request": [1.0, 2.0]}),
    ("request", {"request": [1.0, 2.0, math.nan]}),
    ("request", {"request": [[1.0, 2.0, 3.0]]}),
    ("request", {"request": "now"}),
    ("request", {"request": [1.0, 2.0, 1e300]}),
]


def reading_all() -> SimulatedModel:
    """A model that reads three features of a request and two of a candidate."""
    model = SimulatedModel()
    fields = model.config.to_dict() | {"request_features": 3, "candidate_features": 2}
    model.config = type(model.config)(**fields)
    return model


async def rank_with(engine: Engine, arguments: dict[str, Any]) -> None:
    await engine.rank(**{name: value() if callable(value) else value for name, value in arguments.items()})


@pytest.mark.parametrize(("field", "wrong"), BAD_FOR_BOTH + BAD_FOR_RANK)
@in_virtual_time
async def test_bad_input_of_a_rank_is_named_and_leaves_nothing_behind(field: str, wrong: dict[str, Any]) -> None:
    async with opened(model=reading_all()) as bench:
        before = bench.engine.status()
        with pytest.raises(InvalidInput, match=f"^{field}: ") as caught:
            await rank_with(bench.engine, GOOD | wrong)
        assert caught.value.field == field
        assert bench.engine.status() == before


@pytest.mark.parametrize(("field", "wrong"), BAD_FOR_BOTH)
@in_virtual_time
async def test_bad_input_of_a_pre_infer_is_named_and_leaves_nothing_behind(field: str, wrong: dict[str, Any]) -> None:
    async with opened() as bench:
        before = bench.engine.status()
        arguments = GOOD | wrong
        del arguments["candidates"]
        with pytest.raises(InvalidInput, match=f"^{field}: "):
            await bench.engine.pre_infer(**arguments)
        assert bench.engine.status() == before


@pytest.mark.parametrize("columns", [([-1], [0], [0]), ([1], [-1], [0]), ([1.5], [0], [0]), ([1, 2], [0, 0], [9, 3])])
def test_a_history_that_cannot_be_is_refused_before_it_reaches_an_engine(columns: tuple[Any, Any, Any]) -> None:
    with pytest.raises(InvalidInput):
        History(*columns)


@pytest.mark.parametrize("ago", [0.0, 0.001, 1000.0])
@in_virtual_time
async def test_a_deadline_in_the_past_is_exceeded_at_once(ago: float) -> None:
    async with opened() as bench:
        await asyncio.sleep(1.0)
        before, now = bench.engine.status(), bench.now
        with pytest.raises(DeadlineExceeded):
            await bench.engine.rank("u1", numbered(10), [1], deadline=now - ago)
        with pytest.raises(DeadlineExceeded):
            await bench.engine.pre_infer("u1", numbered(10), deadline=now - ago)
        assert bench.engine.status() == before
        assert bench.now == now


@in_virtual_time
async def test_bad_users_cannot_be_evicted() -> None:
    async with opened() as bench:
        with pytest.raises(InvalidInput, match=r"^user: "):
            await bench.engine.evict(b"u1")  # type: ignore[arg-type]


@in_virtual_time
async def test_what_the_caller_changes_after_the_call_changes_nothing() -> None:
    async with opened() as bench:
        context, items = np.array([1, 2, 3]), np.array([4, 5])
        task = asyncio.create_task(bench.engine.rank("u1", numbered(300), items, context=context))
        await asyncio.sleep(0)
        context[:], items[:] = 9, 9
        right = await bench.engine.rank("u2", numbered(300), [4, 5], context=[1, 2, 3])
        assert np.array_equal((await task).scores, right.scores)


@in_virtual_time
async def test_one_rank_too_many_is_told_so_and_the_others_are_served() -> None:
    async with opened(max_ranks=3) as bench:
        ranks = [asyncio.create_task(bench.rank("u1", numbered(300))) for _ in range(3)]
        await asyncio.sleep(0)
        before = bench.state()
        with pytest.raises(Overloaded, match="3 ranks"):
            await bench.rank("u2", numbered(300))
        assert bench.state() == before
        await asyncio.gather(*ranks)
        assert (await bench.rank("u2", numbered(300))).path is Path.FULL


async def refuses_everything(engine: Engine) -> None:
    for call in (
        engine.rank("u1", numbered(10), [1]),
        engine.pre_infer("u1", numbered(10)),
        engine.swap_model(SimulatedModel()),
        engine.evict("u1"),
    ):
        with pytest.raises(Unavailable, match="not open"):
            await call
    with pytest.raises(Unavailable, match="not open"):
        engine.status()


@in_virtual_time
async def test_an_engine_that_is_not_open_is_unavailable() -> None:
    async with opened() as bench:
        pass
    await refuses_everything(bench.engine)
    await refuses_everything(Engine(SimulatedModel(), EngineConfig(), executor=WatchedDevice()))


@in_virtual_time
async def test_an_engine_can_be_opened_again_and_begins_with_nothing() -> None:
    async with opened(host=20) as bench:
        await bench.rank("u1", numbered(300))
    async with bench.engine:
        bench.device.forget()
        assert bench.engine.status().device_prefixes == 0
        assert (await bench.rank("u1", numbered(300))).path is Path.FULL


@in_virtual_time
async def test_an_engine_that_is_open_cannot_be_opened() -> None:
    async with opened() as bench:
        await bench.rank("u1", numbered(300))
        with pytest.raises(RuntimeError, match="open"):
            await bench.engine.__aenter__()
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("after", [0.0, 1e-4, 1e-3, 2e-3, 3e-3, 4e-3, 6e-3])
@in_virtual_time
async def test_closing_ends_every_call_that_is_under_way(after: float, depth: int) -> None:
    """Leaving the block raises if a page is lost."""
    async with opened(spare=2, host=20, step_ms=1.0, device=WatchedDevice(depth=depth)) as bench:
        await bench.rank("cat", numbered(300))
        await bench.push_out("cat")
        calls: list[asyncio.Task[Any]] = []
        for user, length in (("u1", 300), ("u1", 310), ("u2", 300), ("cat", 300), ("dan", 400)):
            calls.append(asyncio.create_task(bench.pre_infer(user, numbered(length))))
            calls.append(asyncio.create_task(bench.rank(user, numbered(length))))
        await asyncio.sleep(after)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers[::2]:
        assert isinstance(answer, PreInferOutcome | Unavailable)
    for answer in answers[1::2]:
        assert isinstance(answer, Ranked | Unavailable)
    assert any(isinstance(answer, Unavailable) for answer in answers)


@in_virtual_time
async def test_a_swap_that_meets_a_closed_engine_is_unavailable() -> None:
    async with opened() as bench:
        swap = asyncio.create_task(bench.engine.swap_model(SimulatedModel("new")))
    with pytest.raises(Unavailable):
        await swap


@pytest.mark.parametrize(
    ("field", "says", "config"),
    [
        ("max_history", "5 pages, device_cache holds 4", {"device_cache": f"{4 * PAGE_BYTES}B", "max_history": 400}),
        ("device_cache", "too few", {"device_cache": f"{3 * PAGE_BYTES}B"}),
        ("device_cache", "less than one page", {"device_cache": "10B"}),
    ],
)
@in_virtual_time
async def test_a_cache_that_cannot_be_is_refused_at_the_start(field: str, says: str, config: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    engine = Engine(
        SimulatedModel(), EngineConfig(**config, host_cache="0"), clock=VirtualClock(loop), executor=WatchedDevice()
    )
    with pytest.raises(InvalidInput, match=f"^{field}: .*{says}"):
        async with engine:
            pass
    await refuses_everything(engine)


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("device", {"device": "abacus"}),
        ("device", {"device": "meta"}),
        ("device", {"device": "simulated"}),
        ("device", {"device": "cuda:99"}),
        ("device_cache", {"device_cache": "900TiB"}),
        ("host_cache", {"host_cache": "900TiB"}),
        ("device_cache", {"device_cache": "1KiB"}),
        ("max_history", {"device_cache": "1MiB", "max_history": 10**6}),
    ],
)
def test_a_machine_that_cannot_be_is_refused_at_the_start(field: str, config: dict[str, Any]) -> None:
    model = build_model("hstu", layers=1, dim=8, heads=1, items=10, seed=0)

    async def main() -> None:
        with pytest.raises(InvalidInput, match=f"^{field}: "):
            async with Engine(model, EngineConfig(**({"host_cache": "0", "device_cache": "8MiB"} | config))):
                pass

    asyncio.run(main())


@pytest.mark.parametrize("model", [None, "hstu", SimulatedModel()])
def test_what_is_no_model_is_refused_at_the_start(model: Any) -> None:
    async def main() -> None:
        with pytest.raises(InvalidInput, match=r"^model: "):
            async with Engine(model, EngineConfig(device_cache="8MiB", host_cache="0")):
                pass

    asyncio.run(main())


@in_virtual_time
async def test_the_longest_history_is_half_the_cache_unless_told() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    config = EngineConfig(device_cache=f"{20 * PAGE_BYTES}B", host_cache="0")
    async with Engine(SimulatedModel(), config, clock=VirtualClock(loop), executor=WatchedDevice()) as engine:
        longest = engine.status().max_history
        assert 8 * 128 <= longest + 64 <= 10 * 128
        assert (await engine.rank("u1", numbered(longest), [1])).used == longest
        with pytest.raises(InvalidInput, match=f"^history: .* max_history is {longest}"):
            await engine.rank("u1", numbered(longest + 1), [1])
