"""Another model, and users who are forgotten: what was cached is a miss, what runs finishes as it began."""

import asyncio

import pytest

from behaviours import numbered
from engines import Bench, WatchedDevice, in_virtual_time, opened
from relaygr import Path, PreInferOutcome
from relaygr.engine.simulated import SimulatedModel
from relaygr.engine.step import Direction, Model, PageCopy, Served, Step
from relaygr.errors import Unavailable

OLD, NEW = SimulatedModel("old"), SimulatedModel("new")


def tables(epoch: int) -> SimulatedModel:
    """The same model with other tables."""
    return SimulatedModel("same", epoch=epoch)


@in_virtual_time
async def test_prefixes_of_the_old_model_become_misses_in_both_tiers() -> None:
    async with opened(host=20, model=OLD) as bench:
        await bench.rank("u1", numbered(300))
        await bench.settle()
        assert (bench.engine.status().device_prefixes, bench.engine.status().host_prefixes) == (1, 1)
        await bench.swap(NEW)
        status = bench.engine.status()
        assert (status.version, status.device_prefixes, status.host_prefixes) == ("new", 0, 0)
        assert (status.device_pages_free, status.host_pages_free) == (status.device_pages, status.host_pages)
        assert (await bench.rank("u1", numbered(300))).path is Path.FULL
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("step_ms", [1.0, 50.0])
@pytest.mark.parametrize("after", [0.0, 0.1e-3, 1e-3, 2e-3, 3e-3, 5e-3])
@in_virtual_time
async def test_what_runs_finishes_on_the_old_model(after: float, step_ms: float, depth: int) -> None:
    """Scores are checked against the model that was served when the call was made."""
    async with opened(model=OLD, device=WatchedDevice(depth=depth), step_ms=step_ms, spare=20) as bench:
        running = [asyncio.create_task(bench.rank(user, numbered(300))) for user in ("u1", "u1", "u2", "cat")]
        running.append(asyncio.create_task(bench.rank("u1", numbered(310))))
        await asyncio.sleep(after)
        await bench.swap(NEW)
        new = [asyncio.create_task(bench.rank(user, numbered(300))) for user in ("u1", "u2", "dan")]
        await asyncio.gather(*running, *new)
        assert {step.served.version for step in bench.device.launched} == {"old", "new"}
        assert (await bench.rank("u1", numbered(310))).path in (Path.EXTENDED, Path.RESIDENT)
        assert (await bench.rank("u2", numbered(300))).path is Path.RESIDENT


@in_virtual_time
async def test_a_pre_infer_of_the_old_model_is_of_no_use_to_a_rank_of_the_new() -> None:
    async with opened(model=OLD) as bench:
        await bench.pre_infer("u1", numbered(300))
        under_way = asyncio.create_task(bench.pre_infer("u2", numbered(300)))
        await asyncio.sleep(1e-4)
        await bench.swap(NEW)
        assert (bench.engine.status().leases, await under_way) == (0, PreInferOutcome.FAILED)
        assert (await bench.rank("u1", numbered(300))).path is Path.FULL
        assert (await bench.rank("u2", numbered(300))).path is Path.FULL


@in_virtual_time
async def test_what_is_being_written_back_during_a_swap_is_not_kept() -> None:
    async with opened(host=20, model=OLD) as bench:
        await bench.rank("u1", numbered(300))
        await asyncio.sleep(1e-4)
        assert bench.engine.status().copies_in_flight == 1
        await bench.swap(NEW)
        await bench.settle()
        assert bench.engine.status().host_prefixes == 0
        assert bench.engine.status().host_pages_free == 20


@in_virtual_time
async def test_what_is_being_reloaded_during_a_swap_answers_for_the_old_model() -> None:
    async with opened(host=20, model=OLD) as bench:
        await bench.rank("u1", numbered(300))
        await bench.push_out("u1")
        running = asyncio.create_task(bench.rank("u1", numbered(300)))
        await asyncio.sleep(1e-4)
        await bench.swap(NEW)
        assert (await running).path is Path.RELOADED
        assert (await bench.rank("u1", numbered(300))).path is Path.FULL


@in_virtual_time
async def test_the_last_of_swaps_at_once_is_served() -> None:
    async with opened(model=OLD) as bench:
        models = [SimulatedModel(f"model {k}") for k in range(5)]
        running = asyncio.create_task(bench.rank("u1", numbered(300)))
        await asyncio.sleep(0)
        await asyncio.gather(*(bench.swap(model) for model in models))
        assert bench.engine.status().version == "model 4"
        await running
        assert (await bench.rank("u1", numbered(300))).path is Path.FULL


class SlowToPrepare(WatchedDevice):
    """Each model takes half as long to prepare as the one before."""

    seconds = 1.0

    async def prepare(self, model: Model) -> Served:
        self.seconds /= 2
        await asyncio.sleep(self.seconds)
        return await super().prepare(model)


