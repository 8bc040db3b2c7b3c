"""What cannot be decoded is refused under the field that is wrong, whatever the body calls its fields."""

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.errors import InvalidInput
from relaygr.serving.http import error_reply
from relaygr.serving.wire import BehavioursBody, Encoding, ErrorReply, RankBody, RecommendBody, decode

encodings = pytest.mark.parametrize("encoding", Encoding)
ONE = {"item": 1, "action": 1, "timestamp": 1}
HOSTILE = {
    "empty": "",
    "backtick": "a`b",
    "line": "a\nb",
    "control": "a\x00b",
    "bracket": "a[3]",
    "dotted": "behaviours.item",
    "place": "a` - at `$.k`",
    "header": "content-type",
    "quote": 'a"b',
    "not ASCII": "größe",
    "long": "x" * 100_000,
}


def refused(encoding: Encoding, body: bytes, kind: type[Any]) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        decode(encoding, body, kind)
    return caught.value


def written(encoding: Encoding, body: object) -> bytes:
    return msgspec.msgpack.encode(body) if encoding is Encoding.MSGPACK else json.dumps(body).encode()


@encodings
@pytest.mark.parametrize(
    ("kind", "body", "field", "sentence"),
    [
        (RecommendBody, {"k": 3}, "user", "user: is missing"),
        (RecommendBody, {"user": "u", "limit": 3}, "limit", "limit: is no field that is read here"),
        (RecommendBody, {"user": 3}, "user", "user: must be text, not an integer"),
        (
            RecommendBody,
            {"user": "u", "context": [1, "x"]},
            "context",
            "context: must be an integer, not text, at context[1]",
        ),
        (RankBody, {"user": "u", "candidates": [1], "length": -1}, "length", "length: must be an integer >= 0"),
        (
            RankBody,
            {"user": "u", "candidates": [1], "features": [[1.0], [0.0, "x"]]},
            "features",
            "features: must be a number, not text, at features[1][1]",
        ),
        (
            RankBody,
            {"user": "u", "candidates": [1], "behaviours": {"items": [1, "x"]}},
            "behaviours.items",
            "behaviours.items: must be an integer, not text, at behaviours.items[1]",
        ),
        (
            BehavioursBody,
            {"user": "u", "behaviours": [ONE, {"item": 1, "action": 1}]},
            "behaviours.timestamp",
            "behaviours.timestamp: is missing, at behaviours[1]",
        ),
        (
            BehavioursBody,
            {"user": "u", "behaviours": [ONE, {**ONE, "weight": 2}]},
            "behaviours.weight",
            "behaviours.weight: is no field that is read here, at behaviours[1]",
        ),
        (
            BehavioursBody,
            {"user": "u", "behaviours": [ONE, {**ONE, "item": "x"}]},
            "behaviours.item",
            "behaviours.item: must be an integer, not text, at behaviours[1].item",
        ),
        (
            BehavioursBody,
            {"user": "u", "behaviours": [ONE, 3]},
            "behaviours",
            "behaviours: must be an object, not an integer, at behaviours[1]",
        ),
        (
            RankBody,
            {"user": "u", "candidates": 5},
            "candidates",
            "candidates: must be a list or raw bytes, not an integer",
        ),
        (
            RankBody,
            {"user": "u", "candidates": [1, 1.5]},
            "candidates",
            "candidates: must be an integer, not a fraction, at candidates[1]",
        ),
        (
            RankBody,
            {"user": "u", "candidates": [1], "start": 5},
            "start",
            "start: must be an integer that's a multiple of 128",
        ),
        (RecommendBody, ["u"], "body", "body: must be an object, not a list"),
    ],
)
def test_the_field_is_its_path_and_the_sentence_says_which_entry(
    encoding: Encoding, kind: type[Any], body: object, field: str, sentence: str
) -> None:
    error = refused(encoding, written(encoding, body), kind)
    assert (error.field, str(error)) == (field, sentence)


@encodings
def test_where_a_body_ends_early_or_is_none_it_is_the_body(encoding: Encoding) -> None:
    whole = written(encoding, {"user": "u", "behaviours": [ONE]})
    for cut in range(len(whole)):
        assert refused(encoding, whole[:cut], BehavioursBody).field == "body", cut
    for other in (whole + b"\x00", b"\xff" + whole, whole.replace(b"item", b"it\xffm")):
        assert refused(encoding, other, BehavioursBody).field == "body", other


@encodings
def test_text_that_is_not_utf_8_is_said_so(encoding: Encoding) -> None:
    body = written(encoding, {"user": "umlaut"}).replace(b"uml", b"u\xffl")
    said = refused(encoding, body, RecommendBody).problem
    assert said == "has text that is not UTF-8: the byte 0xff is none of it"


def test_names_that_are_no_text_are_refused_where_they_are() -> None:
    body = msgspec.msgpack.encode({"user": "u", "behaviours": [{3: 1}]})
    error = refused(Encoding.MSGPACK, body, BehavioursBody)
    assert (error.field, error.problem) == ("behaviours", "has a field whose name is no text, at behaviours[0]")
    assert refused(Encoding.MSGPACK, msgspec.msgpack.encode({3: 1}), BehavioursBody).field == "body"


def told(encoding: Encoding, error: InvalidInput) -> ErrorReply:
    reply = error_reply(error, encoding)
    assert reply.status == 400
    assert len(reply.body) < 2_000
    return decode(encoding, reply.body, ErrorReply)


@encodings
@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_a_body_calls_its_fields_is_shown_and_never_the_field_unless_it_is_a_word(
    encoding: Encoding, name: str
) -> None:
    for body, field in (
        ({"user": "u", "behaviours": [], name: 1}, "body"),
        ({"user": "u", "behaviours": [{name: 1}]}, "behaviours"),
    ):
        reply = told(encoding, refused(encoding, written(encoding, body), BehavioursBody))
        assert reply.field == field
        assert f"{field}: has a field {json.dumps(name, ensure_ascii=False)[:200]}" in reply.message
        assert reply.message.isprintable()


ENDINGS = st.sampled_from(["", "` - at `$.k", "` - at `$.", "` - at `key` in `$", "` - at `$[" + "[" * 999, "`"])


@encodings
@given(name=st.text(st.characters(exclude_categories=["Cs"])), ending=ENDINGS, repeat=st.sampled_from([1, 1000]))
def test_no_name_makes_a_field_that_is_no_path_of_words(
    encoding: Encoding, name: str, ending: str, repeat: int
) -> None:
    for called in (name + ending, name + ending + (name or "y") * repeat):
        if called in ("user", "k", "context"):
            continue
        reply = told(encoding, refused(encoding, written(encoding, {"user": "u", called: 1}), RecommendBody))
        assert reply.field is not None
        assert len(reply.field) <= 300
        assert re.fullmatch(r"\w+(\.\w+)*", reply.field, re.ASCII)
