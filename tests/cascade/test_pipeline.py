"""One request through the cascade in virtual time: what is sent when, what is answered, and what cannot delay it."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from behaviours import numbered
from engines import in_virtual_time
from relaygr import Decision, SteppedWindow
from relaygr import Path as RankPath
from relaygr.cascade import (
    FeaturePreProcessing,
    FixedRanking,
    FixedRetrieval,
    Pipeline,
    PipelineConfig,
    Prepared,
    PreProcessing,
    PreProcessingRequest,
    RankReply,
    Recommendation,
    RecommendRequest,
    Retrieval,
    RetrievalRequest,
    Retrieved,
    RiskTest,
    inline,
)
from relaygr.clock import Clock, VirtualClock, VirtualTimeLoop, run_virtual
from relaygr.errors import DeadlineExceeded, InvalidInput, Overloaded, RelayError, Unavailable
from relaygr.history import History, LmdbStore, StoreCorrupt, StoreError, StoreFull
from relaygr.relay import Shape

T = TypeVar("T")

ITEMS = [40, 10, 30, 20]
SEEN = numbered(300)
"""Ann's history: of ITEMS she has seen none."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    with LmdbStore(tmp_path / "histories") as store:
        store.append("u1", SEEN.items, SEEN.actions, SEEN.timestamps)
        yield store


class SlowPreProcessing(FeaturePreProcessing):
    """Takes its time."""

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self._after_s = after_s

    async def run(self, request: PreProcessingRequest, /) -> Prepared:
        await asyncio.sleep(self._after_s)
        return await super().run(request)


def clock() -> Clock:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return VirtualClock(loop)


def now_ms() -> float:
    return asyncio.get_running_loop().time() * 1e3


def ranking(**settings: Any) -> FixedRanking:
    return FixedRanking(clock(), **settings)


def pipeline(
    store: LmdbStore,
    ranks: Any,
    *,
    retrieval: Retrieval | None = None,
    pre_processing: PreProcessing | None = None,
    trigger: RiskTest | None = None,
    read_s: float = 0.0,
    wall_time: Callable[[], float] = lambda: 0.0,
    **config: Any,
) -> Pipeline:
    """Budgets of 100 ms, 40 ms of them for ranking; retrieval takes 20 ms."""

    async def read(work: Callable[[], T], /) -> T:
        await asyncio.sleep(read_s)
        return work()

    return Pipeline(
        store,
        retrieval or FixedRetrieval(ITEMS, after_s=0.02),
        pre_processing or FeaturePreProcessing(),
        ranks,
        trigger,
        PipelineConfig(**{"pipeline_ms": 100.0, "ranking_ms": 40.0, **config}),
        clock=clock(),
        wall_time=wall_time,
        offload=read if read_s else inline,
    )


def found(answer: Recommendation) -> list[int]:
    return [entry.item for entry in answer.items]


async def nothing_is_left() -> None:
    """One turn later no task but the test's own lives."""
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_an_answer_has_its_items_path_decision_instance_and_times(store: LmdbStore) -> None:
    ranks = ranking(signal_s=0.005, rank_s=0.01)
    async with pipeline(store, ranks, read_s=0.001, pre_processing=SlowPreProcessing(0.002)) as cascade:
        answer = await cascade.run(RecommendRequest("u1", 3))
    assert [(entry.item, entry.score) for entry in answer.items] == [(40, 40.0), (30, 30.0), (20, 20.0)]
    assert (answer.path, answer.decision, answer.instance) == (RankPath.FULL, Decision.ADMIT, "fixed")
    assert (answer.signalled, answer.used, answer.epoch) == ("fixed", 300, 0)
    assert list(answer.stages_ms) == ["retrieval", "pre_processing", "ranking", "total"]
    assert list(answer.stages_ms.values()) == pytest.approx([20, 2, 10, 33])
    await nothing_is_left()


