"""The whole cascade on an engine in this process: scores are the oracle's, and the signal's work is used."""

import asyncio
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from behaviours import numbered
from engines import in_virtual_time, opened
from oracle import assert_scores, oracle_scores
from relaygr import Decision, Engine, EngineConfig, History, build_model
from relaygr import Path as RankPath
from relaygr.cascade import (
    Catalogue,
    EngineRanking,
    FaissRetrieval,
    FeaturePreProcessing,
    FixedRetrieval,
    Pipeline,
    PipelineConfig,
    PreProcessingRequest,
    Recommendation,
    RecommendRequest,
    RetrievalRequest,
    inline,
)
from relaygr.errors import DeadlineExceeded, InvalidInput
from relaygr.history import LmdbStore

AT = 1_700_000_000.0
UNHURRIED = PipelineConfig(pipeline_ms=60_000, ranking_ms=50_000, signal_grace_ms=5_000, retrieve=100, candidates=40)
"""For real time on a busy machine."""


def behaviours(length: int) -> History:
    random = np.random.default_rng(length)
    return History(
        random.integers(0, 400, length), random.integers(0, 16, length), int(AT) - np.arange(length)[::-1] * 60
    )


@pytest.mark.parametrize("length", [0, 1, 200])
def test_what_is_answered_is_what_the_oracle_says(tmp_path: Path, length: int) -> None:
    model = build_model(
        "hstu", layers=2, dim=16, heads=2, items=500, seed=1, tasks=2, request_features=6, candidate_features=2
    )
    history, context = behaviours(length), np.array([3, 9])
    retrieval = FaissRetrieval(Catalogue.random(400, 8, seed=2))
    pre_processing = FeaturePreProcessing(request_features=6, candidate_features=2)

    async def main() -> tuple[list[Recommendation], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        with LmdbStore(tmp_path / "histories") as store:
            store.append("u1", history.items, history.actions, history.timestamps)
            async with (
                Engine(model, EngineConfig(device_cache="16MiB", host_cache="0")) as engine,
                Pipeline(
                    store,
                    retrieval,
                    pre_processing,
                    EngineRanking(engine),
                    config=UNHURRIED,
                    clock=engine.clock,
                    wall_time=lambda: AT,
                ) as cascade,
            ):
                request = RecommendRequest("u1", 40, context)
                answers = [await cascade.run(request), await cascade.run(request)]
        retrieved = await retrieval.run(RetrievalRequest("u1", history, 100))
        prepared = await pre_processing.run(PreProcessingRequest(history, retrieved, 40, AT))
        assert prepared.candidates is not None
        scores = oracle_scores(model, history, prepared.candidates, context=context, request=prepared.request)
        return answers, prepared.candidates.items, scores[:, 0]

    answers, items, scores = asyncio.run(main())
    assert len(items) == 40
    assert not np.isin(items, history.items).any()
    for answer in answers:
        assert sorted(entry.item for entry in answer.items) == sorted(items.tolist())
        right = dict(zip(items.tolist(), scores.tolist(), strict=True))
        assert_scores([entry.score for entry in answer.items], [right[entry.item] for entry in answer.items])
        assert [entry.score for entry in answer.items] == sorted((e.score for e in answer.items), reverse=True)
        assert (answer.used, answer.instance, answer.signalled) == (length, "local", "local")
    first, second = answers
    assert first.decision is Decision.ADMIT
    assert first.path in (RankPath.RESIDENT, RankPath.WAITED)
    assert (second.decision, second.path) == (Decision.RESIDENT, RankPath.RESIDENT)


def cascade_on(engine: Engine, store: LmdbStore, *, retrieval_s: float = 0.05) -> Pipeline:
    return Pipeline(
        store,
        FixedRetrieval(range(10**9, 10**9 + 20), after_s=retrieval_s),
        FeaturePreProcessing(),
        EngineRanking(engine),
        clock=engine.clock,
        offload=inline,
        wall_time=lambda: AT,
    )


@pytest.fixture
def store(tmp_path: Path) -> LmdbStore:
    store = LmdbStore(tmp_path / "histories")
    history = numbered(300)
    store.append("u1", history.items, history.actions, history.timestamps)
    return store


@in_virtual_time
async def test_the_prefix_is_made_while_retrieval_runs(store: LmdbStore) -> None:
    with store:
        async with opened() as bench, cascade_on(bench.engine, store) as cascade:
            answer = await cascade.run(RecommendRequest("u1"))
            assert (answer.decision, answer.path) == (Decision.ADMIT, RankPath.RESIDENT)
            assert answer.stages_ms["ranking"] < 0.3, "3 ms of work were done before"


@in_virtual_time
async def test_a_rank_that_overtakes_its_prefix_waits_for_it(store: LmdbStore) -> None:
    with store:
        async with opened() as bench, cascade_on(bench.engine, store, retrieval_s=0.001) as cascade:
            answer = await cascade.run(RecommendRequest("u1"))
            assert (answer.decision, answer.path) == (Decision.ADMIT, RankPath.WAITED)
            assert bench.device.appended == 300


@in_virtual_time
async def test_behaviours_that_arrive_between_requests_extend_the_prefix(store: LmdbStore) -> None:
    with store:
        async with opened() as bench, cascade_on(bench.engine, store) as cascade:
            await cascade.run(RecommendRequest("u1"))
            store.append("u1", [5], [0], [10**6])
            answer = await cascade.run(RecommendRequest("u1"))
            assert (answer.decision, answer.path, answer.used) == (Decision.ADMIT, RankPath.RESIDENT, 301)
            assert bench.device.appended == 301


@in_virtual_time
async def test_ten_requests_at_once_of_one_user_cost_one_prefix(store: LmdbStore) -> None:
    with store:
        async with opened() as bench, cascade_on(bench.engine, store, retrieval_s=0.001) as cascade:
            answers = await asyncio.gather(*(cascade.run(RecommendRequest("u1")) for _ in range(10)))
            assert bench.device.appended == 300
            assert len({answer.items for answer in answers}) == 1


@pytest.mark.parametrize(
    ("decision", "settings"),
    [(Decision.NO_MEMORY, {"spare": 0}), (Decision.NO_CAPACITY, {"pre_infer_share": 1e-3})],
)
@in_virtual_time
async def test_a_refused_signal_says_why_and_the_rank_is_computed(
    store: LmdbStore,
    decision: Decision,
    settings: dict[str, float],
) -> None:
    with store:
        async with (
            opened(**settings) as bench,  # type: ignore[arg-type]
            cascade_on(bench.engine, store) as cascade,
        ):
            answer = await cascade.run(RecommendRequest("u1"))
            assert (answer.decision, answer.path, answer.used) == (decision, RankPath.FULL, 300)


@in_virtual_time
async def test_an_engine_that_is_late_is_a_deadline_exceeded(store: LmdbStore) -> None:
    with store:
        async with opened() as bench, cascade_on(bench.engine, store) as cascade:
            bench.device.hangs_s = lambda work: 10.0
            arrived = bench.now
            with pytest.raises(DeadlineExceeded):
                await cascade.run(RecommendRequest("u1"))
            assert bench.now - arrived == pytest.approx(0.1), "50 ms of retrieval, and the ranking budget"


@in_virtual_time
async def test_input_that_the_model_refuses_is_named(store: LmdbStore) -> None:
    with store:
        async with opened() as bench, cascade_on(bench.engine, store) as cascade:
            with pytest.raises(InvalidInput, match="context"):
                await cascade.run(RecommendRequest("u1", context=np.array([-1])))
