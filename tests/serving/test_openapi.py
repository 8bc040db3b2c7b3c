"""The documents say what is answered: their examples are sent, their statuses provoked, their references followed."""

import asyncio
import base64
import contextlib
import json
import re
import shlex
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import msgspec
import pytest

from engines import WatchedDevice
from relaygr import Engine, EngineConfig, History
from relaygr.cascade import FeaturePreProcessing, Pipeline, PipelineConfig
from relaygr.cascade.retrieval import FixedRetrieval
from relaygr.cascade.stage import FixedRanking
from relaygr.clock import RealClock
from relaygr.engine.simulated import SimulatedModel
from relaygr.errors import Overloaded, Unavailable
from relaygr.history import LmdbStore
from relaygr.history.store import StoreFull
from relaygr.relay import Evidence, Membership, Router, Trigger
from relaygr.serving import admin_operations, gateway, instance, openapi, operations
from relaygr.serving.admin_operations import PREFIX
from relaygr.serving.engine_server import serve_engine
from relaygr.serving.gateway import GatewayApp
from relaygr.serving.http import App, Reply, Request
from relaygr.serving.instance import InstanceApp
from relaygr.serving.link import EngineLink
from relaygr.serving.operations import GATEWAY, INSTANCE, Operation
from relaygr.serving.ranking import RelayRanking
from relaygr.serving.wire import Encoding, ErrorReply, PreInferBody, encode

HTTP_DOCUMENT = Path(__file__).parents[2] / "docs" / "http.md"
DOCUMENTS = {"gateway": json.loads(openapi.gateway_document()), "instance": json.loads(openapi.instance_document())}
OPERATIONS = {"gateway": GATEWAY, "instance": INSTANCE}
EXAMPLE = INSTANCE[0].examples["the whole history"]["behaviours"]


class BrokenLink:
    """A link whose engine answers with an error."""

    alive = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def call(self, what: object, *, late_at: float | None = None) -> Any:
        raise self._error


@dataclass
class Served:
    """An app of either kind over what it needs, and a client that knows its document."""

    name: str
    app: Any
    client: httpx.AsyncClient
    store: LmdbStore
    ranking: FixedRanking
    seen: set[tuple[str, int]]

    async def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        """The reply, whose status must be documented, as must its headers, and its body be what is documented."""
        reply = await self.client.request(method, path, **request)
        self.seen.add((path, reply.status_code))
        operations = DOCUMENTS[self.name]["paths"].get(path)
        if operations is None:
            assert reply.status_code == 404
            msgspec.json.decode(reply.content, type=ErrorReply)
            return reply
        (operation,) = operations.values()
        documented = operation["responses"].get(str(reply.status_code))
        assert documented, f"{path} answered {reply.status_code}, which its document does not name: {reply.text}"
        assert reply.headers["content-type"] in documented["content"]
        own = {name for name in reply.headers if name.startswith("x-") or name in ("retry-after", "allow")}
        assert own == set(documented["headers"])
        return reply

    async def example(self, operation: Operation, name: str | None = None) -> httpx.Response:
        body = {} if name is None else {"json": operation.examples[name]}
        headers = {parameter: str(operations.PARAMETERS[parameter][2]) for parameter in operation.parameters}
        return await self.send(operation.method, operation.path, headers=headers, **body)


@contextlib.asynccontextmanager
async def serve(folder: Path, name: str) -> AsyncIterator[Served]:
    clock = RealClock()
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(LmdbStore(folder / "store"))
        store.append("user-7", **{column: EXAMPLE[column] for column in ("items", "actions", "timestamps")})
        fixed = FixedRanking(clock)
        app: App
        if name == "gateway":
            membership = Membership()
            membership.add("slot-0", "http://127.0.0.1:1")
            membership.observe("slot-0", Evidence.READY)
            features = FeaturePreProcessing(request_features=0, candidate_features=0)
            budgets = PipelineConfig(
                pipeline_ms=40_000, ranking_ms=20_000, signal_grace_ms=10_000, retrieve=20, candidates=10
            )
            pipeline = await stack.enter_async_context(
                Pipeline(store, FixedRetrieval(range(20, 40)), features, fixed, None, budgets, clock=clock)
            )
            ranking = RelayRanking(membership, Router(membership), Trigger(), clock)
            ranking.actions["slot-0"] = 16
            app = GatewayApp(pipeline, store, ranking)
        else:
            config = EngineConfig(device_cache="64KiB", host_cache="0", max_history=400)
            engine = await stack.enter_async_context(Engine(SimulatedModel(), config, executor=WatchedDevice()))
            ready, until = asyncio.Event(), asyncio.Event()
            serving = asyncio.create_task(serve_engine(engine, str(folder / "engine"), ready.set, until))
            await ready.wait()
            link = await EngineLink.connect(str(folder / "engine"))

            async def stop() -> None:
                await link.close()
                until.set()
                await serving

            stack.push_async_callback(stop)
            app = InstanceApp(link, store, "slot-0")
        client = await stack.enter_async_context(
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://relay")
        )
        yield Served(name, app, client, store, fixed, set())