@in_virtual_time
async def test_the_model_asked_for_last_is_served_however_long_the_others_take() -> None:
    async with opened(model=OLD, device=SlowToPrepare()) as bench:
        models = [SimulatedModel(f"model {k}") for k in range(5)]
        await asyncio.gather(*(bench.swap(model) for model in models))
        assert bench.engine.status().version == "model 4"


@pytest.mark.parametrize(("accept", "path", "epoch"), [(0, Path.FULL, 5), (1, Path.RESIDENT, 4)])
@in_virtual_time
async def test_tables_a_little_behind_serve_where_that_is_allowed(accept: int, path: Path, epoch: int) -> None:
    async with opened(host=20, model=tables(4), accept_epochs=accept) as bench:
        await bench.rank("u1", numbered(300))
        await bench.swap(tables(5))
        ranked = await bench.rank("u1", numbered(300))
        assert (ranked.path, ranked.epoch) == (path, epoch)
        await bench.swap(tables(6))
        ranked = await bench.rank("u1", numbered(300))
        assert (ranked.path, ranked.epoch) == (Path.FULL, 6)


@in_virtual_time
async def test_a_prefix_that_new_tables_extend_counts_by_its_oldest_part() -> None:
    async with opened(model=tables(0), accept_epochs=1) as bench:
        await bench.rank("u1", numbered(300))
        await bench.swap(tables(1))
        ranked = await bench.rank("u1", numbered(310))
        assert (ranked.path, ranked.epoch) == (Path.EXTENDED, 0)
        ranked = await bench.rank("u1", numbered(310))
        assert (ranked.path, ranked.epoch) == (Path.RESIDENT, 0)
        await bench.swap(tables(2))
        assert (await bench.rank("u1", numbered(310))).epoch == 2


@in_virtual_time
async def test_tables_ahead_never_serve() -> None:
    """Neither a rank that began before the swap, nor the model that is swapped back in."""
    async with opened(model=tables(0), accept_epochs=1) as bench:
        await bench.rank("u1", numbered(300))
        await bench.swap(tables(1))
        assert (await bench.rank("u1", numbered(310))).epoch == 0
        await bench.swap(tables(0))
        ranked = await bench.rank("u1", numbered(310))
        assert (ranked.epoch, ranked.path) != (0, Path.RESIDENT)


@in_virtual_time
async def test_a_rank_begun_before_the_swap_is_not_given_tables_of_after() -> None:
    async with opened(model=tables(0), accept_epochs=1, spare=0, max_history=300) as bench:
        await bench.rank("u1", numbered(200))
        filler = asyncio.create_task(bench.rank("u2", numbered(300), candidates=10_000, within=0.5))
        await asyncio.sleep(1e-4)
        starved = asyncio.create_task(bench.rank("u1", numbered(300), within=0.9))
        await asyncio.sleep(1e-4)
        await bench.swap(tables(1))
        newer = asyncio.create_task(bench.rank("u1", numbered(300), within=0.8))
        await asyncio.gather(filler, starved, newer)
        assert (await starved).epoch == 0


async def kept(bench: Bench, user: str) -> int:
    """How many tokens a rank of 300 finds, in any tier."""
    await bench.settle()
    bench.device.forget()
    await bench.rank(user, numbered(300))
    return 300 - bench.device.appended


@in_virtual_time
async def test_an_evicted_user_is_in_no_tier() -> None:
    async with opened(host=20) as bench:
        before = bench.state()
        await bench.rank("u1", numbered(300))
        await bench.settle()
        assert await bench.engine.evict("u1") == 2
        assert await bench.engine.evict("u1") == 0
        assert bench.state() == before
        assert await kept(bench, "u1") == 0


@in_virtual_time
async def test_evicting_ends_leases() -> None:
    async with opened() as bench:
        before = bench.state()
        await bench.pre_infer("u1", numbered(300))
        await bench.engine.evict("u1")
        assert bench.state() == before


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("after", [0.0, 0.1e-3, 1e-3, 2e-3, 3e-3])
@in_virtual_time
async def test_nothing_in_flight_is_kept_of_an_evicted_user(after: float, depth: int) -> None:
    async with opened(host=20, device=WatchedDevice(depth=depth), step_ms=1.0) as bench:
        calls = [bench.rank("u1", numbered(length)) for length in (200, 250, 300, 300)]
        running = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(after)
        await bench.engine.evict("u1")
        await asyncio.gather(*running)
        assert await kept(bench, "u1") == 0


@pytest.mark.parametrize("after", [0.0, 0.1e-3, 1e-3, 2e-3])
@in_virtual_time
async def test_no_pre_infer_in_flight_is_kept_of_an_evicted_user(after: float) -> None:
    async with opened(step_ms=1.0) as bench:
        running = [asyncio.create_task(bench.pre_infer("u1", numbered(length))) for length in (200, 250, 300, 300)]
        await asyncio.sleep(after)
        await bench.engine.evict("u1")
        await asyncio.gather(*running)
        assert bench.engine.status().leases == 0
        assert await kept(bench, "u1") == 0