@in_virtual_time
async def test_the_signal_goes_out_at_arrival_and_the_rank_follows_its_slot(store: LmdbStore) -> None:
    ranks = ranking(signal_s=0.019, slot="gpu-3")
    async with pipeline(store, ranks) as cascade:
        await cascade.run(RecommendRequest("u1", context=np.array([4, 5])))
    (signal,), (rank,) = ranks.signals, ranks.ranks
    assert signal.at == 0.0
    assert rank.at == pytest.approx(0.02)
    assert signal.due == pytest.approx(0.06), "when the rank begins at the latest"
    assert (signal.user, rank.user, rank.slot) == ("u1", "u1", "gpu-3")
    assert signal.history == rank.history == SEEN
    assert signal.context.tolist() == rank.context.tolist() == [4, 5]
    assert rank.candidates.items.tolist() == ITEMS


@in_virtual_time
async def test_the_signal_is_out_even_before_a_retrieval_that_never_waits(store: LmdbStore) -> None:
    ranks = ranking()
    signals: list[int] = []

    class Instant:
        async def run(self, request: RetrievalRequest, /) -> Retrieved:
            signals.append(len(ranks.signals))
            return Retrieved(np.array(ITEMS))

    async with pipeline(store, ranks, retrieval=Instant()) as cascade:
        await cascade.run(RecommendRequest("u1"))
    assert signals == [1]


# ---- signals that fail or are late


@pytest.mark.parametrize("error", [Unavailable("gone"), Overloaded("busy"), InvalidInput("user", "bad")])
@in_virtual_time
async def test_a_signal_that_fails_changes_nothing_but_the_decision(store: LmdbStore, error: RelayError) -> None:
    ranks = ranking(signal_error=error, rank_s=0.01)
    async with pipeline(store, ranks) as cascade:
        answer = await cascade.run(RecommendRequest("u1"))
    assert (answer.decision, answer.signalled, answer.instance) == (Decision.UNAVAILABLE, None, "fixed")
    assert found(answer) == [40, 30, 20, 10]
    assert answer.stages_ms["total"] == pytest.approx(30)
    assert ranks.ranks[0].slot is None


@in_virtual_time
async def test_a_signal_that_fails_by_a_fault_is_logged(store: LmdbStore, caplog: pytest.LogCaptureFixture) -> None:
    async with pipeline(store, ranking(signal_error=OSError("no route"))) as cascade:
        with caplog.at_level(logging.ERROR):
            answer = await cascade.run(RecommendRequest("u1"))
    assert answer.decision is Decision.UNAVAILABLE
    assert "no route" in caplog.text


@pytest.mark.parametrize("signal_s", [0.3, math.inf])
@pytest.mark.parametrize("grace", [0.0, 2.0])
@in_virtual_time
async def test_a_late_signal_costs_the_grace_at_most_and_leaves_nothing(
    store: LmdbStore, signal_s: float, grace: float
) -> None:
    ranks = ranking(signal_s=signal_s, rank_s=0.01)
    async with pipeline(store, ranks, signal_grace_ms=grace) as cascade:
        answer = await cascade.run(RecommendRequest("u1"))
        assert (answer.decision, answer.signalled) == (Decision.UNAVAILABLE, None)
        assert found(answer) == [40, 30, 20, 10]
        assert answer.stages_ms["total"] == pytest.approx(30 + grace)
        assert answer.stages_ms["ranking"] == pytest.approx(10 + grace)
        assert ranks.ranks[0].deadline == pytest.approx(0.06), "the grace is taken out of the ranking budget"
        await nothing_is_left()
        assert ranks.under_way == 0


@in_virtual_time
async def test_a_reply_within_the_grace_is_waited_for_and_no_longer(store: LmdbStore) -> None:
    ranks = ranking(signal_s=0.0215)
    async with pipeline(store, ranks) as cascade:
        answer = await cascade.run(RecommendRequest("u1"))
    assert (answer.decision, ranks.ranks[0].slot) == (Decision.ADMIT, "fixed")
    assert answer.stages_ms["total"] == pytest.approx(21.5)