def run(folder: Path, name: str, test: Callable[[Served], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with serve(folder, name) as served:
            await test(served)

    asyncio.run(main())


both = pytest.mark.parametrize("name", ["gateway", "instance"])


def within(value: Any) -> Iterator[Any]:
    yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from within(part)


# ---- the documents by themselves


@both
def test_every_reference_is_resolved_and_every_component_used(name: str) -> None:
    document = DOCUMENTS[name]
    used = set()
    for part in within(document):
        if isinstance(part, dict) and "$ref" in part:
            found = document
            for step in part["$ref"].removeprefix("#/").split("/"):
                found = found[step]
            used.add(part["$ref"])
    schemas = {f"#/components/schemas/{schema}" for schema in document["components"]["schemas"]}
    assert schemas <= used


@both
def test_a_document_is_openapi_with_words_for_everything(name: str) -> None:
    document = DOCUMENTS[name]
    assert document["openapi"] == "3.1.0"
    assert document["info"]["title"]
    assert document["info"]["version"]
    ids = []
    for methods in document["paths"].values():
        for operation in methods.values():
            ids.append(operation["operationId"])
            assert operation["summary"]
            assert operation["description"]
            assert all(response["description"] for response in operation["responses"].values())
    assert len(ids) == len(set(ids))
    for schema in document["components"]["schemas"].values():
        assert schema["description"]


@both
def test_the_fields_that_travel_have_sentences(name: str) -> None:
    bare = {
        (kind, field)
        for kind, schema in DOCUMENTS[name]["components"]["schemas"].items()
        for field, value in schema["properties"].items()
        if "description" not in value
    }
    told = {"SlotStatus", "GatewayStatus", "InstanceStatus", "EngineStatus", "RecommendedItem", "Alive", "Ready"}
    assert {field for kind, field in bare if kind not in told} <= {"user", "item"}


@pytest.mark.parametrize(
    "operation",
    {o.path: o for o in (*GATEWAY, *INSTANCE, *admin_operations.GATEWAY, *admin_operations.INSTANCE)}.values(),
    ids=lambda operation: operation.path,
)
def test_examples_are_what_the_structs_read(operation: Operation) -> None:
    if operation.body is not None:
        assert operation.examples
        for body in operation.examples.values():
            msgspec.json.decode(msgspec.json.encode(body), type=operation.body)
    if operation.reply not in (bytes, dict):
        for example in (operation.example, *operation.also.values()):
            decoded: Any = msgspec.json.decode(msgspec.json.encode(example), type=operation.reply)
            assert msgspec.to_builtins(decoded).keys() == example.keys() == get_type_hints(operation.reply).keys()


def test_examples_of_errors_are_what_the_struct_reads() -> None:
    for status, example in operations.ERRORS.items():
        assert msgspec.convert(example, ErrorReply).message, status


# ---- the documents and the apps


@both
def test_every_path_answers_as_its_examples_say(tmp_path: Path, name: str) -> None:
    async def test(served: Served) -> None:
        assert served.app.calls == {operation.path: operation.method for operation in OPERATIONS[name]}
        assert (await served.client.get("/openapi.json")).json() == DOCUMENTS[name]
        for operation in OPERATIONS[name]:
            for example in operation.examples or (None,):
                reply = await served.example(operation, example)
                assert reply.status_code == operation.status, reply.text
                if operation.reply is bytes:
                    assert operation.example in reply.text
                elif operation.reply is dict:
                    assert reply.json()["openapi"] == operation.example["openapi"]
                else:
                    assert reply.json().keys() == operation.example.keys()
                    msgspec.json.decode(reply.content, type=operation.reply)

    run(tmp_path, name, test)


async def provoke_anywhere(served: Served, operation: Operation, limit: int) -> None:
    other = "GET" if operation.method == "POST" else "POST"
    refused = await served.send(other, operation.path, headers={"content-type": "text/plain"})
    assert (refused.status_code, refused.headers["allow"]) == (405, operation.method)
    large = await served.send(operation.method, operation.path, content=bytes(limit + 1))
    assert large.status_code == 413


async def provoke_posted(served: Served, operation: Operation) -> None:
    send = served.send
    assert (await send("POST", operation.path, content=b"{")).status_code == 400
    plain = await send("POST", operation.path, content=b"{}", headers={"content-type": "text/plain"})
    assert plain.status_code == 415
    served.app.draining = True
    for example in operation.examples:
        assert (await served.example(operation, example)).status_code == 503
    served.app.draining = False


async def provoke_late(served: Served, operation: Operation) -> None:
    body = next(iter(operation.examples.values()))
    late = await served.send("POST", operation.path, json=body, headers={"x-relaygr-deadline-ms": "0"})
    assert late.status_code == 504


async def provoke_unexpected(served: Served, name: str) -> None:
    class Broken(type(served.app)):  # type: ignore[misc]
        async def route(self, request: Request, encoding: Encoding) -> Reply | None:
            raise ZeroDivisionError("a bug")

    served.app.__class__ = Broken
    for operation in OPERATIONS[name]:
        reply = await served.send(operation.method, operation.path)
        assert reply.status_code == 500
        assert "a bug" not in reply.text


def test_a_gateway_answers_all_documented_statuses_and_no_other(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        await served.send("GET", "/nothing")
        for operation in GATEWAY:
            await served.example(operation, next(iter(operation.examples), None))
            await provoke_anywhere(served, operation, gateway.MAX_BODY)
            if operation.body is not None:
                await provoke_posted(served, operation)
        recommend, behaviours = GATEWAY[:2]
        served.app._writing = gateway.MAX_WRITES
        assert (await served.example(behaviours, "one behaviour")).status_code == 429
        served.app._writing = 0
        await provoke_late(served, recommend)
        await provoke_late(served, behaviours)
        served.ranking.rank_error = Overloaded("too much")
        reply = await served.example(recommend, "two items")
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        served.ranking.rank_error = Unavailable("gone")
        assert (await served.example(recommend, "two items")).status_code == 503
        served.app.draining = True
        assert (await served.send("GET", "/readyz")).status_code == 503
        await provoke_unexpected(served, "gateway")
        assert served.seen - {("/nothing", 404)} == documented("gateway")

    run(tmp_path, "gateway", test)


def test_an_instance_answers_all_documented_statuses_and_no_other(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        await served.send("GET", "/nothing")
        for operation in INSTANCE:
            await served.example(operation, next(iter(operation.examples), None))
            await provoke_anywhere(served, operation, instance.MAX_BODY)
            if operation.body is not None:
                await provoke_posted(served, operation)
                await provoke_late(served, operation)
                wrong = {**operation.examples["by digest"], "digest": "A" * 22 + "=="}
                conflict = await served.send("POST", operation.path, json=wrong)
                assert conflict.status_code == 409
        served.app._engine = BrokenLink(Overloaded("too much"))
        assert (await served.example(INSTANCE[1], "a new user")).status_code == 429
        served.app._engine = BrokenLink(Unavailable("gone"))
        assert (await served.send("GET", "/v1/status")).status_code == 503
        served.app.draining = True
        assert (await served.send("GET", "/readyz")).status_code == 503
        await provoke_unexpected(served, "instance")
        assert served.seen - {("/nothing", 404)} == documented("instance")

    run(tmp_path, "instance", test)


def documented(name: str) -> set[tuple[str, int]]:
    return {
        (path, int(status))
        for path, operations in DOCUMENTS[name]["paths"].items()
        if not path.startswith(PREFIX)  # operators' calls have tests of their own
        for operation in operations.values()
        for status in operation["responses"]
    }


# ---- answers that were wrong or missing


def test_whatever_is_wrong_with_a_number_is_a_400(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        changes: tuple[dict[str, Any], ...] = (
            {"start": 2**70},
            {"start": 127},
            {"start": 2**62},
            {"length": 2**63},
            {"length": 2**70, "digest": "A" * 22 + "=="},
            {"features": [[1.0], [1.0, 2.0], [3.0]]},
            {"features": [[1e300], [1.0], [1.0]]},
            {"features": []},
            {"request": [1e300]},
            {"context": [2**64]},
            {"user": "\ud800"},
        )
        for change in changes:
            body = json.dumps({"user": "user-7", "length": 0, "candidates": [1, 2, 3], **change})
            reply = await served.send("POST", "/v1/rank", content=body)
            assert reply.status_code == 400, (change, reply.text)

    run(tmp_path, "instance", test)


ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, 2**70, 1.5, 1e300, "", "x", "AAAA", "A" * 600, "\ud800", "\0"),
    *([], [[]], [1], [-1], [2**64], ["x"], [1.0, None], [[1.0], []], [[1e300]], {}, {"items": [1]}, {"x": 1}),
)


@both
def test_nothing_odd_in_a_body_is_unexpected(tmp_path: Path, name: str) -> None:
    async def test(served: Served) -> None:
        for operation in OPERATIONS[name]:
            if operation.body is None:
                continue
            for example in operation.examples.values():
                for field in get_type_hints(operation.body):
                    for value in ODD:
                        body = json.dumps({**example, field: value})
                        reply = await served.send("POST", operation.path, content=body)
                        assert reply.status_code != 500, (field, value)

    run(tmp_path, name, test)


@pytest.mark.parametrize("field", ["context", "candidates", "features", "request", "digest", "behaviours"])
def test_nothing_odd_in_raw_arrays_is_unexpected(tmp_path: Path, field: str) -> None:
    async def test(served: Served) -> None:
        headers = {"content-type": Encoding.MSGPACK.value}
        for raw in (b"", b"1", b"1234", bytes(8), bytes(12), b"\xff" * 8, b"\xff" * 16, bytes(24)):
            value = {"items": raw, "actions": raw[: len(raw) // 2], "timestamps": raw} if field == "behaviours" else raw
            body = msgspec.msgpack.encode({"user": "user-7", "candidates": bytes(24), "length": 0, field: value})
            reply = await served.send("POST", "/v1/rank", content=body, headers=headers)
            assert reply.status_code != 500, raw
            for cut in (1, len(body) // 2, len(body) - 1):
                reply = await served.send("POST", "/v1/rank", content=body[:cut], headers=headers)
                assert reply.status_code == 400

    run(tmp_path, "instance", test)


def test_a_gateway_refuses_numbers_that_do_not_fit(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        reply = await served.send("POST", "/v1/recommend", json={"user": "user-7", "context": [2**64]})
        assert (reply.status_code, reply.json()["field"]) == (400, "context")
        one = {"item": 1, "action": 2**40, "timestamp": 2**60}
        reply = await served.send("POST", "/v1/behaviours", json={"user": "user-7", "behaviours": [one]})
        assert reply.status_code == 400
        fine = {"item": 1, "action": 1, "timestamp": 1700000180}
        for change, field, entry in (
            ({"item": -1}, "behaviours.item", "entry 1 is -1"),
            ({"action": 16}, "behaviours.action", "entry 1 is 16"),
            ({"timestamp": 10**12}, "behaviours.timestamp", f"entry 1, {10**12}, looks like milliseconds"),
        ):
            body = {"user": "user-7", "behaviours": [fine, {**fine, **change}]}
            told = (await served.send("POST", "/v1/behaviours", json=body)).json()
            assert told["field"] == field
            assert entry in told["message"]

    run(tmp_path, "gateway", test)


def test_a_call_that_fails_unexpectedly_in_the_engine_is_answered(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        body = encode(Encoding.MSGPACK, PreInferBody(user="user-7", length=0))
        headers = {"content-type": Encoding.MSGPACK.value}
        real = served.app._engine.call

        async def call(what: Any, **late: Any) -> Any:
            what.context = b"123"  # not whole numbers
            return await real(what, **late)

        served.app._engine.call = call
        async with asyncio.timeout(20):
            reply = await served.send("POST", "/v1/pre-infer", content=body, headers=headers)
        assert reply.status_code == 500
        assert msgspec.msgpack.decode(reply.content, type=ErrorReply).error == "RelayError"

    run(tmp_path, "instance", test)


def test_a_full_store_is_unavailable_and_says_why(tmp_path: Path) -> None:
    class Full:
        def append(self, *args: Any) -> int:
            raise StoreFull("no room")

    async def test(served: Served) -> None:
        served.app._store = Full()
        reply = await served.example(GATEWAY[1], "one behaviour")
        assert (reply.status_code, reply.json()["message"]) == (503, "no room")

    run(tmp_path, "gateway", test)


@both
def test_a_client_that_goes_before_its_request_is_whole_leaves_nothing(tmp_path: Path, name: str) -> None:
    async def test(served: Served) -> None:
        messages = iter(({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}))
        sent: list[Any] = []

        async def receive() -> Any:
            return next(messages)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/rank", "headers": []}
        await served.app(scope, receive, send)
        assert not sent
        assert served.app.busy == 0
        assert not served.app.requests

    run(tmp_path, name, test)


@both
def test_headers_that_are_given_twice_are_refused(tmp_path: Path, name: str) -> None:
    async def test(served: Served) -> None:
        operation = OPERATIONS[name][0]
        body = json.dumps(next(iter(operation.examples.values())))
        twice = [("x-relaygr-deadline-ms", "5000"), ("x-relaygr-deadline-ms", "1")]
        reply = await served.send("POST", operation.path, content=body, headers=twice)
        assert (reply.status_code, reply.json()["field"]) == (400, "x-relaygr-deadline-ms")
        twice = [("content-type", "application/json"), ("content-type", "application/msgpack")]
        assert (await served.send("POST", operation.path, content=body, headers=twice)).status_code == 415
        assert (await served.send("GET", "/healthz", headers=twice)).status_code == 200

    run(tmp_path, name, test)


def test_a_request_is_busy_until_its_reply_is_sent(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        busy: list[int] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            busy.append(served.app.busy)

        await served.app({"type": "http", "method": "GET", "path": "/healthz", "headers": []}, receive, send)
        assert busy == [1, 1]

    run(tmp_path, "gateway", test)


# ---- the page for people


def curls() -> list[tuple[str, list[str], Any]]:
    """(app, arguments, reply) of every curl in the page that is followed by its reply."""
    text = HTTP_DOCUMENT.read_text(encoding="utf-8")
    found = re.findall(r"```sh\n(curl .*?)```\n\n```json\n(.*?)```", text, re.DOTALL)
    apps = {"8000": "gateway", "8100": "instance"}
    shown = []
    for command, reply in found:
        words = shlex.split(command)
        port = next(word for word in words if word.startswith("localhost:")).partition(":")[2].partition("/")[0]
        shown.append((apps[port], words, json.loads(reply)))
    return shown


@both
def test_the_curls_of_the_page_are_answered_as_it_says(tmp_path: Path, name: str) -> None:
    async def test(served: Served) -> None:
        sent = 0
        for app, words, shown in curls():
            if app != name:
                continue
            address = next(word for word in words if word.startswith("localhost:"))
            headers = dict(words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H")
            body = next((words[at + 1] for at, word in enumerate(words) if word == "--json"), None)
            path = "/" + address.partition("/")[2]
            if body is None:
                reply = await served.send("GET", path, headers=headers)
            else:
                headers["content-type"] = "application/json"
                reply = await served.send("POST", path, content=body, headers=headers)
            assert reply.json().keys() == shown.keys(), reply.text
            if "error" in shown:
                assert reply.json()["error"] == shown["error"]
                assert reply.json()["field"] == shown["field"]
            sent += 1
        assert sent >= 2

    run(tmp_path, name, test)


def test_the_page_names_every_call_and_every_status() -> None:
    text = HTTP_DOCUMENT.read_text(encoding="utf-8")
    for name in DOCUMENTS:
        for path, status in documented(name):
            assert path in text, path
            assert str(status) in text, status
    assert "x-relaygr-deadline-ms" in text


def test_the_digest_of_the_examples_is_that_of_their_behaviours() -> None:
    history = History(EXAMPLE["items"], EXAMPLE["actions"], EXAMPLE["timestamps"])
    assert base64.b64decode(INSTANCE[0].examples["by digest"]["digest"]) == history.digest()
