"""Whatever is sent, only documented answers come, the servers live, and they hold no more than before.

FUZZ_INPUTS says how many inputs there are in all: 2,000 by default; `make soak` sends 100,000.
"""

import asyncio
import json
import os
import random
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from optional import require
from relaygr.errors import Unavailable
from relaygr.serving import gateway, instance, openapi
from relaygr.serving.client import HttpClient, Response
from relaygr.serving.operations import ERRORS
from simulated_servers import Server, servers

INPUTS = int(os.environ.get("FUZZ_INPUTS", "2000"))
MIB = 2**20
DOCUMENTS = {"gateway": json.loads(openapi.gateway_document()), "instance": json.loads(openapi.instance_document())}
LIMITS = {"gateway": gateway.MAX_BODY, "instance": instance.MAX_BODY}
POSTS = {"gateway": ("/v1/recommend", "/v1/behaviours"), "instance": ("/v1/pre-infer", "/v1/rank")}
FINE = {
    "gateway": msgspec.json.encode({"user": "user-1"}),
    "instance": msgspec.json.encode({"user": "user-1", "length": 0}),
}
"""For the first of them."""
both = pytest.mark.parametrize("name", ["gateway", "instance"])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    with servers(tmp_path_factory.mktemp("fuzz")) as started:
        yield started
        for server in started.values():
            assert server.process.poll() is None, f"the {server.name} has ended"


@pytest.fixture
def server(running: dict[str, Server], name: str) -> Iterator[Server]:
    """Bounded memory, and no descriptor left, whatever the test sends."""
    served = running[name]
    asyncio.run(_answers(served))
    memory, descriptors = served.memory(), served.descriptors()
    yield served
    asyncio.run(_answers(served))
    assert served.memory() < memory + 256 * MIB

    async def none_is_left() -> None:
        async with asyncio.timeout(60):
            while served.descriptors() > descriptors + 8:  # kept connections between the two  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(none_is_left())


async def _answers(server: Server) -> None:
    client = HttpClient.to(server.address, keep=0)
    assert (await client.request("GET", "/healthz")).status == 200
    path = POSTS[server.name][0]
    body = FINE[server.name]
    reply = await client.request("POST", path, body, {"content-type": "application/json"})
    assert reply.status in (200, 202), reply


def assert_documented(name: str, path: str, reply: Response, sent: object) -> None:
    operations = DOCUMENTS[name]["paths"].get(path)
    assert reply.status != 500, (sent, reply)
    if operations is None:
        assert reply.status == 404
        return
    (operation,) = operations.values()
    assert str(reply.status) in operation["responses"], (sent, reply)
    if reply.status in ERRORS:
        kind = msgspec.msgpack if "msgpack" in reply.headers["content-type"] else msgspec.json
        told: Any = kind.decode(reply.body)
        assert told.get("message") or "ready" in told


# ---- by the documents