@pytest.mark.parametrize("decision", [Decision.NO_MEMORY, Decision.NO_CAPACITY, Decision.RESIDENT])
@in_virtual_time
async def test_the_slot_of_a_refusal_is_followed_too(store: LmdbStore, decision: Decision) -> None:
    ranks = ranking(decision=decision, slot="b")
    async with pipeline(store, ranks) as cascade:
        answer = await cascade.run(RecommendRequest("u1"))
    assert (answer.decision, ranks.ranks[0].slot) == (decision, "b")


# ---- who is signalled


class Always:
    """A risk test with one decision."""

    def __init__(self, decision: Decision) -> None:
        self._decision = decision
        self.asked: list[tuple[str, Shape]] = []

    def decide(self, user: str, shape: Shape) -> Decision:
        self.asked.append((user, shape))
        return self._decision


@pytest.mark.parametrize("decision", Decision)
@in_virtual_time
async def test_only_what_the_trigger_admits_is_signalled(store: LmdbStore, decision: Decision) -> None:
    ranks, trigger = ranking(), Always(decision)
    async with pipeline(store, ranks, trigger=trigger, candidates=64) as cascade:
        answer = await cascade.run(RecommendRequest("u1", context=np.array([1])))
    assert trigger.asked == [("u1", Shape(history=300, context=1, candidates=64))]
    assert len(ranks.signals) == (decision is Decision.ADMIT)
    assert answer.decision is decision
    assert found(answer) == [40, 30, 20, 10]


@in_virtual_time
async def test_an_unknown_user_is_not_signalled_and_gets_an_answer(store: LmdbStore) -> None:
    ranks = ranking()
    async with pipeline(store, ranks) as cascade:
        answer = await cascade.run(RecommendRequest("stranger"))
    assert (answer.decision, answer.used, ranks.signals) == (Decision.NOT_AT_RISK, 0, [])
    assert found(answer) == [40, 30, 20, 10]


@in_virtual_time
async def test_a_context_alone_is_worth_a_signal(store: LmdbStore) -> None:
    ranks = ranking()
    async with pipeline(store, ranks) as cascade:
        answer = await cascade.run(RecommendRequest("stranger", context=np.array([3])))
    assert (answer.decision, len(ranks.signals)) == (Decision.ADMIT, 1)


# ---- what is read, prepared and answered


@in_virtual_time
async def test_the_window_of_a_long_history_is_ranked_on(store: LmdbStore) -> None:
    long = numbered(1000)
    store.append("u2", long.items, long.actions, long.timestamps)
    ranks, window = ranking(), SteppedWindow(cap=500, step=128)
    async with pipeline(store, ranks, window=window) as cascade:
        await cascade.run(RecommendRequest("u2"))
    ranked = ranks.ranks[0].history
    assert ranked == window.apply(long)
    assert ranked.start == window.apply(long).start == 512
    assert ranked.digest() == window.apply(long).digest()


@in_virtual_time
async def test_a_history_replaced_by_a_shorter_one_meanwhile_is_read_as_it_is(tmp_path: Path) -> None:
    class Stale(LmdbStore):
        def length(self, user: str) -> int:
            return super().length(user) + 5000

    with Stale(tmp_path / "stale") as store:
        store.append("u1", SEEN.items, SEEN.actions, SEEN.timestamps)
        ranks = ranking()
        async with pipeline(store, ranks, window=SteppedWindow(cap=1024, step=128)) as cascade:
            await cascade.run(RecommendRequest("u1"))
    assert ranks.ranks[0].history == SEEN
    assert ranks.ranks[0].history.start == 0


