"""The link between frontend and engine: frames as they are cut, late engines, and callers who go."""

import asyncio
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from engines import in_virtual_time
from relaygr.errors import DeadlineExceeded, Unavailable
from relaygr.serving import link


class Wire:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def set_write_buffer_limits(self, high: int) -> None: ...
    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...


def connected() -> tuple[link.EngineLink, Wire]:
    engine, wire = link.EngineLink(), Wire()
    engine.connection_made(wire)  # type: ignore[arg-type]
    return engine, wire


def framed(answer: link.Answer) -> bytes:
    body = msgspec.msgpack.encode(answer)
    return struct.pack("<I", len(body)) + body


def calls(wire: Wire) -> list[Any]:
    """What was said so far."""
    rest, found = b"".join(wire.written), []
    while rest:
        (length,) = struct.unpack_from("<I", rest)
        found.append(link.decode_call(memoryview(rest[4 : 4 + length])))
        rest = rest[4 + length :]
    return found


def evict(size: int) -> link.Evict:
    return link.Evict("u" * size)


@in_virtual_time
async def test_what_a_turn_has_to_say_is_one_write_while_that_is_small() -> None:
    engine, wire = connected()
    waiting = [asyncio.ensure_future(engine.call(evict(100))) for _ in range(5)]
    await asyncio.sleep(0.01)
    assert len(wire.written) == 2, "the first did not wait for others"
    assert [call.number for call in calls(wire)] == [0, 1, 2, 3, 4]
    for number in (3, 0, 4, 1, 2):
        engine.data_received(framed(link.Answer(number, number * 10)))
    assert [await call for call in waiting] == [0, 10, 20, 30, 40]


@in_virtual_time
async def test_much_leaves_in_parts_so_that_the_other_side_begins() -> None:
    engine, wire = connected()
    waiting = [asyncio.ensure_future(engine.call(evict(link.TOGETHER // 4))) for _ in range(40)]
    await asyncio.sleep(0.01)
    assert len(wire.written) == 1 + 10
    assert [call.number for call in calls(wire)] == list(range(40))
    engine.connection_lost(None)
    for call in waiting:
        with pytest.raises(Unavailable):
            await call


@in_virtual_time
async def test_frames_may_come_cut_anywhere() -> None:
    engine, _ = connected()
    waiting = [asyncio.ensure_future(engine.call(evict(1))) for _ in range(3)]
    await asyncio.sleep(0)
    stream = b"".join(framed(link.Answer(number, "x" * 300)) for number in range(3))
    for at in range(0, len(stream), 7):
        engine.data_received(stream[at : at + 7])
    assert [await call for call in waiting] == ["x" * 300] * 3


@in_virtual_time
async def test_an_engine_that_says_nothing_is_late_and_told_so() -> None:
    engine, wire = connected()
    loop = asyncio.get_running_loop()
    with pytest.raises(DeadlineExceeded):
        await engine.call(evict(1), late_at=loop.time() + 0.5)
    assert loop.time() == pytest.approx(0.5)
    await asyncio.sleep(0.01)
    first, second = calls(wire)
    assert second == link.Call(first.number, link.Cancel())
    engine.data_received(framed(link.Answer(first.number, 1)))  # too late, and nobody's


def test_closing_does_not_wait_for_an_engine_that_reads_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        deaf = socket.socket(socket.AF_UNIX)
        deaf.bind(str(tmp_path / "engine"))
        deaf.listen()
        engine = await link.EngineLink.connect(str(tmp_path / "engine"))
        calls = [asyncio.ensure_future(engine.call(evict(100_000))) for _ in range(50)]
        await asyncio.sleep(0)
        await asyncio.wait_for(engine.close(), 30)
        assert all(isinstance(one, Unavailable) for one in await asyncio.gather(*calls, return_exceptions=True))
        deaf.close()

    for loop in (None, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(main())
        (tmp_path / "engine").unlink()


@in_virtual_time
async def test_a_caller_who_goes_takes_the_call_back() -> None:
    engine, wire = connected()
    call = asyncio.ensure_future(engine.call(evict(1), late_at=60.0))
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.sleep(0.01)
    assert [type(told.what) for told in calls(wire)] == [link.Evict, link.Cancel]
