"""Writes that wait for the store keep nothing else waiting, and are bounded."""

import asyncio
import threading

import pytest

from relaygr.errors import Overloaded
from relaygr.serving.gateway import MAX_WRITES, GatewayApp


def test_writes_that_wait_leave_the_threads_of_reads_alone_and_are_refused_past_a_bound() -> None:
    async def main() -> None:
        app = GatewayApp(None, None, None)  # type: ignore[arg-type]
        free = threading.Event()

        def append() -> int:
            free.wait()
            return 7

        try:
            waiting = [asyncio.create_task(app._write(append)) for _ in range(MAX_WRITES)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="appends wait"):
                await app._write(append)
            reads = [asyncio.to_thread(lambda: "read") for _ in range(50)]
            assert set(await asyncio.gather(*reads)) == {"read"}
            waiting[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting[0]
            with pytest.raises(Overloaded):
                await app._write(append)
        finally:
            free.set()
        assert await asyncio.gather(*waiting[1:]) == [7] * (MAX_WRITES - 1)
        assert await app._write(append) == 7

    asyncio.run(main())
