"""An engine whose own code fails answers everybody at once, takes nothing more, and says so when it is closed."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from behaviours import numbered
from engines import Bench, WatchedDevice, in_virtual_time, opened
from relaygr import PreInferOutcome
from relaygr.engine.guard import FAILED, Guard
from relaygr.engine.step import Step
from relaygr.errors import DeadlineExceeded, Overloaded, Unavailable


class Broken(Exception):
    """What a test breaks something with."""


def breaking(*_: Any, **__: Any) -> Any:
    raise Broken


@asynccontextmanager
async def that_fails(cause: type[Exception] = Broken, **config: Any) -> AsyncIterator[Bench]:
    """An engine that says when it is closed that it has failed, and of what."""
    engine = opened(**config)
    yield await engine.__aenter__()
    with pytest.raises(RuntimeError, match="the engine has failed") as raised:
        await engine.__aexit__(None, None, None)
    assert isinstance(raised.value.__cause__, cause)


async def failed(bench: Bench) -> None:
    """Every call to an engine that has failed says so, at once."""
    before = bench.now
    for call in (bench.rank("u1", numbered(300)), bench.pre_infer("u1", numbered(300)), bench.engine.evict("u1")):
        with pytest.raises(Unavailable, match=FAILED):
            await call
    with pytest.raises(Unavailable, match=FAILED):
        bench.engine.status()
    await bench.engine.failed()
    assert bench.now == before


@in_virtual_time
async def test_a_turn_that_fails_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    async with that_fails() as bench:
        assert bench.engine._loop is not None
        bench.engine._loop._scheduler.plan = breaking  # type: ignore[method-assign]
        rank = asyncio.create_task(bench.rank("u1", numbered(300)))
        pre_infer = asyncio.create_task(bench.pre_infer("u2", numbered(300)))
        later = asyncio.create_task(bench.pre_infer("u2", numbered(350)))
        with pytest.raises(Unavailable, match=FAILED):
            await rank
        assert {await pre_infer, await later} == {PreInferOutcome.FAILED}
        await failed(bench)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [Broken], "it is said once, and how"


@in_virtual_time
async def test_a_device_that_answers_too_little_leaves_nobody_waiting() -> None:
    class Forgetful(WatchedDevice):
        def _run(self, step: Step) -> list[Any]:
            return super()._run(step)[:1]

    async with that_fails(RuntimeError, device=Forgetful()) as bench:
        await bench.pre_infer("u1", numbered(300))
        ranks = [asyncio.create_task(bench.rank("u1", numbered(300))) for _ in range(3)]
        told = await asyncio.gather(*ranks, return_exceptions=True)
        assert [type(each) for each in told] == [Unavailable] * 3
        await failed(bench)


@in_virtual_time
async def test_a_call_that_fails_raises_at_once_and_the_others_are_told() -> None:
    async with that_fails() as bench:
        assert bench.engine._loop is not None
        other = asyncio.create_task(bench.rank("u1", numbered(300)))
        await asyncio.sleep(0)
        bench.engine._loop._options.choose = breaking  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match=FAILED) as raised:
            await bench.rank("u2", numbered(300))
        assert isinstance(raised.value.__cause__, Broken)
        with pytest.raises(Unavailable, match=FAILED):
            await other
        await failed(bench)


@in_virtual_time
async def test_a_lease_whose_end_fails_is_a_failure_too() -> None:
    async with that_fails(lease_s=0.05) as bench:
        await bench.pre_infer("u1", numbered(300))
        assert bench.engine._loop is not None
        bench.engine._loop.claims._ended = breaking
        await bench.engine.failed()
        await failed(bench)


@in_virtual_time
async def test_a_build_whose_end_fails_leaves_no_pre_infer_waiting() -> None:
    async with that_fails(lease_s=30.0) as bench:
        assert bench.engine._loop is not None
        bench.engine._loop._keep = breaking  # type: ignore[method-assign]
        histories = numbered(300), numbered(350), numbered(400)  # one after the other: all but the first wait for it
        calls = [asyncio.create_task(bench.pre_infer("u1", each, within=3600.0)) for each in histories]
        await bench.engine.failed()
        failed_at = bench.now
        assert set(await asyncio.gather(*calls)) == {PreInferOutcome.FAILED}
        assert bench.now == failed_at < 1.0


@in_virtual_time
async def test_what_fails_while_it_lets_go_is_said_once_nothing_is_in_flight() -> None:
    in_flight: list[int] = []
    async with that_fails(lease_s=30.0) as bench:
        loop, close = bench.engine._loop, bench.device.close
        assert loop is not None
        call = asyncio.create_task(bench.pre_infer("u1", numbered(300), within=3600.0))
        await asyncio.sleep(1e-3)
        assert loop.device.steps == 1
        bench.device.close = lambda: (in_flight.append(loop.device.steps), close())[1]  # type: ignore[method-assign,func-returns-value]
        loop.claims._ended = breaking
    assert in_flight == [0]
    assert await call is PreInferOutcome.FAILED
    assert bench.now < 1.0


@in_virtual_time
async def test_what_fails_while_it_closes_is_said() -> None:
    async with that_fails() as bench:
        rank = asyncio.create_task(bench.rank("u1", numbered(300)))
        await asyncio.sleep(1e-3)
        assert bench.engine._loop is not None
        bench.engine._loop.builds.ran = breaking  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="closing"):
        await rank


def _break_at_random(bench: Bench, draw: random.Random) -> list[str]:
    """Some method of some part of the loop fails at one of its next calls. The list names it once it has."""
    loop = bench.engine._loop
    assert loop is not None
    parts = [loop.tier, loop.host, loop.tier.pool, loop.builds, loop.ranks, loop.waits, loop.claims, loop.device]
    parts += [loop.cost, loop.pre_infers, loop.write_back, loop._options, loop._scheduler]
    part: Any = draw.choice(parts)
    names = [name for name in dir(type(part)) if callable(getattr(type(part), name)) and not name.startswith("__")]
    name = draw.choice(names)
    calls_left = [draw.randrange(1, 30)]
    broken: list[str] = []
    right: Callable[..., Any] = getattr(part, name)

    def fails(*args: Any, **more: Any) -> Any:
        calls_left[0] -= 1
        if calls_left[0] == 0:
            broken.append(f"{type(part).__name__}.{name}")
            raise Broken
        return right(*args, **more)

    with contextlib.suppress(AttributeError):  # one of slots
        setattr(part, name, fails)
    return broken


def test_wherever_it_fails_nobody_waits_and_no_score_is_wrong() -> None:
    """Every answer is checked by the bench; a call that nothing would end is an error in virtual time."""
    ended, places = Counter[str](), set[str]()

    @in_virtual_time
    async def once(seed: int) -> None:
        draw = random.Random(seed)
        broken: list[str] = []
        try:
            lease_s, longest_s = draw.choice(((0.05, None), (30.0, 3600.0)))
            async with opened(host=20, device=WatchedDevice(depth=draw.choice((1, 2))), lease_s=lease_s) as bench:
                broken = _break_at_random(bench, draw)

                async def one(user: str) -> None:
                    await asyncio.sleep(draw.random() * 0.2)
                    history = numbered(draw.choice((130, 200, 300, 400)))
                    call = draw.choice((bench.rank, bench.rank, bench.pre_infer))
                    try:
                        answer = await call(user, history, within=draw.choice((longest_s, 0.1)))
                        ended[type(answer).__name__] += 1
                    except (Unavailable, Overloaded, DeadlineExceeded) as error:
                        ended[type(error).__name__] += 1
                    except Broken:
                        ended["outside"] += 1

                await asyncio.gather(*(one(f"u{draw.randrange(6)}") for _ in range(60)))
                assert bench.now < 20.0, "somebody was answered when the lease ended, or the call did"
                await asyncio.sleep(0.2)
        except (RuntimeError, Broken):
            if not broken:
                raise
        places.update(broken)

    for seed in range(300):
        once(seed)
    assert len(places) > 30
    assert ended["Ranked"] > 1000
    assert ended["Unavailable"] > 1000


def test_a_guard_lets_nothing_through_once_something_has_failed() -> None:
    heard: list[Exception] = []
    guard, done = Guard(heard.append), list[int]()
    note, broken = guard.callback(done.append), guard.callback(breaking)
    note(1)
    broken()
    note(2)
    broken()
    assert (done, [type(error) for error in heard]) == ([1], [Broken])
    with pytest.raises(Unavailable, match=FAILED), Guard(heard.append):
        raise Broken
    with pytest.raises(asyncio.CancelledError), Guard(heard.append):
        raise asyncio.CancelledError
    assert len(heard) == 2
