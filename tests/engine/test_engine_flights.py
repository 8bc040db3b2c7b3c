"""One compute or reload per prefix identity, however many ask at once; what a rank waits for inherits its deadline."""

import asyncio

import pytest

from behaviours import numbered
from engines import COSTS, WatchedDevice, in_virtual_time, opened
from relaygr import Path, PreInferOutcome, Ranked
from relaygr.engine.simulated import SimulatedModel


@pytest.mark.parametrize("depth", [1, 3])
@in_virtual_time
async def test_ten_ranks_at_once_compute_once(depth: int) -> None:
    async with opened() as bench:
        bench.device.depth = depth
        ranked = await asyncio.gather(*(bench.rank("u1", numbered(300)) for _ in range(10)))
        assert [answer.path for answer in ranked] == [Path.FULL] + [Path.WAITED] * 9
        assert bench.device.appended == 300


@in_virtual_time
async def test_ten_ranks_at_once_extend_once() -> None:
    async with opened() as bench:
        await bench.rank("u1", numbered(300))
        ranked = await asyncio.gather(*(bench.rank("u1", numbered(310)) for _ in range(10)))
        assert [answer.path for answer in ranked] == [Path.EXTENDED] + [Path.WAITED] * 9
        assert bench.device.appended == 310


@in_virtual_time
async def test_ten_ranks_at_once_reload_once() -> None:
    async with opened(spare=2, host=20) as bench:
        await bench.rank("u1", numbered(300))
        await bench.push_out("u1")
        ranked = await asyncio.gather(*(bench.rank("u1", numbered(300)) for _ in range(10)))
        assert [answer.path for answer in ranked] == [Path.RELOADED] + [Path.WAITED] * 9
        assert (bench.device.appended, bench.device.reloads) == (0, 1)


@pytest.mark.parametrize("within", [None, 0.5])
@in_virtual_time
async def test_one_reload_though_the_device_is_busy(within: float | None) -> None:
    """Waiting for a copy under way does not mean waiting for the device."""
    async with opened(spare=16, host=20, step_ms=1.0) as bench:
        await bench.rank("u1", numbered(300))
        await bench.settle()
        await bench.push_out("u1")
        busy = [asyncio.create_task(bench.rank(f"busy {k}", numbered(300, salt=k), within=0.1)) for k in range(1, 4)]
        await asyncio.sleep(1e-4)
        ranked = await asyncio.gather(*(bench.rank("u1", numbered(300), within=within) for _ in range(5)))
        assert [answer.path for answer in ranked] == [Path.RELOADED] + [Path.WAITED] * 4
        assert bench.device.reloads == 1
        await asyncio.gather(*busy)


@in_virtual_time
async def test_ranks_and_pre_infers_of_one_prefix_share_one_flight() -> None:
    async with opened() as bench:
        calls = [bench.pre_infer("u1", numbered(300)) if k % 2 else bench.rank("u1", numbered(300)) for k in range(8)]
        await asyncio.gather(*calls)
        assert bench.device.appended == 300
        assert bench.engine.status().outcomes == {"JOINED": 4}


@in_virtual_time
async def test_those_who_come_one_by_one_share_one_flight() -> None:
    async with opened(step_ms=1.0) as bench:
        tasks = []
        for k in range(12):
            call = bench.rank("u1", numbered(300)) if k % 3 else bench.pre_infer("u1", numbered(300))
            tasks.append(asyncio.create_task(call))
            await asyncio.sleep(0.4e-3)
        await asyncio.gather(*tasks)
        assert bench.device.appended == 300


@in_virtual_time
async def test_a_growing_history_in_flight_is_computed_once() -> None:
    """Each waits for the one before and appends what is missing."""
    async with opened() as bench:
        ranked = await asyncio.gather(*(bench.rank("u1", numbered(300 + 5 * k)) for k in range(5)))
        assert [answer.used for answer in ranked] == [300, 305, 310, 315, 320]
        assert bench.device.appended == 320


@in_virtual_time
async def test_users_do_not_share_flights_or_prefixes() -> None:
    async with opened() as bench:
        await asyncio.gather(bench.rank("u1", numbered(100)), bench.rank("u2", numbered(100)))
        assert bench.device.appended == 200


