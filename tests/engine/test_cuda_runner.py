"""What ran behind a load is told of after it, even if both end between two questions; writes hold up nothing."""

import asyncio
from collections import deque
from typing import Any, cast

from relaygr.clock import run_virtual
from relaygr.engine.cuda_runner import CudaRunner, _Flight


class Ends:
    """An event that has passed from the given question on, of all questions that were asked."""

    asked = 0

    def __init__(self, at: int) -> None:
        self._at = at

    def query(self) -> bool:
        Ends.asked += 1
        return Ends.asked > self._at


def _runner(loads: list[Any], steps: list[Any], told: list[str]) -> CudaRunner:
    """Without a device: only what has been launched."""
    runner = object.__new__(CudaRunner)
    loop = asyncio.get_running_loop()

    def flights(name: str, events: list[Any]) -> "deque[_Flight]":
        def tell() -> None:
            told.append(name)

        return deque(_Flight(event, tell, lambda: None, loop.create_future()) for event in events)

    runner._loads, runner._steps, runner._writes = flights("load", loads), flights("step", steps), deque()
    runner._polling, runner._dozing = True, None
    return runner


def test_a_step_is_never_told_of_before_the_load_it_ran_behind() -> None:
    async def main() -> None:
        for both_end_at in range(6):
            Ends.asked, told = 0, list[str]()
            runner = _runner([Ends(both_end_at)], [Ends(both_end_at)], told)
            while runner._polling:
                await asyncio.sleep(0)
                if not runner._loads and not runner._steps:
                    break
                runner._poll()
            assert told == ["load", "step"], f"both ended at question {both_end_at}"

    asyncio.run(main())


def test_flights_of_a_lost_device_fail_and_do_not_hang() -> None:
    class Lost:
        def query(self) -> bool:
            raise RuntimeError("the device is lost")

    async def main() -> None:
        runner = _runner([Lost()], [Lost(), Lost()], [])
        futures = [flight._future for flight in (*runner._loads, *runner._steps)]
        runner._poll()
        errors = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(error, RuntimeError) for error in errors)
        assert not runner._polling

    asyncio.run(main())


def test_what_is_launched_beside_a_write_back_is_asked_after_at_once() -> None:
    class Written:
        passed = False

        def query(self) -> bool:
            return self.passed

    async def main() -> None:
        loop = asyncio.get_running_loop()
        runner = _runner([], [], [])
        runner._polling = False
        written: Any = Written()
        write = runner._fly(runner._writes, written, lambda: "written")
        await asyncio.sleep(0)
        began = loop.time()
        for flights in (runner._steps, runner._loads):
            assert await runner._fly(flights, cast(Any, Ends(0)), lambda: "done") == "done"
            assert loop.time() == began
        written.passed = True
        assert await write == "written"
        assert not runner._polling

    run_virtual(main())
