import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.clock import Clock, RealClock, VirtualClock, VirtualTimeLoop, run_virtual


def clock() -> Clock:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return VirtualClock(loop)


def test_the_real_clock_only_goes_forward() -> None:
    real = RealClock()
    times = [real.now() for _ in range(100)]
    assert times == sorted(times)


def test_sleeps_cost_nothing_and_move_the_clock() -> None:
    async def main() -> float:
        await asyncio.sleep(3600.0)
        await asyncio.sleep(0.25)
        return clock().now()

    before = time.monotonic()
    assert run_virtual(main()) == pytest.approx(3600.25, abs=1e-6)
    assert time.monotonic() - before < 60.0


def test_time_stands_still_while_code_runs() -> None:
    async def main() -> None:
        now = clock().now()
        for _ in range(100):
            await asyncio.sleep(0)
        assert clock().now() == now

    run_virtual(main())


@given(st.lists(st.integers(min_value=0, max_value=1000), max_size=20))
def test_timers_fire_in_the_order_of_their_times(millis: list[int]) -> None:
    fired: list[tuple[int, float]] = []

    async def sleeper(ms: int) -> None:
        await asyncio.sleep(ms / 1000)
        fired.append((ms, clock().now()))

    async def main() -> None:
        await asyncio.gather(*(sleeper(ms) for ms in millis))

    run_virtual(main())
    assert [ms for ms, _ in fired] == sorted(millis)
    assert all(at == pytest.approx(ms / 1000, abs=1e-6) for ms, at in fired)


def test_the_same_program_runs_in_the_same_order_each_time() -> None:
    async def main() -> list[int]:
        fired: list[int] = []
        loop = asyncio.get_running_loop()
        for k in range(20):
            loop.call_at(1.0 + k % 3, fired.append, k)
        await asyncio.sleep(5.0)
        return fired

    first = run_virtual(main())
    assert sorted(first) == list(range(20))
    assert all(run_virtual(main()) == first for _ in range(5))


def test_a_wait_that_nothing_can_end_raises() -> None:
    async def main() -> None:
        await asyncio.sleep(1.5)
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match=r"deadlock in virtual time at 1\.500000 s"):
        run_virtual(main())


def test_time_that_does_not_pass_raises() -> None:
    async def main() -> None:
        await asyncio.sleep(1.0)
        while True:  # noqa: ASYNC110
            await asyncio.sleep(1e-17)  # which is nothing beside a second

    with pytest.raises(RuntimeError, match=r"stands still at 1\.000000 s"):
        run_virtual(main())


def test_wait_for_ends_a_wait_at_its_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), timeout=2.0)
        return clock().now()

    assert run_virtual(main()) == pytest.approx(2.0, abs=1e-6)


def test_wait_for_returns_what_came_in_time() -> None:
    async def main() -> tuple[str, float]:
        answer = await asyncio.wait_for(asyncio.sleep(1.0, "in time"), timeout=2.0)
        return answer, clock().now()

    answer, at = run_virtual(main())
    assert answer == "in time"
    assert at == pytest.approx(1.0, abs=1e-6)


def test_errors_of_main_come_out() -> None:
    async def main() -> None:
        await asyncio.sleep(1.0)
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        run_virtual(main())


def test_runs_do_not_share_their_time() -> None:
    async def main() -> float:
        start = clock().now()
        await asyncio.sleep(1.0)
        return start

    assert [run_virtual(main()) for _ in range(3)] == [0.0, 0.0, 0.0]
