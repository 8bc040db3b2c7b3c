"""Gateway and instances in virtual time: floods, load that shifts, and caches that are empty all at once."""

import asyncio
from pathlib import Path as FilePath

import pytest

from behaviours import numbered
from engines import in_virtual_time
from fleet import BUDGETS, COSTS, Fleet, fleet
from relaygr import Decision, Path
from relaygr.history import PAGE
from relaygr.relay import Placement, RouterConfig

LONG = 4000
FULL_S = LONG * COSTS.token
"""What the device needs for one of them."""
IN_TIME = {Path.RESIDENT, Path.WAITED, Path.EXTENDED}


def leased(fleet: Fleet, slot: str) -> int:
    """Pages that pre-infers keep for ranks to come."""
    loop = fleet.engines[slot]._loop
    assert loop is not None
    claims = [claim for of_user in loop.claims._claims.values() for claim in of_user]
    held = [claim.lease._leased for claim in claims]
    return len({int(page) for leased in held if leased is not None for page in leased.pages})


@in_virtual_time
async def test_in_a_flood_leases_and_pre_inference_stay_within_budget_and_no_rank_starves(tmp_path: FilePath) -> None:
    share, memory = 0.5, 0.4
    async with fleet(tmp_path, pages=1000, pre_infer_share=share, lease_share=memory) as here:
        users = [f"u{number}" for number in range(300)]
        for number, user in enumerate(users):
            here.store_history(user, numbered(LONG + number % 50, salt=number))
        rate = 3 * len(here.engines) / FULL_S  # three times what they could compute in full
        began = here.now
        busiest = dict.fromkeys(here.engines, 0)
        flood = asyncio.create_task(here.arrive(users, rate))
        while not flood.done():
            await asyncio.sleep(0.5e-3)
            for slot in here.engines:
                busiest[slot] = max(busiest[slot], leased(here, slot))
        await flood
        elapsed = here.now - began
        assert sum(here.decisions()[refusal] for refusal in (Decision.NO_CAPACITY, Decision.NO_MEMORY)) > 50
        for slot, engine in here.engines.items():
            assert 0 < busiest[slot] <= memory * 1000
            assert 0 < engine.counts().pre_infer_busy_s <= share * elapsed
        assert not here.refused
        assert len(here.answers) == len(users)
        assert here.ranking_ms()[-1] <= BUDGETS.ranking_ms


@in_virtual_time
async def test_a_short_rank_is_served_at_once_in_a_flood_of_long_ones(tmp_path: FilePath) -> None:
    async with fleet(tmp_path) as here:
        for number in range(200):
            here.store_history(f"u{number}", numbered(LONG, salt=number))
        flood = asyncio.create_task(here.arrive([f"u{number}" for number in range(200)], 3 * 2 / FULL_S))
        await asyncio.sleep(0.2)
        for number in range(50):
            here.store_history(f"short{number}", numbered(50, salt=number))
            answer = await here.recommend(f"short{number}")
            assert answer is not None
            assert answer.path in (Path.FULL, Path.TRUNCATED)
            assert answer.stages_ms["ranking"] <= BUDGETS.ranking_ms
        await flood


@in_virtual_time
async def test_short_histories_are_never_pre_inferred_however_long_the_queue(tmp_path: FilePath) -> None:
    async with fleet(tmp_path) as here:
        users = [f"u{number}" for number in range(400)]
        for number, user in enumerate(users):
            here.store_history(user, numbered(40, salt=number))  # 0.4 ms of work: less than a signal is worth
        await here.arrive(users, 3 * 2 / (40 * COSTS.token))
        assert here.trigger.decisions == {Decision.NOT_AT_RISK: 400}
        assert not any(engine.status().outcomes for engine in here.engines.values())


@in_virtual_time
async def test_signal_and_rank_meet_even_when_load_shifts_between_them(tmp_path: FilePath) -> None:
    async with fleet(tmp_path, instances=4, router=RouterConfig(load_factor=1.05)) as here:
        users = [f"u{number % 60}" for number in range(400)]
        for number in range(60):
            here.store_history(f"u{number}", numbered(2500 + 40 * number, salt=number))
        await here.arrive(users, 2.0 * 4 / FULL_S)
        assert here.router.placements[Placement.OVERFLOWED] > 50, "load did shift"
        signalled = [answer for _, answer in here.answers if answer.signalled is not None]
        assert len(signalled) > 200
        assert all(answer.instance == answer.signalled for answer in signalled)
        assert here.router.placements[Placement.MOVED] == 0


