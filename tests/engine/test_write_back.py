"""What is copied to host memory."""

import pytest

from behaviours import numbered
from engines import in_virtual_time, opened
from relaygr import Path
from relaygr.engine.step import Direction


@pytest.mark.parametrize("length", [256, 300])
@in_virtual_time
async def test_of_a_longer_prefix_in_host_memory_whole_pages_are_not_copied_again(length: int) -> None:
    """What is not whole pages takes its place: 300 behaviours have a page of their own."""
    async with opened(host=30, max_history=800) as bench:
        loop, history = bench.engine._loop, numbered(770)
        assert loop is not None
        await bench.rank("u", history)
        await bench.settle()
        loop.tier.drop("u")
        bench.device.forget()
        assert (await bench.rank("u", history[:length])).path is (Path.RELOADED if length == 256 else Path.EXTENDED)
        await bench.settle()
        held = loop.host.find("u")
        assert held is not None
        assert held.length == (770 if length == 256 else 300)
        copied = [copy for copy in bench.device.copies if copy.direction is Direction.OUT]
        assert len(copied) == (length == 300)
        loop.tier.drop("u")
        bench.device.forget()
        again = await bench.rank("u", history)
        assert (again.path is Path.RELOADED) is (length == 256)
        assert bench.device.appended == (0 if length == 256 else 770 - 300)
