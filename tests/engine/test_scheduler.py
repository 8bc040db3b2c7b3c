"""One order, earliest deadline first; steps of bounded time; chunks of whole pages; nothing changed by planning."""

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from behaviours import numbered
from relaygr.cache import Lineage, Prefix
from relaygr.engine.cost import CostModel
from relaygr.engine.outcomes import Path
from relaygr.engine.scheduler import Plan, Scheduler
from relaygr.engine.simulated import SimulatedModel
from relaygr.engine.step import Served
from relaygr.engine.work import Build, Rank
from relaygr.history import PAGE
from relaygr.model.candidates import Candidates

LONGEST = 12 * PAGE
HISTORY = numbered(LONGEST)
NO_CONTEXT = np.empty(0, np.int64)
NO_PAGES = np.empty(0, np.int64)
SERVED = {
    grain: [Served(SimulatedModel(name), name, 0, grain * PAGE) for name in ("old", "new")] for grain in (1, 2, 4)
}
LINEAGE = Lineage("v", 0, b"", 0, 0)
COSTS = (1e-3, 1e-5, 1e-9, 1e-5, 1e-8)


@pytest.fixture(scope="module")
def events() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@dataclass
class Work:
    """Work to plan, and the means to make it."""

    events: asyncio.AbstractEventLoop
    builds: list[Build] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)
    step_s: float = 5e-3
    grain: int = 1
    orders: Iterator[int] = field(default_factory=itertools.count)
    cost: CostModel = field(default_factory=CostModel)
    now: float = -math.inf
    """When it is planned; before all deadlines unless said otherwise."""

    def __post_init__(self) -> None:
        self.cost.steps.coefficients = COSTS

    def rank(self, due: float, tokens: int = 100, candidates: int = 10, model: int = 0, *, over: bool = False) -> Rank:
        future: asyncio.Future[Any] = self.events.create_future()
        if over:
            future.cancel()
        return Rank(
            served=SERVED[self.grain][model],
            user="u",
            history=HISTORY[:tokens],
            context=NO_CONTEXT,
            lineage=LINEAGE,
            candidates=Candidates(np.arange(candidates)),
            request=None,
            deadline=due,
            due=due,
            order=next(self.orders),
            arrived=0.0,
            future=future,
            cost_s=self.cost.score_s(candidates, tokens),
        )

    def ready(self, due: float, tokens: int = 100, candidates: int = 10, model: int = 0) -> Rank:
        self.ranks.append(self.rank(due, tokens, candidates, model))
        return self.ranks[-1]

    def build(
        self, due: float, tokens: int, launched: int = 0, model: int = 0, ranks: list[Rank] | None = None
    ) -> Build:
        build = Build(
            served=SERVED[self.grain][model],
            prefix=Prefix("u", LINEAGE, tokens, b"", b"", NO_PAGES),
            history=HISTORY[:tokens],
            context=NO_CONTEXT,
            base=launched,
            made=Path.FULL,
            due=due,
            order=next(self.orders),
            launched=launched,
            ranks=ranks or [],
            cost_s=self.cost.append_s(tokens - launched, launched),
        )
        self.builds.append(build)
        return build

    def plan(self, *, apart: bool = False) -> Plan | None:
        return Scheduler(self.cost, self.step_s).plan(self.builds, self.ranks, self.now, in_flight_s=0.0, apart=apart)

    def ahead(self, plan: Plan) -> list[Rank]:
        """Those of its ranks that were ready, and so wait for nothing that it appends."""
        return [rank for rank in plan.scores if rank in self.ranks]

    def planned(self) -> Plan:
        plan = self.plan()
        assert plan is not None
        return plan

    def urgency(self, *, riding: Plan | None = None) -> list[Build | Rank]:
        """All work that could be in a step, most urgent first; with those who ride in this one, behind their builds."""
        nobody = (-math.inf, -1)
        keys: dict[Build | Rank, tuple[bool, float, int, float, int]] = {}
        keys |= {build: (True, build.due, build.order, *nobody) for build in self.builds}
        keys |= {rank: (False, rank.due, rank.order, *nobody) for rank in self.ranks}
        for build, _, high in riding.appends if riding else ():
            if high == build.prefix.tokens:
                keys |= {
                    rank: (True, build.due, build.order, rank.due, rank.order) for rank in build.ranks if not rank.over
                }
        return sorted(keys, key=keys.__getitem__)

    def predicted(self, plan: Plan) -> float:
        features = CostModel.features(
            [(high - low, low) for _, low, high in plan.appends],
            [(len(rank.candidates), len(rank.history)) for rank in plan.scores],
        )
        return sum(price * amount for price, amount in zip(COSTS, features, strict=True))