@in_virtual_time
async def test_of_a_history_that_grew_far_past_its_window_no_more_than_the_window_is_read(tmp_path: Path) -> None:
    reads: list[int] = []

    class Counted(LmdbStore):
        def read(self, *given: Any, **named: Any) -> History:
            history = super().read(*given, **named)
            reads.append(len(history))
            return history

    window = SteppedWindow(cap=1024, step=128)
    with Counted(tmp_path / "grown") as store:
        store.append("u1", SEEN.items, SEEN.actions, SEEN.timestamps)
        ranks = ranking()
        async with pipeline(store, ranks, window=window) as cascade:
            await cascade.run(RecommendRequest("u1"))
            more = np.arange(20_000)
            store.append("u1", more % 7, more % 3, 10**6 + more)
            await cascade.run(RecommendRequest("u1"))
            await cascade.run(RecommendRequest("u1"))
            whole = store.read("u1")
    assert max(reads[:-1]) <= window.cap
    assert ranks.ranks[1].history.digest() == window.apply(whole).digest()
    assert ranks.ranks[1].history.start == window.apply(whole).start
    assert ranks.ranks[2].history is ranks.ranks[1].history


@in_virtual_time
async def test_an_append_beside_others_forgets_its_own_user_alone(store: LmdbStore) -> None:
    async with pipeline(store, ranking()) as cascade:
        began = cascade._recent.begin()  # a read of another user is under way
        await cascade.run(RecommendRequest("u1"))
        cascade.appended("u1", SEEN[:1], len(SEEN))  # what was read has it already
        assert cascade._recent.get("u1") is not None
        cascade.appended("u1", SEEN[:1], len(SEEN) + 5)  # others have written four
        assert cascade._recent.get("u1") is None
        cascade._recent.keep("u2", SEEN, began)
        assert cascade._recent.get("u2") is not None


@in_virtual_time
async def test_behaviours_appended_since_are_seen_by_the_next_request(store: LmdbStore) -> None:
    ranks = ranking()
    async with pipeline(store, ranks) as cascade:
        await cascade.run(RecommendRequest("u1"))
        store.append("u1", [30], [0], [10**6])
        answer = await cascade.run(RecommendRequest("u1"))
    assert (found(answer), answer.used) == ([40, 20, 10], 301)


@in_virtual_time
async def test_a_user_who_has_seen_everything_gets_an_empty_answer_at_once(store: LmdbStore) -> None:
    store.append("u1", ITEMS, [0] * 4, [10**6] * 4)
    ranks = ranking(signal_s=math.inf)
    async with pipeline(store, ranks) as cascade:
        answer = await cascade.run(RecommendRequest("u1"))
    assert (answer.items, answer.path, answer.instance, answer.epoch, ranks.ranks) == ((), None, None, None, [])
    assert answer.stages_ms["total"] == pytest.approx(20)


@in_virtual_time
async def test_as_many_are_retrieved_and_ranked_as_configured(store: LmdbStore) -> None:
    ranks, retrieval = ranking(), FixedRetrieval(range(10**6, 10**6 + 50))
    async with pipeline(store, ranks, retrieval=retrieval, retrieve=30, candidates=7) as cascade:
        answer = await cascade.run(RecommendRequest("u1", 20))
    assert retrieval.requests[0].k == 30
    assert len(ranks.ranks[0].candidates) == len(answer.items) == 7


@in_virtual_time
async def test_features_are_of_the_wall_time_at_arrival(store: LmdbStore) -> None:
    ranks, times = ranking(), iter([6 * 3600.0])
    features = FeaturePreProcessing(request_features=2, candidate_features=2)
    async with pipeline(store, ranks, pre_processing=features, wall_time=lambda: next(times)) as cascade:
        await cascade.run(RecommendRequest("u1"))
    assert ranks.ranks[0].request == pytest.approx([1, 0], abs=1e-6)
    assert ranks.ranks[0].candidates.features is not None
    assert ranks.ranks[0].candidates.features[:, 1] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])