@both
def test_what_the_document_allows_and_what_it_does_not_is_answered_as_it_says(server: Server, name: str) -> None:
    schemathesis = require("schemathesis", "make test installs it where it can be had")
    schemathesis.checks.load_all_checks()
    checks = schemathesis.checks.CHECKS.get_by_names(
        ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]
    )
    schema = schemathesis.openapi.from_dict(DOCUMENTS[name])
    found = [each.ok() for each in schema.get_all_operations()]
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    posts = [(operation, mode) for operation in found if operation.method == "post" for mode in modes]
    gets = [(operation, modes[0]) for operation in found if operation.method == "get"]
    for operation, mode in (*posts, *gets):
        media = {"media_type": "application/json"} if operation.method == "post" else {}
        examples = max(20, INPUTS // 10 // 2 // len(posts)) if operation.method == "post" else 2

        @settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
        @given(operation.as_strategy(mode, **media))
        def holds(case: Any) -> None:
            reply = case.call(base_url=server.address)
            assert reply.status_code != 500, reply.text
            case.validate_response(reply, checks=checks)

        holds()


# ---- bytes that nobody meant


def valid(name: str, path: str, draw: random.Random) -> Any:
    """A body that is fine, as machines send it."""
    user = f"user-{draw.randrange(8)}"
    if path == "/v1/recommend":
        return {"user": user, "k": draw.randrange(1, 50)}
    if path == "/v1/behaviours":
        return {"user": user, "behaviours": [{"item": 3, "action": 1, "timestamp": 2**33} for _ in range(3)]}
    length = draw.randrange(0, 40)
    columns = {
        "items": np.arange(length).tobytes(),
        "actions": np.zeros(length, np.int32).tobytes(),
        "timestamps": np.arange(length).tobytes(),
    }
    body: dict[str, Any] = {"user": user, "behaviours": columns}
    return body | ({"candidates": np.arange(5).tobytes()} if path == "/v1/rank" else {})


HOSTILE: tuple[Any, ...] = (
    *(0, -1, 1, 127, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, float("inf"), float("nan")),
    *("", "\0", "x" * 512, "é" * 256, "../../etc/passwd", "user\r\nx-a: b", "\u202e", None, True, [], {}, b""),
    *(b"\xff" * 7, b"\xff" * 8, b"\x80" * 1024, [[]], [None], {"items": b""}, [2**63], list(range(300))),
)
LENGTHS = (b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff")
"""Heads of msgpack that announce four gigabytes: of bytes, of text, of an array, of a map."""


def spoiled(body: Any, draw: random.Random) -> bytes:
    """The body, made into something else."""
    kind = draw.randrange(7)
    if kind == 0:  # another value in a field, or another field
        field = draw.choice([*body, "start", "length", "digest", "context", "features", "request", "unknown"])
        return msgspec.msgpack.encode({**body, field: draw.choice(HOSTILE)})
    if kind == 1 and "behaviours" in body and isinstance(body["behaviours"], dict):
        column = draw.choice(["items", "actions", "timestamps"])
        return msgspec.msgpack.encode({**body, "behaviours": {**body["behaviours"], column: draw.choice(HOSTILE)}})
    raw = bytearray(msgspec.msgpack.encode(body))
    if kind == 2:
        for _ in range(draw.randrange(1, 8)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
    elif kind == 3:
        del raw[draw.randrange(len(raw)) :]
    elif kind == 4:
        at = draw.randrange(len(raw))
        raw[at:at] = draw.choice(LENGTHS)
    elif kind == 5:
        raw = bytearray(b"\x91" * draw.choice((10, 1000, 100_000)))  # arrays within arrays
    else:
        raw += bytes(draw.randrange(256) for _ in range(draw.randrange(1, 64)))
    return bytes(raw)


HEADERS: tuple[dict[str, str], ...] = (
    *({}, {"x-relaygr-deadline-ms": "nan"}, {"x-relaygr-deadline-ms": "-1"}, {"x-relaygr-deadline-ms": "1e400"}),
    *({"x-relaygr-deadline-ms": "0"}, {"x-relaygr-deadline-ms": "5"}, {"x-relaygr-key": "x" * 4000}),
    *({"content-type": "application/json"}, {"content-type": "text/html"}, {"content-type": "\xff"}),
)


@both
def test_bytes_that_nobody_meant_get_documented_answers(server: Server, name: str) -> None:
    seen: Counter[int] = Counter()

    async def main() -> None:
        draw, client = random.Random(0), HttpClient.to(server.address)
        for _ in range(INPUTS * 9 // 20):
            path = draw.choice(POSTS[name])
            body = spoiled(valid(name, path, draw), draw)
            headers = {"content-type": "application/msgpack", **(draw.choice(HEADERS) if draw.random() < 0.2 else {})}
            reply = await client.request("POST", path, body, headers)
            assert_documented(name, path, reply, (path, headers, body[:200]))
            seen[reply.status] += 1
        client.close()

    asyncio.run(main())
    assert {200, 400, 415} <= set(seen) | {200 if 202 in seen else 0}, "some are fine, some are not"


@both
def test_heads_that_nobody_meant_end_no_server(server: Server, name: str) -> None:
    draw = random.Random(1)
    for number in range(max(20, INPUTS // 100)):
        head = bytearray(f"POST {POSTS[name][0]} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        for _ in range(draw.randrange(1, 6)):
            head[draw.randrange(len(head))] = draw.randrange(256)
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
            sock.sendall(bytes(head))
            sock.shutdown(socket.SHUT_WR)
            answer = b""
            while part := sock.recv(65536):
                answer += part
        assert not answer or answer.startswith(b"HTTP/1.1 "), (number, head, answer[:100])
        assert b" 500 " not in answer.split(b"\r\n")[0], (number, head)


# ---- clients that behave badly


def _connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def _head(server: Server, length: int | str, path: str | None = None) -> bytes:
    head = f"POST {path or POSTS[server.name][0]} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {length}\r\n\r\n".encode()


@both
def test_a_body_over_the_bound_is_refused_before_it_is_read(server: Server, name: str) -> None:
    for length in (LIMITS[name] + 1, 2**40, 2**63 - 1):
        with _connect(server) as sock:
            sock.sendall(_head(server, length))  # and nothing of the body
            assert sock.recv(65536).startswith(b"HTTP/1.1 413 "), length
    with _connect(server) as sock:  # in parts, without a length: as soon as it is too long
        sock.sendall(_head(server, 0).replace(b"content-length: 0", b"transfer-encoding: chunked"))
        part = b"%x\r\n%s\r\n" % (MIB, b"x" * MIB)
        refused = False
        try:
            for _ in range(LIMITS[name] // MIB + 1):
                sock.sendall(part)
            refused = sock.recv(65536).startswith(b"HTTP/1.1 413 ")
        except (ConnectionResetError, BrokenPipeError):
            refused = True
        assert refused


@both
def test_slow_clients_and_those_that_leave_hold_nobody_up_and_leave_nothing(server: Server, name: str) -> None:
    body = FINE[name]
    whole = _head(server, len(body)) + body
    slow = [_connect(server) for _ in range(50)]
    for at, sock in enumerate(slow):
        sock.sendall(whole[: 1 + at * (len(whole) - 2) // 50])  # each has sent another part
    asyncio.run(_answers(server))
    for sock in slow[::3]:
        sock.close()
    for sock in slow[1::3]:
        sock.shutdown(socket.SHUT_WR)
    asyncio.run(_answers(server))
    for at, sock in enumerate(slow):
        if at % 3 == 2:  # the rest comes at last
            sock.sendall(whole[1 + at * (len(whole) - 2) // 50 :])
            assert sock.recv(65536).split(b" ")[1] in (b"200", b"202")
        sock.close()


@both
def test_clients_that_go_without_their_answer_leave_nothing_under_way(server: Server, name: str) -> None:
    body = FINE[name]
    for _ in range(max(20, INPUTS // 100)):
        with _connect(server) as sock:
            sock.sendall(_head(server, len(body)) + body)

    async def none_under_way() -> None:
        client = HttpClient.to(server.address, keep=0)
        async with asyncio.timeout(60):
            while True:
                status: Any = msgspec.json.decode((await client.request("GET", "/v1/status")).body)
                slots = status.get("slots", {})
                if not status.get("engine", {}).get("ranks_under_way") and not any(
                    slot["load_tokens"] for slot in slots.values()
                ):
                    return
                await asyncio.sleep(0.01)

    asyncio.run(none_under_way())


def test_a_server_that_is_not_there_is_said_to_be_unavailable() -> None:
    async def main() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with pytest.raises(Unavailable):
            await HttpClient("127.0.0.1", port).request("GET", "/healthz")

    asyncio.run(main())