dues = st.sampled_from((0.0, 1.0, 1.0, 2.0, 3.0)) | st.floats(0, 3)


grains = st.sampled_from((1, 2, 4))


def draw_work(data: st.DataObject, events: asyncio.AbstractEventLoop, *, most: int = 5, grain: int = 1) -> Work:
    """Builds and ranks of two models, some builds with ranks that wait for them; at times very short steps."""
    step_s = data.draw(st.sampled_from((1e-4, 2e-3, 5e-3, 20e-3, 1.0)), label="step_s")
    work = Work(events, step_s=step_s, grain=grain)
    models = st.sampled_from((0, 0, 0, 1))
    for _ in range(data.draw(st.integers(0, most), label="builds")):
        tokens = data.draw(st.integers(1, LONGEST))
        launched = data.draw(st.one_of(st.just(0), st.integers(0, tokens - 1)))
        due, model = data.draw(dues), data.draw(models)
        waits = data.draw(st.lists(st.tuples(dues, st.integers(1, 300), st.booleans()), max_size=2))
        riders = [work.rank(due + later, tokens, rows, model, over=over) for later, rows, over in waits]
        work.build(due, tokens, launched, model, riders)
    for _ in range(data.draw(st.integers(0, most), label="ranks")):
        work.ready(
            data.draw(dues), data.draw(st.integers(0, LONGEST)), data.draw(st.integers(1, 300)), data.draw(models)
        )
    return work


def test_nothing_to_run_is_no_step(events: asyncio.AbstractEventLoop) -> None:
    assert Work(events).plan() is None


@given(st.data())
def test_the_most_urgent_work_is_always_in_the_step(events: asyncio.AbstractEventLoop, data: st.DataObject) -> None:
    work = draw_work(data, events, grain=data.draw(grains))
    plan = work.plan()
    if plan is None:
        assert not work.builds
        assert not work.ranks
    else:
        assert work.urgency()[0] in [*(build for build, _, _ in plan.appends), *plan.scores]


@given(st.data())
def test_nothing_is_in_the_step_before_something_more_urgent(
    events: asyncio.AbstractEventLoop, data: st.DataObject
) -> None:
    work = draw_work(data, events, grain=data.draw(grains))
    if (plan := work.plan()) is not None:
        inside = {*(build for build, _, _ in plan.appends), *plan.scores}
        queue = [one for one in work.urgency(riding=plan) if one.served is plan.served]
        assert set(queue[: len(inside)]) == inside
        assert len(inside) == len(plan.appends) + len(plan.scores), "something is in the step twice"


@given(st.data())
def test_a_step_is_of_the_most_urgent_works_model_alone(events: asyncio.AbstractEventLoop, data: st.DataObject) -> None:
    work = draw_work(data, events)
    if (plan := work.plan()) is not None:
        served = {*(build.served for build, _, _ in plan.appends), *(rank.served for rank in plan.scores)}
        assert served == {plan.served} == {work.urgency()[0].served}