class Scored(FixedRanking):
    """Answers given scores."""

    given: Any = None

    async def rank(self, *args: Any, **kwargs: Any) -> RankReply:
        reply = await super().rank(*args, **kwargs)
        return RankReply(np.array(self.given, np.float32), reply.path, 0, 0, reply.slot, reply.timings)


@given(scores=st.lists(st.tuples(st.integers(-2, 2), st.integers()), min_size=1, max_size=20), k=st.integers(1, 25))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_best_by_the_first_task_come_first_and_equal_ones_keep_their_order(
    store: LmdbStore, scores: list[tuple[int, int]], k: int
) -> None:
    items = range(10**6, 10**6 + len(scores))

    async def main() -> Recommendation:
        ranks = Scored(clock())
        ranks.given = [[float(first), float(second % 7)] for first, second in scores]
        async with pipeline(store, ranks, retrieval=FixedRetrieval(items)) as cascade:
            return await cascade.run(RecommendRequest("u1", k))

    answer = run_virtual(main())
    places = sorted(range(len(scores)), key=lambda place: (-scores[place][0], place))[:k]
    assert [(e.item, e.score) for e in answer.items] == [(10**6 + place, scores[place][0]) for place in places]


@in_virtual_time
async def test_scores_for_other_candidates_are_no_answer(store: LmdbStore) -> None:
    ranks = Scored(clock())
    ranks.given = [[1.0]]
    async with pipeline(store, ranks) as cascade:
        with pytest.raises(Unavailable, match="1 scores for 4 candidates"):
            await cascade.run(RecommendRequest("u1"))


# ---- errors and deadlines


@pytest.mark.parametrize("error", [Unavailable("gone"), Overloaded("busy"), DeadlineExceeded("late")])
@in_virtual_time
async def test_errors_of_ranking_surface_as_they_are(store: LmdbStore, error: RelayError) -> None:
    async with pipeline(store, ranking(rank_error=error)) as cascade:
        with pytest.raises(type(error)) as raised:
            await cascade.run(RecommendRequest("u1"))
        assert raised.value is error
        await nothing_is_left()


@pytest.mark.parametrize("error", [Unavailable("the retrieval service is down"), TimeoutError("its own")])
@in_virtual_time
async def test_errors_of_retrieval_surface_and_end_the_signal(store: LmdbStore, error: Exception) -> None:
    class Down:
        async def run(self, request: RetrievalRequest, /) -> Retrieved:
            raise error

    ranks = ranking(signal_s=math.inf)
    async with pipeline(store, ranks, retrieval=Down()) as cascade:
        with pytest.raises(type(error)) as raised:
            await cascade.run(RecommendRequest("u1"))
        assert raised.value is error
        await nothing_is_left()
        assert (len(ranks.signals), ranks.under_way) == (1, 0)


@pytest.mark.parametrize(
    ("slow", "said", "at_ms"),
    [
        ({"read_s": 1.0}, "pipeline budget of 100 ms passed in reading the history", 100),
        ({"retrieval": FixedRetrieval(ITEMS, after_s=1.0)}, "pipeline budget of 100 ms passed in retrieval", 100),
        ({"pre_processing": SlowPreProcessing(1.0)}, "pipeline budget of 100 ms passed in pre-processing", 100),
        ({"rank_s": 1.0}, "ranking budget of 40 ms passed in ranking", 60),
        ({"rank_s": math.inf}, "ranking budget of 40 ms passed in ranking", 60),
        ({"rank_s": 1.0, "pre_processing": SlowPreProcessing(0.06)}, "pipeline budget .* passed in ranking", 100),
    ],
)
@pytest.mark.parametrize("signal_s", [0.0, math.inf])
@in_virtual_time
async def test_a_deadline_that_passes_in_a_stage_ends_the_request_there(
    store: LmdbStore, slow: dict[str, Any], said: str, at_ms: float, signal_s: float
) -> None:
    slow = dict(slow)
    ranks = ranking(rank_s=slow.pop("rank_s", 0.0), signal_s=signal_s)
    async with pipeline(store, ranks, **slow) as cascade:
        with pytest.raises(DeadlineExceeded, match=said):
            await cascade.run(RecommendRequest("u1"))
        assert now_ms() == pytest.approx(at_ms)
        await nothing_is_left()
        assert ranks.under_way == 0


