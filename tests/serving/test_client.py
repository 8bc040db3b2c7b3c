"""The HTTP client against servers that behave, and that do not."""

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from relaygr.errors import Unavailable
from relaygr.serving import client as module
from relaygr.serving.client import HttpClient, Response

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(handler: Handler, test: Callable[[HttpClient], Coroutine[Any, Any, None]]) -> None:
    handlers: list[asyncio.Task[None]] = []

    async def handled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.append(task)
        try:
            await handler(reader, writer)
        finally:
            writer.close()
            await writer.wait_closed()

    async def main() -> None:
        server = await asyncio.start_server(handled, "127.0.0.1", 0)
        client = HttpClient("127.0.0.1", server.sockets[0].getsockname()[1])
        async with server:
            try:
                async with asyncio.timeout(30):
                    await test(client)
            finally:
                client.close()
                await asyncio.gather(*handlers, return_exceptions=True)

    asyncio.run(main())


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
    return head, await reader.readexactly(length)


def reply(body: bytes, *, head: bytes = b"HTTP/1.1 200 OK\r\n") -> bytes:
    return head + b"Content-Length: " + str(len(body)).encode() + b"\r\nX-Some: Thing\r\n\r\n" + body


def test_requests_and_replies_travel_whole_in_whatever_pieces() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            try:
                head, body = await read_request(reader)
            except asyncio.IncompleteReadError:
                return
            assert head.startswith("POST /v1/rank HTTP/1.1\r\n")
            for byte in reply(body):
                writer.write(bytes([byte]))
                await writer.drain()

    async def test(client: HttpClient) -> None:
        for size in (0, 1, 3000):
            response = await client.request("POST", "/v1/rank", bytes(size), {"x-relaygr-key": "u"})
            assert response == Response(200, {"content-length": str(size), "x-some": "Thing"}, bytes(size))

    run(echo, test)


def test_connections_are_kept_and_one_that_went_stale_is_replaced_unseen() -> None:
    connections = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(2):
            await read_request(reader)
            writer.write(reply(b"ok"))
        writer.close()

    async def test(client: HttpClient) -> None:
        for _ in range(5):
            assert (await client.request("GET", "/")).body == b"ok"
        assert connections == 3

    run(once, test)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxx",
    ],
)
def test_a_server_that_breaks_off_or_talks_nonsense_is_unavailable(said: bytes) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(said)
        writer.close()

    async def test(client: HttpClient) -> None:
        with pytest.raises(Unavailable):
            await client.request("GET", "/")

    run(break_off, test)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n", b"nonsense\r\n\r\n"])
def test_a_request_that_fails_leaves_nothing_for_the_collector_of_cycles(said: bytes) -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(said)
        await writer.drain()

    async def test(client: HttpClient) -> None:
        before = {id(each) for each in gc.get_objects() if type(each) is module._Connection}
        failed = False
        try:
            await client.request("POST", "/x", b"body")
        except Unavailable:
            failed = True
        assert failed
        for _ in range(3):  # the transport tells its protocol in a later turn
            await asyncio.sleep(0)
        left = [each for each in gc.get_objects() if type(each) is module._Connection and id(each) not in before]
        assert not left

    gc.collect()
    gc.disable()
    try:
        run(broken, test)
    finally:
        gc.enable()


def test_nobody_listening_is_unavailable() -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        with pytest.raises(Unavailable, match="cannot be reached"):
            await HttpClient("127.0.0.1", port).request("GET", "/")

    asyncio.run(main())


def test_a_cancelled_request_does_not_hand_its_reply_to_the_next() -> None:
    late = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head, _ = await read_request(reader)
                if "/slow" in head:
                    await late.wait()
                writer.write(reply(head.split(" ")[1].encode()))
        except asyncio.IncompleteReadError:
            return

    async def test(client: HttpClient) -> None:
        task = asyncio.create_task(client.request("GET", "/slow"))
        await asyncio.sleep(0)
        assert (await client.request("GET", "/other")).body == b"/other"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        late.set()
        assert (await client.request("GET", "/quick")).body == b"/quick"

    run(slow, test)


def test_connections_that_a_rush_left_are_closed_when_nobody_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.0)
    open_now = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        open_now += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                await read_request(reader)
                writer.write(reply(b""))
        open_now -= 1

    async def test(client: HttpClient) -> None:
        await asyncio.gather(*(client.request("GET", "/") for _ in range(10)))
        assert open_now == 10
        await asyncio.sleep(0.001)
        await client.request("GET", "/")
        while open_now > 1:  # noqa: ASYNC110  (the other side's)
            await asyncio.sleep(0.001)

    run(serve, test)
