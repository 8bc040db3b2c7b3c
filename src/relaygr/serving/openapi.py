"""OpenAPI documents of gateway and instance, made from their operations and the structs that travel.

Descriptions are the docstrings of structs and fields.
"""

import ast
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import is_dataclass
from functools import cache
from importlib import metadata
from typing import Any, Final

import msgspec

from relaygr.engine import EngineCounts, EngineStatus
from relaygr.serving import admin_operations
from relaygr.serving.admin_operations import DrainBody, EvictBody, EvictReply, SwapBody, SwapReply
from relaygr.serving.operations import ALWAYS, ERRORS, GATEWAY, HEADERS, INSTANCE, PARAMETERS, Operation
from relaygr.serving.wire import (
    Alive,
    Behaviour,
    Behaviours,
    BehavioursBody,
    BehavioursReply,
    Encoding,
    ErrorReply,
    GatewayStatus,
    InstanceStatus,
    PreInferBody,
    PreInferReply,
    RankBody,
    RankReply,
    Ready,
    RecommendBody,
    RecommendedItem,
    RecommendReply,
    SlotStatus,
)

__all__ = ["gateway_document", "instance_document"]

Json = dict[str, Any]

_TYPES: Final = (
    *(Behaviour, Behaviours, BehavioursBody, BehavioursReply, RecommendBody, RecommendReply, RecommendedItem),
    *(PreInferBody, PreInferReply, RankBody, RankReply, GatewayStatus, SlotStatus, InstanceStatus, Alive, Ready),
    *(ErrorReply, EngineStatus, EngineCounts, DrainBody, EvictBody, EvictReply, SwapBody, SwapReply),
)


@cache
def gateway_document() -> bytes:
    """What a gateway serves under /openapi.json."""
    about = "The cascade behind one call, and the behaviours that come in."
    return _document("RelayGR gateway", about, (*GATEWAY, *admin_operations.GATEWAY))


@cache
def instance_document() -> bytes:
    """What an instance serves under /openapi.json."""
    about = "Pre-inference and ranking on one device."
    return _document("RelayGR instance", about, (*INSTANCE, *admin_operations.INSTANCE))


def _document(title: str, about: str, operations: tuple[Operation, ...]) -> bytes:
    used = {kind for operation in operations for kind in (operation.body, operation.reply)}
    kinds = [kind for kind in _TYPES if kind in used or kind is ErrorReply]
    rest = (
        "Bodies are JSON, or msgpack where the content type says so: then arrays are raw little-endian bytes (int64 "
        "ids and times, int32 actions, float32 numbers), and replies and errors come in msgpack too. Unknown fields "
        "are refused. Every error has the same body; any other path is a 404. A request that does not arrive within "
        "30 s gets 408, one whose line and headers have not ended after 64 KiB 431, and their connections are closed."
    )
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": title, "version": metadata.version("relaygr"), "description": f"{about} {rest}"},
            "paths": {operation.path: {operation.method.lower(): _operation(operation)} for operation in operations},
            "components": {
                "schemas": _schemas(kinds),
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
                "responses": {"NotFound": _error(404, "There is no such path.")},
                "headers": {
                    name: {"description": text, "schema": {"type": "string"}} for name, text in HEADERS.items()
                },
                "parameters": {
                    name: {"name": name, "in": "header", "description": text, "schema": schema, "example": example}
                    for name, (text, schema, example) in PARAMETERS.items()
                },
            },
        }
    )


def _operation(operation: Operation) -> Json:
    errors = {**operation.errors, **ALWAYS}
    responses: Json = {str(operation.status): _reply(operation, operation.example)}
    responses |= {str(status): _reply(operation, example) for status, example in operation.also.items()}
    encodings = list(Encoding) if operation.body is not None else [Encoding.JSON]
    responses |= {str(status): _error(status, text, encodings) for status, text in errors.items()}
    told: Json = {
        "operationId": operation.path.strip("/").replace("/", "_").replace("-", "_").removesuffix(".json"),
        "summary": operation.summary,
        "description": operation.description,
        "responses": dict(sorted(responses.items())),
    }
    if operation.token:
        told["security"] = [{"token": []}]
    if operation.parameters:
        told["parameters"] = [{"$ref": f"#/components/parameters/{name}"} for name in operation.parameters]
    if operation.body is not None:
        content = {"schema": _ref(operation.body)}
        examples = {name.replace(" ", "_"): {"summary": name, "value": v} for name, v in operation.examples.items()}
        json = {**content, "examples": examples}
        told["requestBody"] = {"required": True, "content": {Encoding.JSON: json, Encoding.MSGPACK: content}}
    return told


def _reply(operation: Operation, example: Any) -> Json:
    if operation.reply is bytes:
        schema: Json = {"type": "string"}
    elif operation.reply is dict:
        schema = {"type": "object"}
    else:
        schema = _ref(operation.reply)
    content: Json = {operation.content_type: {"schema": schema, "examples": {"reply": {"value": example}}}}
    if operation.body is not None:
        content[Encoding.MSGPACK] = {"schema": schema}
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in operation.headers}
    told = inspect.getdoc(operation.reply) if "$ref" in schema else operation.summary
    return {"description": told, "content": content, "headers": headers}


def _error(status: int, text: str, encodings: Sequence[Encoding] = (Encoding.JSON,)) -> Json:
    content: Json = {encoding: {"schema": _ref(ErrorReply)} for encoding in encodings}
    if status in (401, 403, 404, 405, 413):  # told before the request's own encoding is looked at
        content = {Encoding.JSON: {"schema": _ref(ErrorReply)}}
    content[Encoding.JSON]["examples"] = {"error": {"value": ERRORS[status]}}
    names = _ERROR_HEADERS.get(status, ())
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    return {"description": text, "content": content, "headers": headers}


_ERROR_HEADERS: Final = {
    401: ("www-authenticate",),
    405: ("allow",),
    429: ("retry-after",),
    503: ("retry-after",),
}


def _ref(kind: type) -> Json:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _schemas(kinds: Sequence[type]) -> Json:
    """The schemas of these types and of those within, with the sentences of their fields."""
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind in _TYPES:
        if kind.__name__ in schemas:
            properties = schemas[kind.__name__]["properties"]
            for name, text in _sentences(kind).items():
                properties[name]["description"] = text
    return schemas


def _sentences(kind: type) -> dict[str, str]:
    """The strings that stand below fields, those of its bases included."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if not (is_dataclass(owner) or (issubclass(owner, msgspec.Struct) and owner is not msgspec.Struct)):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(tree, ast.ClassDef)
        for line, below in zip(tree.body, tree.body[1:], strict=False):
            match line, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found