@pytest.mark.parametrize("direction", list(Direction))
@in_virtual_time
async def test_a_copy_in_flight_keeps_nothing_of_an_evicted_user(direction: Direction) -> None:
    async with opened(host=20) as bench:
        await bench.rank("u1", numbered(300))
        if direction is Direction.IN:
            await bench.push_out("u1")
            running = asyncio.create_task(bench.rank("u1", numbered(300)))
        else:
            running = asyncio.create_task(bench.rank("u2", numbered(10)))
        await asyncio.sleep(1e-4)
        assert [copy.direction for copy in bench.device.copies] == [direction]
        await bench.engine.evict("u1")
        await running
        assert await kept(bench, "u1") == 0


@in_virtual_time
async def test_a_rank_that_waits_for_pages_keeps_nothing_of_an_evicted_user() -> None:
    async with opened(spare=0, max_history=300) as bench:
        filler = asyncio.create_task(bench.rank("u2", numbered(300, salt=1)))
        await asyncio.sleep(1e-4)
        starved = asyncio.create_task(bench.rank("u1", numbered(300)))
        await asyncio.sleep(1e-4)
        await bench.engine.evict("u1")
        await asyncio.gather(filler, starved)
        assert await kept(bench, "u1") == 0


@in_virtual_time
async def test_a_rank_that_is_tried_again_keeps_nothing_of_an_evicted_user() -> None:
    async with opened() as bench:
        failing = [True]

        def fails(work: Step | PageCopy) -> bool:
            return isinstance(work, Step) and bool(work.appends) and bool(failing) and failing.pop()

        bench.device.fails = fails
        running = asyncio.create_task(bench.rank("u1", numbered(300)))
        await asyncio.sleep(1e-4)
        await bench.engine.evict("u1")
        assert (await running).path is Path.FULL
        assert await kept(bench, "u1") == 0


@in_virtual_time
async def test_evicting_one_user_leaves_the_others() -> None:
    async with opened() as bench:
        await bench.rank("u1", numbered(300))
        await bench.rank("u2", numbered(300))
        await bench.engine.evict("u2")
        assert (await bench.rank("u1", numbered(300))).path is Path.RESIDENT


class Preparing(WatchedDevice):
    """Takes a second over each model, and must be left to it."""

    busy = closed = False

    async def prepare(self, model: Model) -> Served:
        assert not self.busy, "two models at once"
        self.busy = True
        await asyncio.sleep(1.0)
        self.busy = False
        assert not self.closed, "closed while it prepared a model"
        return await super().prepare(model)

    def close(self) -> None:
        assert not self.busy, "closed while it prepares a model"
        self.closed = True
        super().close()


async def cancelled(task: "asyncio.Task[None]") -> None:
    """Cancel it, and see that it ends at once."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@in_virtual_time
async def test_a_swap_that_is_cancelled_changes_nothing_and_the_next_begins_when_the_device_is_done_with_it() -> None:
    async with opened(model=OLD, device=Preparing()) as bench:
        began = bench.now
        swaps = [asyncio.create_task(bench.engine.swap_model(SimulatedModel(f"model {k}"))) for k in range(3)]
        await asyncio.sleep(0.5)
        await cancelled(swaps[0])
        await cancelled(swaps[1])
        assert bench.now == began + 0.5
        await asyncio.sleep(0.6)
        assert bench.engine.status().version == "old"
        await swaps[2]
        assert bench.now == pytest.approx(began + 2.0)
        assert bench.engine.status().version == "model 2"


@pytest.mark.parametrize("cancel", [False, True])
@in_virtual_time
async def test_an_engine_that_closes_waits_for_the_model_being_prepared(cancel: bool) -> None:
    async with opened(model=OLD, device=Preparing()) as bench:
        swaps = [asyncio.create_task(bench.engine.swap_model(NEW)) for _ in range(2)]
        await asyncio.sleep(0.5)
        if cancel:
            await cancelled(swaps[0])
    outcomes = await asyncio.gather(*swaps, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError if cancel else Unavailable)
    assert isinstance(outcomes[1], Unavailable)


@in_virtual_time
async def test_an_engine_that_is_cancelled_while_it_opens_closes_when_its_model_is_prepared() -> None:
    device = Preparing()

    async def use() -> None:
        async with opened(device=device):
            raise AssertionError("it was cancelled before")

    task = asyncio.create_task(use())
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert device.closed


@in_virtual_time
async def test_a_close_that_is_cancelled_still_closes_the_device_when_its_model_is_prepared() -> None:
    device = Preparing()
    swaps = []

    async def use() -> None:
        async with opened(model=OLD, device=device) as bench:
            swaps.append(asyncio.create_task(bench.engine.swap_model(NEW)))
            await asyncio.sleep(0.5)

    task = asyncio.create_task(use())
    await asyncio.sleep(1.6)  # its first model took a second
    for _ in range(2):
        await asyncio.sleep(0.1)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert device.closed
    with pytest.raises(Unavailable):
        await swaps[0]