@pytest.mark.parametrize(("before_ms", "deadline_ms"), [(0, 40), (20, 60), (60, 100), (80, 100)])
@in_virtual_time
async def test_a_rank_has_its_budget_or_what_the_pipeline_leaves(
    store: LmdbStore, before_ms: float, deadline_ms: float
) -> None:
    ranks, retrieval = ranking(), FixedRetrieval(ITEMS, after_s=before_ms / 1e3)
    async with pipeline(store, ranks, retrieval=retrieval) as cascade:
        await cascade.run(RecommendRequest("u1"))
    assert ranks.ranks[0].deadline * 1e3 == pytest.approx(deadline_ms)


@in_virtual_time
async def test_a_bad_user_is_refused_by_name(store: LmdbStore) -> None:
    async with pipeline(store, ranking()) as cascade:
        with pytest.raises(InvalidInput, match="user"):
            await cascade.run(RecommendRequest(""))


# ---- cancellation, closing, and everything at once


@pytest.mark.parametrize("at_ms", [0.5, 10, 21, 25, 35])
@in_virtual_time
async def test_a_request_cancelled_anywhere_leaves_nothing(store: LmdbStore, at_ms: float) -> None:
    ranks = ranking(signal_s=math.inf, rank_s=0.01)
    cascade = pipeline(store, ranks, read_s=0.001, pre_processing=SlowPreProcessing(0.003), signal_grace_ms=3)
    request = asyncio.create_task(cascade.run(RecommendRequest("u1")))
    await asyncio.sleep(at_ms / 1e3)
    request.cancel()
    await asyncio.wait((request,))
    assert request.cancelled()
    await nothing_is_left()
    assert ranks.under_way == 0


@in_virtual_time
async def test_closing_ends_signals_and_refuses_requests_but_not_those_under_way(store: LmdbStore) -> None:
    ranks = ranking(signal_s=math.inf)
    cascade = pipeline(store, ranks)
    request = asyncio.create_task(cascade.run(RecommendRequest("u1")))
    await asyncio.sleep(0.01)
    await cascade.aclose()
    assert ranks.under_way == 0
    await cascade.aclose()
    with pytest.raises(Unavailable, match="closed"):
        await cascade.run(RecommendRequest("u1"))
    answer = await request
    assert (answer.decision, found(answer)) == (Decision.UNAVAILABLE, [40, 30, 20, 10])


@dataclass(frozen=True)
class Times:
    """How long each part takes, in milliseconds; a signal may never be answered, or fail."""

    arrival: int
    read: int
    retrieval: int
    pre_processing: int
    rank: int
    signal: int | None
    fails: bool


PART = st.sampled_from([0, 1, 20, 39, 60, 99, 150])
TIMES = st.builds(Times, st.integers(0, 200), PART, PART, PART, PART, st.none() | PART, st.booleans())


