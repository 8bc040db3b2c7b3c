"""Connections whose requests do not arrive, and replies that leave at once."""

import asyncio
import gc
import weakref
from typing import Any

import pytest
import uvicorn

from relaygr.clock import run_virtual
from relaygr.serving.connection import ARRIVE_S, MAX_HEAD, Connection
from relaygr.serving.http import App, Reply, Request
from relaygr.serving.wire import Encoding

BODY = b'{"a": 1}'
HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\n"
WHOLE = HEAD + BODY


class Wire:
    """A transport that remembers."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed_at: float | None = None
        self.aborted = False
        self.reading, self.pauses = True, 0

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        if self.closed_at is None:
            self.closed_at = asyncio.get_running_loop().time()

    def abort(self) -> None:
        self.aborted = True
        self.close()

    def is_closing(self) -> bool:
        return self.closed_at is not None

    def set_write_buffer_limits(self, high: int) -> None: ...
    def get_extra_info(self, name: str) -> Any:
        return None

    def resume_reading(self) -> None:
        self.reading = True

    def pause_reading(self) -> None:
        self.reading = False
        self.pauses += 1


class Echo(App):
    """Answers with what it is sent."""

    calls = {"/x": "POST"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(1000)
        self.takes_s = 0.0

    async def route(self, request: Request, encoding: Encoding) -> Reply | None:
        await asyncio.sleep(self.takes_s)
        return Reply(200, request.body, encoding) if request.path in self.calls else None


def connected(app: App | None = None) -> tuple[Connection, Wire]:
    config = uvicorn.Config(
        app or Echo(), lifespan="off", interface="asgi3", timeout_keep_alive=75, proxy_headers=False
    )
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
        connection.data_received(WHOLE[:1])
        began = loop.time()
        await asyncio.sleep(ARRIVE_S + 1)
        assert wire.closed_at == pytest.approx(began + ARRIVE_S)
        connection.connection_lost(None)

    run_virtual(main())


def test_a_connection_that_nobody_uses_is_closed_in_silence() -> None:
    async def main() -> None:
        connection, wire = connected()
        connection.data_received(WHOLE)
        await asyncio.sleep(74)
        assert not wire.is_closing()
        connection.data_received(b"\r\n")  # not the first byte of a request
        await asyncio.sleep(80)
        assert wire.closed_at == pytest.approx(74 + 75)
        assert [part[:12] for part in wire.written] == [b"HTTP/1.1 200"]
        connection.connection_lost(None)

    run_virtual(main())


def test_a_request_that_arrived_may_take_long_to_answer() -> None:
    async def main() -> None:
        app = Echo()
        app.takes_s = 10 * ARRIVE_S
        connection, wire = connected(app)
        connection.data_received(WHOLE)
        await asyncio.sleep(11 * ARRIVE_S)
        assert [part[:12] for part in wire.written] == [b"HTTP/1.1 200"]
        connection.connection_lost(None)

    run_virtual(main())


def test_requests_that_come_at_once_are_answered_in_their_order() -> None:
    async def main() -> None:
        app = Echo()
        app.takes_s = 0.1
        connection, wire = connected(app)
        bodies = [b"body-%03d" % number for number in range(20)]
        connection.data_received(b"".join(HEAD + body for body in bodies) + HEAD[:10])
        assert not wire.reading, "they are not read on while many wait"
        await asyncio.sleep(5.0)
        assert wire.pauses == 1
        assert [part[-8:] for part in wire.written] == bodies
        assert app.requests["/x", 200] == 20
        connection.data_received(HEAD[10:] + BODY)
        await asyncio.sleep(1.0)
        assert wire.written[-1].endswith(BODY)
        connection.connection_lost(None)

    run_virtual(main())


def test_a_client_that_goes_cancels_its_request_at_once() -> None:
    async def main() -> None:
        app = Echo()
        app.takes_s = 100.0
        connection, wire = connected(app)
        connection.data_received(WHOLE)
        await asyncio.sleep(1.0)
        assert app.busy == 1
        wire.close()
        connection.connection_lost(None)
        await asyncio.sleep(0.1)
        assert app.busy == 0
        assert app.requests == {("/x", 499): 1}

    run_virtual(main())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_bound_is_refused_at_once_and_dropped_and_the_next_request_is_read(chunked: bool) -> None:
    async def main() -> None:
        app = Echo()
        connection, wire = connected(app)
        if chunked:
            connection.data_received(HEAD.replace(b"content-length: 8", b"transfer-encoding: chunked"))
            for _ in range(20):
                connection.data_received(b"64\r\n" + b"x" * 100 + b"\r\n")
        else:
            connection.data_received(HEAD.replace(b"length: 8", b"length: 5000"))
            assert len(wire.written) == 1, "before any of it has come"
            for _ in range(50):
                connection.data_received(b"x" * 100)
        assert [part[:12] for part in wire.written] == [b"HTTP/1.1 413"]
        assert not connection._parts
        connection.data_received((b"0\r\n\r\n" if chunked else b"") + WHOLE)
        await asyncio.sleep(0.1)
        assert [part[:12] for part in wire.written] == [b"HTTP/1.1 413", b"HTTP/1.1 200"]
        assert app.requests == {("/x", 413): 1, ("/x", 200): 1}
        connection.connection_lost(None)

    run_virtual(main())


def test_who_wants_no_more_is_told_so_and_closed() -> None:
    async def main() -> None:
        for head in (HEAD.replace(b"HTTP/1.1", b"HTTP/1.0"), HEAD.replace(b"host: x", b"host: x\r\nconnection: close")):
            connection, wire = connected()
            connection.data_received(head + BODY)
            await asyncio.sleep(0.1)
            assert b"connection: close" in wire.written[0]
            assert wire.is_closing()
            connection.connection_lost(None)

    run_virtual(main())


def test_who_asks_before_sending_a_body_is_told_to_go_on_unless_it_is_not_wanted() -> None:
    async def main() -> None:
        connection, wire = connected()
        asking = HEAD.replace(b"host: x", b"host: x\r\nexpect: 100-continue")
        connection.data_received(asking)
        assert wire.written == [b"HTTP/1.1 100 Continue\r\n\r\n"]
        connection.data_received(BODY)
        await asyncio.sleep(0.1)
        assert wire.written[-1].endswith(BODY)
        connection.data_received(asking.replace(b"length: 8", b"length: 5000"))
        assert wire.written[-1].startswith(b"HTTP/1.1 413")
        connection.connection_lost(None)

    run_virtual(main())


def test_the_end_of_the_server_waits_for_what_is_under_way() -> None:
    async def main() -> None:
        app = Echo()
        app.takes_s = 1.0
        connection, wire = connected(app)
        connection.data_received(WHOLE)
        connection.shutdown()
        assert not wire.is_closing()
        await asyncio.sleep(2.0)
        assert b"connection: close" in wire.written[0]
        assert wire.closed_at == pytest.approx(1.0)
        connection.connection_lost(None)
        connection, wire = connected(app)
        connection.shutdown()
        assert wire.is_closing()
        connection.connection_lost(None)

    run_virtual(main())


def test_a_client_that_does_not_read_is_not_answered_on() -> None:
    async def main() -> None:
        connection, wire = connected()
        connection.data_received(WHOLE)
        await asyncio.sleep(0.1)
        connection.pause_writing()
        connection.data_received(WHOLE)
        await asyncio.sleep(1.0)
        assert len(wire.written) == 1
        connection.resume_writing()
        await asyncio.sleep(0.1)
        assert len(wire.written) == 2
        connection.connection_lost(None)

    run_virtual(main())


def test_a_client_that_never_reads_is_cut_off_whatever_it_asks() -> None:
    async def main() -> None:
        for asks_on in (True, False):
            connection, wire = connected()
            connection.data_received(WHOLE)
            await asyncio.sleep(0.1)
            connection.pause_writing()
            if asks_on:
                connection.data_received(WHOLE)
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(ARRIVE_S + 1)
            assert wire.aborted
            assert wire.closed_at == pytest.approx(began + ARRIVE_S)
            connection.connection_lost(None)

    run_virtual(main())


@pytest.mark.parametrize("part", [b"GET /", b"GET /x HTTP/1.1\r\nlong: ", b"GET /x HTTP/1.1\r\nhost: x\r\n"])
def test_a_head_that_does_not_end_is_refused_soon(part: bytes) -> None:
    async def main() -> None:
        connection, wire = connected()
        connection.data_received(part)
        more = b"many: more\r\n" * 100 if part.endswith(b"\r\n") else b"a" * 1200
        sent = 0
        while not wire.is_closing():
            connection.data_received(more)
            sent += len(more)
            assert sent < 2 * MAX_HEAD
        assert wire.written[-1].startswith(b"HTTP/1.1 431 ")
        connection.connection_lost(None)

    run_virtual(main())


def test_heads_of_many_requests_are_not_added_up() -> None:
    async def main() -> None:
        connection, wire = connected()
        for _ in range(2 * MAX_HEAD // len(WHOLE)):
            connection.data_received(WHOLE[:20])
            connection.data_received(WHOLE[20:])
            await asyncio.sleep(0.01)
        assert not wire.is_closing()
        assert wire.written[-1].startswith(b"HTTP/1.1 200")
        connection.connection_lost(None)

    run_virtual(main())


HIDDEN = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("declared", [b"content-length: %d" % len(HIDDEN), b"transfer-encoding: chunked"])
def test_what_follows_an_upgrade_is_never_another_request(declared: bytes, cut: bool) -> None:
    async def main() -> None:
        app = Echo()
        connection, wire = connected(app)
        head = b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n" + declared + b"\r\n\r\n"
        for part in (head, HIDDEN) if cut else (head + HIDDEN,):
            connection.data_received(part)
        await asyncio.sleep(0.1)
        (reply,) = wire.written
        assert reply.startswith(b"HTTP/1.1 400 ")
        assert b"Upgrade" in reply
        assert wire.is_closing()
        assert not app.requests
        connection.connection_lost(None)

    run_virtual(main())


def test_an_upgrade_without_a_body_is_answered_as_any_request_and_ends_the_connection() -> None:
    async def main() -> None:
        connection, wire = connected()
        head = b"GET /x HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
        connection.data_received(head + HIDDEN)
        connection.data_received(HIDDEN)
        await asyncio.sleep(0.1)
        (reply,) = wire.written
        assert reply.startswith(b"HTTP/1.1 200 ")
        assert wire.is_closing()
        connection.connection_lost(None)

    run_virtual(main())


@pytest.mark.parametrize("goes", [False, True])
def test_a_connection_leaves_nothing_for_the_collector_of_cycles(goes: bool) -> None:
    async def main() -> None:
        app = Echo()
        app.takes_s = 100.0 if goes else 0.0
        connection, wire = connected(app)
        connection.data_received(WHOLE)
        await asyncio.sleep(1.0)
        wire.close()
        connection.connection_lost(None)
        await asyncio.sleep(1.0)
        known = weakref.ref(connection)
        del connection
        assert known() is None

    gc.collect()
    gc.disable()
    try:
        run_virtual(main())
    finally:
        gc.enable()


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