@given(st.data())
def test_a_chunk_begins_where_the_last_ended_and_ends_with_a_page_or_the_prefix(
    events: asyncio.AbstractEventLoop, data: st.DataObject
) -> None:
    work = draw_work(data, events, grain=data.draw(grains))
    if (plan := work.plan()) is not None:
        for build, low, high in plan.appends:
            assert build.launched == low < high <= build.prefix.tokens
            assert high % PAGE == 0 or high == build.prefix.tokens


@given(st.data())
def test_a_step_stays_within_its_time_but_for_its_first_piece(
    events: asyncio.AbstractEventLoop, data: st.DataObject
) -> None:
    work = draw_work(data, events)
    if (plan := work.plan()) is not None:
        assert plan.cost_s == pytest.approx(work.predicted(plan))
        if plan.cost_s > work.step_s:
            assert len(plan.appends) + len(plan.scores) == 1
            for build, low, high in plan.appends:
                assert high == min(low // PAGE * PAGE + PAGE, build.prefix.tokens)


@given(st.data())
def test_a_chunk_that_is_cut_is_of_whole_grains_the_nearest_to_what_fits(
    events: asyncio.AbstractEventLoop, data: st.DataObject
) -> None:
    grain = 4 * PAGE
    work = draw_work(data, events, grain=4)
    if (plan := work.plan()) is None:
        return
    for place, (build, low, high) in enumerate(plan.appends):
        if high == build.prefix.tokens:
            continue
        begin, spent = low // PAGE * PAGE, work.cost.append_s(high - low, low)
        left = work.step_s - work.cost.step_s - (_before(work, plan, build) - spent)
        if (high - begin) % grain:
            assert place == 0, "a crumb behind another append"
            assert high - begin < grain // 2, "half a grain would have been made a whole one"
            assert spent <= left + 1e-12 or (high == begin + PAGE and work.urgency()[0] is build)
            assert work.cost.append_s(high - low + PAGE, low) > left - 1e-12
        else:
            assert work.cost.append_s(high - low - grain // 2, low) <= left + 1e-12
            assert work.cost.append_s(high - low + grain // 2, low) > left - 1e-12


def test_a_long_build_goes_on_behind_ranks_that_leave_little_time(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events, grain=4, step_s=4e-3)
    build = work.build(due=2.0, tokens=LONGEST)
    work.ready(due=1.0, candidates=90)
    plan = work.planned()
    assert len(plan.scores) == 1
    assert plan.appends == [(build, 0, PAGE)]


@pytest.mark.parametrize(
    ("deadline", "in_flight_s", "pages"),
    [
        (1.0, 0.0, 5),
        (6e-3, 0.0, 3),
        (3e-3, 0.0, 1),
        (2e-3, 0.0, 0),
        (1e-3, 0.0, 5),  # it is late anyhow
        (10e-3, 4e-3, 3),
    ],
)
def test_what_is_packed_with_a_rank_does_not_make_it_late(
    events: asyncio.AbstractEventLoop, deadline: float, in_flight_s: float, pages: int
) -> None:
    """A step with the rank alone takes 1.1 ms, a page 1.3."""
    work = Work(events, step_s=8e-3, now=0.0)
    rank, build = work.ready(due=deadline), work.build(due=2.0, tokens=LONGEST)
    plan = Scheduler(work.cost, work.step_s).plan(work.builds, work.ranks, work.now, in_flight_s)
    assert plan is not None
    assert plan.scores == [rank]
    assert plan.appends == ([(build, 0, pages * PAGE)] if pages else [])


@given(st.data())
def test_a_step_is_as_full_as_it_can_be_in_that_order(events: asyncio.AbstractEventLoop, data: st.DataObject) -> None:
    work = draw_work(data, events)
    if (plan := work.plan()) is None:
        return
    left = work.step_s - plan.cost_s + 1e-12
    for build, _, high in plan.appends:
        if high < build.prefix.tokens:
            page = min(high + PAGE, build.prefix.tokens) - high
            assert work.cost.append_s(page, high) > work.step_s - work.cost.step_s - _before(work, plan, build) - 1e-12
    inside = {*(build for build, _, _ in plan.appends), *plan.scores}
    queue = [one for one in work.urgency(riding=plan) if one.served is plan.served and one not in inside]
    if queue:
        first = queue[0]
        if isinstance(first, Rank):
            assert first.cost_s > left - 2e-12
        else:
            page = min(first.launched // PAGE * PAGE + PAGE, first.prefix.tokens) - first.launched
            assert work.cost.append_s(page, first.launched) > left - 2e-12


def _before(work: Work, plan: Plan, build: Build) -> float:
    """What the plan had spent when it came to the build, and on it."""
    costs: dict[Build | Rank, float] = {rank: rank.cost_s for rank in plan.scores}
    costs |= {one: work.cost.append_s(high - low, low) for one, low, high in plan.appends}
    order = work.urgency(riding=plan)
    return sum(costs.get(one, 0.0) for one in order[: order.index(build) + 1])


@given(st.data())
def test_ranks_ride_with_the_last_chunk_of_their_build_and_no_earlier(
    events: asyncio.AbstractEventLoop, data: st.DataObject
) -> None:
    work = draw_work(data, events)
    if (plan := work.plan()) is not None:
        whole = {build for build, _, high in plan.appends if high == build.prefix.tokens}
        for build in work.builds:
            for rank in build.ranks:
                assert rank not in plan.scores or (build in whole and not rank.over)


@given(st.data())
def test_behind_a_head_a_build_goes_on_behind_what_was_kept(
    events: asyncio.AbstractEventLoop, data: st.DataObject
) -> None:
    work = draw_work(data, events, most=2, grain=data.draw(grains))
    for _ in range(data.draw(st.integers(1, 3))):
        tokens = data.draw(st.integers(PAGE + 1, LONGEST))
        head = data.draw(st.integers(1, (tokens - 1) // PAGE)) * PAGE
        rank = work.rank(data.draw(dues), tokens)
        build = work.build(data.draw(dues), tokens, ranks=[rank])
        build.head, build.base = head, data.draw(st.integers(head + 1, tokens))
        build.launched = data.draw(st.integers(0, head // PAGE - 1)) * PAGE
    plan = work.planned()
    chunks: dict[Build, list[tuple[int, int]]] = {}
    for build, low, high in plan.appends:
        chunks.setdefault(build, []).append((low, high))
    for build, of in chunks.items():
        assert len(of) == 1 or (len(of) == 2 and of[0][1] == build.head)
        reached = build.launched
        for low, high in of:
            assert low == reached < high
            assert high <= build.head or low >= build.base
            assert high % PAGE == 0 or high == build.prefix.tokens
            reached = build.behind(high)
        for rank in build.ranks:
            assert rank not in plan.scores or reached == build.prefix.tokens
    assert plan.cost_s == pytest.approx(work.predicted(plan))
    if len(chunks) + len(plan.scores) > 1 and work.grain == 1:
        assert plan.cost_s <= work.step_s + len(chunks) * work.cost.step_s


@pytest.mark.parametrize(("deadline", "chunks"), [(1.0, 2), (2.7e-3, 1)])
def test_what_is_new_behind_a_head_does_not_make_a_rank_late(
    events: asyncio.AbstractEventLoop, deadline: float, chunks: int
) -> None:
    """A step with the rank alone takes 1.1 ms, a page 1.3, and sixty tokens, less than a step by itself, 0.6."""
    work = Work(events, step_s=2.4e-3, now=0.0)
    work.ready(due=deadline)
    build = work.build(due=2.0, tokens=2 * PAGE + 60)
    build.head, build.base = PAGE, 2 * PAGE
    assert len(work.planned().appends) == chunks


def state(work: Work) -> list[dict[str, Any]]:
    everything: list[Build | Rank] = [
        *work.builds,
        *work.ranks,
        *(rank for build in work.builds for rank in build.ranks),
    ]
    return [
        {one.name: _plain(getattr(thing, one.name)) for one in dataclasses.fields(thing)} | {"over": _over(thing)}
        for thing in everything
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _over(thing: Build | Rank) -> bool:
    return thing.over if isinstance(thing, Rank) else thing.ended


@given(st.data())
def test_planning_changes_nothing_and_gives_the_same_plan_again(
    events: asyncio.AbstractEventLoop, data: st.DataObject
) -> None:
    work = draw_work(data, events)
    before, costs = state(work), work.cost.steps.coefficients
    plan = work.plan()
    assert state(work) == before
    assert work.cost.steps.coefficients == costs
    assert work.plan() == plan
    work.builds.reverse()
    work.ranks.reverse()
    assert work.plan() == plan, "the order in which work is handed over decided"


@given(st.data())
def test_step_by_step_every_token_is_run_once_and_every_rank_scored_once_behind_its_prefix(
    events: asyncio.AbstractEventLoop, data: st.DataObject
) -> None:
    work = draw_work(data, events, most=3, grain=data.draw(grains))
    everyone = [*work.ranks, *(rank for build in work.builds for rank in build.ranks if not rank.over)]
    builds = {build: list(range(build.launched)) for build in work.builds}
    scored: list[Rank] = []
    while (plan := work.plan()) is not None:
        for build, low, high in plan.appends:
            assert len(builds[build]) == low
            builds[build] += range(low, high)
            build.launched = high
        scored += plan.scores
        ended = [build for build in work.builds if not build.runnable]
        work.builds = [build for build in work.builds if build.runnable]
        work.ranks = [rank for rank in work.ranks if rank not in scored]
        work.ranks += [rank for build in ended for rank in build.ranks if not rank.over and rank not in scored]
    assert sorted(scored, key=id) == sorted(everyone, key=id)
    assert all(len(tokens) == build.prefix.tokens for build, tokens in builds.items())


@given(st.data())
def test_scores_go_apart_where_appends_behind_them_take_long(
    events: asyncio.AbstractEventLoop, data: st.DataObject
) -> None:
    work = draw_work(data, events)
    together, apart = work.plan(), work.plan(apart=True)
    if together is None or apart is None:
        assert together is apart
        return
    scored = [(len(rank.candidates), len(rank.history)) for rank in apart.scores]
    appended = work.predicted(together) - sum(
        price * n for price, n in zip(COSTS, CostModel.features([], scored), strict=True)
    )
    if apart.appends or not together.appends:
        assert apart == together
        assert not apart.appends or not work.ahead(apart) or appended <= 20.001 * COSTS[0]
    else:
        assert apart.scores == together.scores[: len(apart.scores)]
        assert apart.cost_s == pytest.approx(work.predicted(apart))
        assert appended >= 19.999 * COSTS[0]
        assert apart.scores == work.ahead(together)


def test_scores_wait_for_no_long_append_and_for_short_ones(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events, step_s=50e-3)
    rank = work.ready(due=2.0, tokens=100, candidates=10)
    build = work.build(due=1.0, tokens=10 * PAGE)
    assert (plan := work.plan(apart=True)) is not None
    assert plan.appends
    assert plan.scores == [rank]
    work.build(due=1.5, tokens=10 * PAGE)  # long together
    assert (plan := work.plan(apart=True)) is not None
    assert (plan.appends, plan.scores) == ([], [rank])
    work.ranks.clear()
    assert (plan := work.plan(apart=True)) is not None
    assert plan.appends[0][0] is build


def test_a_short_rank_waits_no_longer_than_a_step_behind_a_long_append(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events)
    build = work.build(due=2.0, tokens=LONGEST)
    first = work.planned()
    assert [one for one, _, _ in first.appends] == [build]
    assert first.appends[0][2] < LONGEST
    assert first.cost_s <= work.step_s
    build.launched = first.appends[0][2]
    urgent = work.ready(due=1.0)
    second = work.planned()
    assert second.scores == [urgent]
    assert [one for one, _, _ in second.appends] == [build]


def test_equal_deadlines_go_to_whoever_came_first(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events, step_s=1e-4)
    first, second = work.ready(due=1.0), work.ready(due=1.0)
    work.ranks.reverse()
    assert work.planned().scores == [first]
    work.ranks.remove(first)
    assert work.planned().scores == [second]


def test_the_other_models_work_waits_for_its_own_step(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events, step_s=1.0)
    old, new = work.ready(due=1.0, model=0), work.ready(due=2.0, model=1)
    also_old = work.build(due=3.0, tokens=50, model=0)
    plan = work.planned()
    assert plan.served is old.served
    assert (plan.scores, [build for build, _, _ in plan.appends]) == ([old], [also_old])
    work.ranks.remove(old)
    work.builds.clear()
    assert work.planned().scores == [new]


def test_a_rank_rides_with_its_build_where_both_fit(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events, step_s=1.0)
    mine, gone = work.rank(due=1.0, tokens=300), work.rank(due=1.0, tokens=300, over=True)
    build = work.build(due=1.0, tokens=300, ranks=[mine, gone])
    plan = work.planned()
    assert plan.appends == [(build, 0, 300)]
    assert plan.scores == [mine]


def test_a_rank_does_not_ride_with_a_chunk_that_is_not_the_last(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events)
    rank = work.rank(due=1.0, tokens=LONGEST, candidates=1)
    build = work.build(due=1.0, tokens=LONGEST, ranks=[rank])
    plan = work.planned()
    assert plan.appends == [(build, 0, 3 * PAGE)]
    assert plan.cost_s + rank.cost_s < work.step_s
    assert plan.scores == []


def test_what_is_small_does_not_overtake_what_is_more_urgent_and_does_not_fit(
    events: asyncio.AbstractEventLoop,
) -> None:
    work = Work(events)
    first = work.ready(due=1.0)
    work.ready(due=2.0, candidates=1000)
    work.ready(due=3.0, candidates=1)
    assert work.planned().scores == [first]
    work = Work(events, step_s=2e-3)
    build = work.build(due=1.0, tokens=50)
    work.build(due=2.0, tokens=300)
    work.build(due=3.0, tokens=1)
    assert work.planned().appends == [(build, 0, 50)]


def test_what_only_has_to_be_scored_comes_before_what_is_appended(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events, step_s=2e-3)
    build = work.build(due=1.0, tokens=300)
    rank = work.ready(due=3.0, candidates=50)
    plan = work.planned()
    assert plan.scores == [rank]
    assert all(high < build.prefix.tokens for _, _, high in plan.appends)


def test_a_rank_without_a_deadline_keeps_no_append_waiting_that_has_one(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events, step_s=2e-3)
    build = work.build(due=1.0, tokens=300)
    rank = work.ready(due=3.0, candidates=50)
    rank.deadline = math.inf
    plan = work.planned()
    assert [(build, 0)] == [(each, low) for each, low, _ in plan.appends]
    assert plan.scores == []


def test_what_cannot_be_in_time_comes_behind_what_can(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events, now=0.0)
    hopeless, in_time = work.build(0.01, LONGEST), work.build(0.3, 2 * PAGE)
    late, resident = work.rank(0.0), work.rank(0.2)
    for build, due in ((hopeless, 0.01), (in_time, 0.3)):
        build.ranks.append(work.rank(due))
    work.ranks = [late, resident]
    plan = work.planned()
    assert plan.scores[0] is resident
    assert plan.appends[0][0] is in_time
    hopeless.claims = 1  # pre-inference is of use when it is late, too
    assert work.planned().appends[0][0] is hopeless


def test_what_cannot_be_in_time_is_done_where_there_is_nothing_else(events: asyncio.AbstractEventLoop) -> None:
    work = Work(events, now=0.0)
    work.build(0.01, LONGEST).ranks.append(work.rank(0.01))
    assert [build for build, _, _ in work.planned().appends] == work.builds