@given(everyone=st.lists(TIMES, min_size=1, max_size=8), grace=st.sampled_from([0, 2, 10]))
@example(everyone=[Times(0, 0, 99, 0, 0, None, False)], grace=2)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_whatever_takes_how_long_answers_are_right_and_in_time(
    store: LmdbStore, everyone: list[Times], grace: int
) -> None:
    async def one(times: Times) -> None:
        await asyncio.sleep(times.arrival / 1e3)
        arrived = now_ms()
        ranks = ranking(
            rank_s=times.rank / 1e3,
            signal_s=math.inf if times.signal is None else times.signal / 1e3,
            signal_error=Unavailable("gone") if times.fails else None,
        )
        async with pipeline(
            store,
            ranks,
            read_s=times.read / 1e3,
            retrieval=FixedRetrieval(ITEMS, after_s=times.retrieval / 1e3),
            pre_processing=SlowPreProcessing(times.pre_processing / 1e3),
            signal_grace_ms=grace,
        ) as cascade:
            try:
                answer = await cascade.run(RecommendRequest("u1"))
            except DeadlineExceeded:
                before = times.read + times.retrieval + times.pre_processing
                assert before + grace + times.rank >= 100 or grace + times.rank >= 40
            else:
                plain = times.read + times.retrieval + times.pre_processing + times.rank
                assert found(answer) == [40, 30, 20, 10]
                assert plain - 1e-6 <= now_ms() - arrived <= plain + grace + 1e-6
                assert answer.decision in (Decision.ADMIT, Decision.UNAVAILABLE)
                assert (answer.decision is Decision.ADMIT) == (ranks.ranks[0].slot == "fixed")
            assert now_ms() - arrived <= 100 + 1e-6
        assert ranks.under_way == 0

    async def main() -> None:
        await asyncio.gather(*map(one, everyone))
        await nothing_is_left()

    run_virtual(main())