@pytest.mark.parametrize("seed", [0, 1])
@in_virtual_time
async def test_empty_caches_above_fulls_load_cost_no_deadline_and_fill_again(tmp_path: FilePath, seed: int) -> None:
    async with fleet(tmp_path, instances=2, max_ranks=40) as here:
        users = [f"u{number}" for number in range(50)]
        for number, user in enumerate(users):
            here.store_history(user, numbered(LONG, salt=number))
        rate = 3 * 2 / FULL_S  # three times what the devices could compute in full
        await here.arrive(users, 0.1 * rate, seed)
        warm = here.now
        load = asyncio.create_task(here.arrive(users * 24, rate, seed))
        await asyncio.sleep(1.5)
        cold = here.now
        for engine in here.engines.values():
            for user in users:
                await engine.evict(user)
        await load
        lead_s = BUDGETS.lead_ms / 1e3  # those who came before had been signalled, in vain
        assert _hits(here, warm, cold - lead_s) > 0.99
        assert _hits(here, cold - lead_s, cold + lead_s) < 0.7, "they were cold"
        assert here.paths(cold - lead_s)[Path.TRUNCATED] > 0
        assert here.ranking_ms()[-1] <= BUDGETS.ranking_ms
        assert set(here.refused) <= {"Overloaded", "DeadlineExceeded"}
        assert here.refused["DeadlineExceeded"] <= 0.01 * here.paths(cold - lead_s).total(), "P99 holds"
        assert here.paths(cold + 4.0).total() > 100
        assert _hits(here, cold + 4.0) > 0.99, "at the same load"


@in_virtual_time
async def test_more_ranks_than_are_taken_get_429_and_the_others_are_in_time(tmp_path: FilePath) -> None:
    async with fleet(tmp_path, instances=1, max_ranks=4) as here:
        users = [f"u{number}" for number in range(60)]
        for number, user in enumerate(users):
            here.store_history(user, numbered(LONG, salt=number))
        await asyncio.gather(*(here.recommend(user) for user in users))
        assert here.refused["Overloaded"] > 0
        assert set(here.refused) == {"Overloaded"}
        assert len(here.answers) >= 4
        assert here.ranking_ms()[-1] <= BUDGETS.ranking_ms


def _hits(here: Fleet, since: float, until: float = 1e9) -> float:
    """The share of answers that found their prefix made, or being made."""
    paths = here.paths(since, until)
    return sum(paths[path] for path in IN_TIME) / max(1, paths.total())


def test_the_fleet_is_what_it_says() -> None:
    assert FULL_S == 0.04
    assert BUDGETS.ranking_ms < 1e3 * FULL_S, "a long history cannot be ranked in full in time"
    assert PAGE == 128


@in_virtual_time
async def test_ranks_that_are_late_together_are_signalled_the_next_time(tmp_path: FilePath) -> None:
    """Each by itself keeps to its budget, so none is at risk; all at once most would be late, and that is learned."""
    async with fleet(tmp_path, instances=1, on_miss="full") as here:
        length = int(0.6 * BUDGETS.ranking_ms / 1e3 / COSTS.token)
        for number in range(200):
            here.store_history(f"u{number}", numbered(length, salt=number))
        first = [here.recommend(f"u{number}") for number in range(20)]
        await asyncio.gather(*first)
        assert here.trigger.decisions == {Decision.NOT_AT_RISK: 20}
        assert here.refused.total() > 10
        for burst in range(1, 10):
            await asyncio.sleep(5.0)  # the queue is gone, and so is what was heard of it
            users = [f"u{number}" for number in range(20 * burst, 20 * burst + 20)]
            await asyncio.gather(*(here.recommend(user) for user in users))
        assert here.trigger.decisions[Decision.ADMIT] > 100