@in_virtual_time
async def test_the_one_in_flight_survives_the_one_who_began_it() -> None:
    async with opened(step_ms=1.0) as bench:
        first = asyncio.create_task(bench.rank("u1", numbered(300)))
        await asyncio.sleep(1e-3)
        second = asyncio.create_task(bench.rank("u1", numbered(300)))
        await asyncio.sleep(1e-3)
        first.cancel()
        assert (await second).path is Path.WAITED
        assert bench.device.appended == 300


@in_virtual_time
async def test_a_rank_hands_its_deadline_to_the_pre_infer_it_waits_for() -> None:
    async with opened(step_ms=1.0) as bench:
        first, second = numbered(300), numbered(300, salt=1)
        late = asyncio.create_task(bench.pre_infer("u1", first, within=1.0))
        sooner = asyncio.create_task(bench.pre_infer("u2", second, within=0.5))
        await asyncio.sleep(0.5e-3)
        assert [row.history == second for step in bench.device.launched for row in step.appends] == [True]
        ranked = await bench.rank("u1", first, within=0.1)
        assert ranked.path is Path.WAITED
        order = [row.history == first for step in bench.device.launched for row in step.appends]
        assert order[:4] == [False, True, True, True]
        assert [await late, await sooner] == [PreInferOutcome.COMPUTED, PreInferOutcome.COMPUTED]


@in_virtual_time
async def test_a_rank_hands_its_deadline_to_the_shorter_build_it_needs_first() -> None:
    async with opened(step_ms=1.0) as bench:
        first, second = numbered(300), numbered(300, salt=1)
        late = asyncio.create_task(bench.pre_infer("u1", first[:290], within=1.0))
        sooner = asyncio.create_task(bench.pre_infer("u2", second, within=0.5))
        await asyncio.sleep(0.5e-3)
        ranked = await bench.rank("u1", first, within=0.1)
        assert ranked.path is Path.EXTENDED
        order = [row.history == second for step in bench.device.launched for row in step.appends]
        assert order[:5] == [True, False, False, False, False]
        await asyncio.gather(late, sooner)
        assert bench.device.appended == 600


@in_virtual_time
async def test_a_short_rank_does_not_wait_for_a_long_one() -> None:
    """Every append is chunked, and the more urgent goes first."""
    async with opened(step_ms=1.0) as bench:
        long = asyncio.create_task(bench.rank("u1", numbered(400)))
        await asyncio.sleep(0.1e-3)
        ranked = await bench.rank("u2", numbered(10), within=0.1)
        chunk = COSTS.step + 128 * COSTS.token
        assert ranked.timings.total <= 1e3 * (chunk + COSTS.step + 10 * COSTS.token + 3 * COSTS.candidate)
        assert not long.done()
        assert (await long).used == 400


@in_virtual_time
async def test_a_rank_waits_for_the_step_in_flight_and_not_for_another_long_one() -> None:
    """The next one is launched when the first is nearly over, so that it may be the rank's."""
    async with opened(spare=100, max_history=4000, step_ms=20.0, device=WatchedDevice(depth=2)) as bench:
        await bench.rank("u", numbered(300))
        long = asyncio.create_task(bench.pre_infer("long", numbered(4000, salt=1)))
        await asyncio.sleep(5e-3)
        began = bench.now
        assert (await bench.rank("u", numbered(300))).path is Path.RESIDENT
        assert bench.now - began < 20e-3
        assert await long is PreInferOutcome.COMPUTED


@in_virtual_time
async def test_a_device_is_not_left_waiting_for_the_next_long_step() -> None:
    async with opened(spare=100, max_history=4000, step_ms=20.0, device=WatchedDevice(depth=2)) as bench:
        began = bench.now
        long = asyncio.create_task(bench.pre_infer("long", numbered(4000)))
        await asyncio.sleep(10e-3)
        assert bench.engine.status().steps_in_flight == 1
        await asyncio.sleep(7e-3)
        assert bench.engine.status().steps_in_flight == 2
        await long
        steps = [step for step in bench.device.launched if step.appends]
        assert len(steps) > 1
        assert bench.now - began == pytest.approx(sum(COSTS.of_step(step) for step in steps), rel=1e-6)


