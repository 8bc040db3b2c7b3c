"""Connections whose requests do not arrive, and replies that leave at once."""

import asyncio
from typing import Any

import pytest
import uvicorn

from relaygr.clock import run_virtual
from relaygr.serving.connection import ARRIVE_S, Connection

BODY = b'{"a": 1}'
HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\n"
WHOLE = HEAD + BODY


class Wire:
    """A transport that remembers."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed_at: float | None = None

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        if self.closed_at is None:
            self.closed_at = asyncio.get_running_loop().time()

    def is_closing(self) -> bool:
        return self.closed_at is not None

    def get_extra_info(self, name: str) -> Any:
        return None

    def resume_reading(self) -> None: ...
    def pause_reading(self) -> None: ...


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def connected() -> tuple[Connection, Wire]:
    config = uvicorn.Config(echo, lifespan="off", interface="asgi3", timeout_keep_alive=75, http=Connection)
    config.load()
    connection = Connection(config, uvicorn.Server(config).server_state, {}, asyncio.get_running_loop())
    wire = Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    return connection, wire


def test_head_and_body_of_a_reply_are_one_write() -> None:
    async def main() -> None:
        connection, wire = connected()
        connection.data_received(WHOLE)
        await asyncio.sleep(0.1)
        assert len(wire.written) == 1
        assert wire.written[0].startswith(b"HTTP/1.1 200")
        assert wire.written[0].endswith(BODY)

    run_virtual(main())


@pytest.mark.parametrize("sent", [0, 1, 20, len(HEAD), len(WHOLE) - 1])
def test_a_request_that_does_not_arrive_gets_408_and_is_closed(sent: int) -> None:
    async def main() -> None:
        connection, wire = connected()
        if sent:
            connection.data_received(WHOLE[:sent])
        await asyncio.sleep(ARRIVE_S - 1)
        assert not wire.is_closing()
        await asyncio.sleep(2)
        assert wire.closed_at == pytest.approx(ARRIVE_S)
        assert wire.written[-1].startswith(b"HTTP/1.1 408 ")
        connection.connection_lost(None)

    run_virtual(main())


def test_dripping_does_not_move_the_limit() -> None:
    async def main() -> None:
        connection, wire = connected()
        for at in range(len(WHOLE) - 1):
            if wire.is_closing():
                break
            connection.data_received(WHOLE[at : at + 1])
            await asyncio.sleep(1.0)
        assert wire.closed_at == pytest.approx(ARRIVE_S)
        connection.connection_lost(None)

    run_virtual(main())


def test_an_answered_client_may_wait_with_its_next_request_but_not_within_it() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        connection, wire = connected()
        for _ in range(3):
            connection.data_received(WHOLE)
            await asyncio.sleep(ARRIVE_S + 10)  # less than connections are kept for
            assert not wire.is_closing()
        connection.data_received(b"\r\n")  # not even the first byte of one
        began = loop.time()
        await asyncio.sleep(ARRIVE_S + 1)
        assert wire.closed_at == pytest.approx(began + ARRIVE_S)
        connection.connection_lost(None)

    run_virtual(main())


def test_a_request_that_arrived_may_take_long_to_answer() -> None:
    async def main() -> None:
        connection, wire = connected()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(10 * ARRIVE_S)
            await echo(scope, receive, send)

        connection.app = slow
        connection.data_received(WHOLE)
        await asyncio.sleep(11 * ARRIVE_S)
        assert [part[:12] for part in wire.written] == [b"HTTP/1.1 200"]

    run_virtual(main())


def test_a_request_without_memory_for_it_gets_503_and_one_that_is_none_400(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        connection, wire = connected()
        connection.data_received(b"\x16\x03\x01\x02 not HTTP\r\n\r\n")
        await asyncio.sleep(0.1)
        assert wire.written[-1].startswith(b"HTTP/1.1 400 ")
        connection.connection_lost(None)

        def on_header(self: Any, name: bytes, value: bytes) -> None:
            raise MemoryError

        monkeypatch.setattr(Connection, "on_header", on_header)
        connection, wire = connected()
        connection.data_received(WHOLE)
        await asyncio.sleep(0.1)
        assert wire.written[-1].startswith(b"HTTP/1.1 503 ")
        assert wire.is_closing()
        connection.connection_lost(None)

    run_virtual(main())