# ---- settings


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("pipeline_ms", {"pipeline_ms": math.inf}),
        ("pipeline_ms", {"pipeline_ms": "100"}),
        ("ranking_ms", {"ranking_ms": -1}),
        ("ranking_ms", {"pipeline_ms": 50, "ranking_ms": 50}),
        ("signal_grace_ms", {"signal_grace_ms": 50, "ranking_ms": 50}),
        ("signal_grace_ms", {"signal_grace_ms": True}),
        ("signal_grace_ms", {"signal_grace_ms": 0, "ranking_ms": 0}),
        ("candidates", {"candidates": 0}),
        ("retrieve", {"retrieve": 10, "candidates": 11}),
        ("retrieve", {"retrieve": 1.5}),
        ("window", {"window": 8192}),
    ],
)
def test_budgets_that_cannot_be_are_refused_by_name(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        PipelineConfig(**settings)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "settings"), [("k", {"k": 0}), ("k", {"k": 1.5}), ("k", {"k": True}), ("context", {"context": [0.5]})]
)
def test_requests_that_cannot_be_are_refused_by_name(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        RecommendRequest("u1", **settings)
    assert refused.value.field == field


class FlakyStore(LmdbStore):
    """Raises what it is told to."""

    failure: RelayError | None = None

    def _run(self, work: Any, *, write: bool = False) -> Any:
        if self.failure is not None and not write:
            raise self.failure
        return super()._run(work, write=write)


@pytest.mark.parametrize("failure", [Unavailable("gone"), StoreError("refuses"), StoreFull("full")])
def test_while_the_store_is_gone_users_seen_before_are_served_as_they_were_and_told_so(
    tmp_path: Path, failure: RelayError
) -> None:
    async def test() -> None:
        with FlakyStore(tmp_path / "flaky", durable=False) as store:
            store.append("u1", SEEN.items, SEEN.actions, SEEN.timestamps)
            async with pipeline(store, ranking()) as cascade:
                before = await cascade.run(RecommendRequest("u1"))
                store.failure = failure
                again = await cascade.run(RecommendRequest("u1"))
                with pytest.raises(type(failure)):
                    await cascade.run(RecommendRequest("u2"))
                cascade.forget("u1")
                with pytest.raises(type(failure)):
                    await cascade.run(RecommendRequest("u1"))
                store.failure = None
                back = await cascade.run(RecommendRequest("u1"))
        assert [answer.stale for answer in (before, again, back)] == [False, True, False]
        assert before.items == again.items == back.items
        assert again.used == 300

    run_virtual(test())


def test_a_damaged_history_is_never_hidden_by_an_old_one(tmp_path: Path) -> None:
    async def test() -> None:
        with FlakyStore(tmp_path / "flaky", durable=False) as store:
            store.append("u1", SEEN.items, SEEN.actions, SEEN.timestamps)
            async with pipeline(store, ranking()) as cascade:
                await cascade.run(RecommendRequest("u1"))
                store.failure = StoreCorrupt("damaged")
                with pytest.raises(StoreCorrupt):
                    await cascade.run(RecommendRequest("u1"))

    run_virtual(test())


@in_virtual_time
async def test_a_slow_store_costs_its_share_and_not_the_request(store: LmdbStore) -> None:
    slow = False

    async def read(work: Callable[[], T], /) -> T:
        await asyncio.sleep(10.0 if slow else 0.001)
        return work()

    async with pipeline(store, ranking(), store_share=0.3) as cascade:
        cascade._offload = read
        await cascade.run(RecommendRequest("u1"))
        slow, began = True, now_ms()
        answer = await cascade.run(RecommendRequest("u1"))
        assert answer.stale
        assert now_ms() - began == pytest.approx(30 + 20)
        began = now_ms()
        with pytest.raises(DeadlineExceeded):
            await cascade.run(RecommendRequest("u2"))
        assert now_ms() - began == pytest.approx(100)


def test_what_was_appended_here_is_seen_although_the_store_is_gone(tmp_path: Path) -> None:
    async def test() -> None:
        with FlakyStore(tmp_path / "flaky", durable=False) as store:
            store.append("u1", SEEN.items, SEEN.actions, SEEN.timestamps)
            new = numbered(5, first=300)
            async with pipeline(store, ranking()) as cascade:
                await cascade.run(RecommendRequest("u1"))
                cascade.appended("u1", new, store.append("u1", new.items, new.actions, new.timestamps))
                cascade.appended("u2", new, 5)  # never read here
                store.failure = Unavailable("gone")
                answer = await cascade.run(RecommendRequest("u1"))
                assert (answer.stale, answer.used) == (True, 305)
                with pytest.raises(Unavailable):
                    await cascade.run(RecommendRequest("u2"))
                cascade.appended("u1", numbered(1, first=400), 401)  # others wrote, too
                with pytest.raises(Unavailable):
                    await cascade.run(RecommendRequest("u1"))

    run_virtual(test())


@in_virtual_time
async def test_users_who_were_here_are_read_without_a_thread_where_that_is_wanted(store: LmdbStore) -> None:
    threads = 0

    async def counted(work: Callable[[], T], /) -> T:
        nonlocal threads
        threads += 1
        return work()

    async with pipeline(store, ranking()) as cascade:
        cascade._offload, cascade._read_here = counted, True
        first = await cascade.run(RecommendRequest("u1"))
        new = numbered(5, first=300)
        store.append("u1", new.items, new.actions, new.timestamps)
        again = await cascade.run(RecommendRequest("u1"))
        assert (first.used, again.used, threads) == (300, 305, 1)
        await cascade.run(RecommendRequest("u2"))
        assert threads == 2
        store.close()
        assert (await cascade.run(RecommendRequest("u1"))).stale


@in_virtual_time
async def test_a_read_that_takes_long_does_not_bring_back_what_is_older(store: LmdbStore) -> None:
    slow = [0.05, 0.0]

    async def read(work: Callable[[], T], /) -> T:
        found = work()
        await asyncio.sleep(slow.pop(0) if slow else 0.0)
        return found

    async with pipeline(store, ranking()) as cascade:
        cascade._offload = read
        first = asyncio.create_task(cascade.run(RecommendRequest("u1")))
        await asyncio.sleep(0.001)
        new = numbered(5, first=300)
        store.append("u1", new.items, new.actions, new.timestamps)
        await cascade.run(RecommendRequest("u1"))
        await first
        store.close()
        kept = await cascade.run(RecommendRequest("u1"))
        assert (kept.stale, kept.used) == (True, 305)