@pytest.mark.parametrize("waits", [True, False])
@in_virtual_time
async def test_the_loop_takes_a_turn_before_a_step_ends_only_where_something_waits_behind_it(waits: bool) -> None:
    async with opened(spare=100, max_history=4000, step_ms=20.0, device=WatchedDevice(depth=2)) as bench:
        assert bench.engine._loop is not None
        turns = bench.engine._loop._turns
        taken, turn, began = list[float](), turns._turn, bench.now

        def noted() -> None:
            taken.append(bench.now - began)
            turn()

        turns._turn = noted
        first = asyncio.create_task(bench.pre_infer("first", numbered(1500)))
        await asyncio.sleep(1e-3)
        second = asyncio.create_task(bench.pre_infer("second", numbered(1500, salt=1))) if waits else None
        await first
        step_s = COSTS.of_step(bench.device.launched[0])
        assert bench.now - began == pytest.approx(step_s)
        assert any(2e-3 < at < 0.99 * step_s for at in taken) == waits
        if second is not None:
            await second
            assert bench.now - began == pytest.approx(2 * step_s)


@in_virtual_time
async def test_appends_go_on_though_there_is_always_something_to_score() -> None:
    async with opened(spare=100, max_history=4000, step_ms=20.0, device=WatchedDevice(depth=2)) as bench:
        await bench.rank("u", numbered(200))
        bench.device.forget()
        long = asyncio.create_task(bench.pre_infer("long", numbered(4000, salt=1)))
        ranks: list[asyncio.Task[Ranked]] = []
        while not long.done():
            assert len(ranks) < 1000
            ranks.append(asyncio.create_task(bench.rank("u", numbered(200))))
            await asyncio.sleep(COSTS.step)
        await asyncio.gather(*ranks)
        assert any(step.scores and not step.appends for step in bench.device.launched), "none went apart"


@in_virtual_time
async def test_a_rank_short_of_time_waits_for_a_reload_though_the_device_is_busy() -> None:
    async with opened(spare=16, host=20, step_ms=1.0, on_miss="truncate") as bench:
        await bench.rank("u1", numbered(300))
        await bench.push_out("u1")
        busy = [asyncio.create_task(bench.rank(f"busy {k}", numbered(300, salt=k), within=0.1)) for k in range(1, 4)]
        await asyncio.sleep(1e-4)
        first = asyncio.create_task(bench.rank("u1", numbered(300)))
        await asyncio.sleep(0)
        assert (await bench.rank("u1", numbered(300), within=0.0099)).path is Path.WAITED
        assert (await first).path is Path.RELOADED
        assert [(await task).path for task in busy] == [Path.FULL] * 3


@in_virtual_time
async def test_the_one_in_flight_survives_for_one_who_needs_more_than_it() -> None:
    async with opened(step_ms=1.0) as bench:
        first = asyncio.create_task(bench.rank("u1", numbered(300)))
        await asyncio.sleep(1e-3)
        second = asyncio.create_task(bench.rank("u1", numbered(310)))
        await asyncio.sleep(1e-3)
        first.cancel()
        assert (await second).path is Path.EXTENDED
        assert bench.device.appended == 310


@in_virtual_time
async def test_the_one_in_flight_survives_for_a_rank_that_is_still_to_come() -> None:
    """Two requests are pre-inferred; the rank of one is cancelled, the other's will come."""
    async with opened(step_ms=1.0) as bench:
        ahead = [asyncio.create_task(bench.pre_infer("u1", numbered(300))) for _ in range(2)]
        await asyncio.sleep(1e-3)
        rank = asyncio.create_task(bench.rank("u1", numbered(300)))
        await asyncio.sleep(1e-4)
        rank.cancel()
        assert [await outcome for outcome in ahead] == [PreInferOutcome.COMPUTED, PreInferOutcome.JOINED]
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT
        assert bench.device.appended == 300


@in_virtual_time
async def test_no_flight_begins_for_a_model_that_is_not_served_any_more() -> None:
    async with opened(spare=16, max_history=1000) as bench:
        history = numbered(900)
        first = asyncio.create_task(bench.pre_infer("u1", history[:500]))
        await asyncio.sleep(1e-4)
        longer = asyncio.create_task(bench.pre_infer("u1", history))
        await asyncio.sleep(1e-4)
        await bench.swap(SimulatedModel("new"))
        bench.device.forget()
        assert [await first, await longer] == [PreInferOutcome.FAILED] * 2
        await bench.settle()
        assert bench.device.appended == 0
        assert bench.engine.status().leases == 0
