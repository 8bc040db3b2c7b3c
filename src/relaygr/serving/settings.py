"""The one file that configures servers: read, refused where it is wrong, and written with its comments.

Nothing is defined twice. Keys, defaults and checks are those of the components' own config classes, comments are the
sentences under their fields; where an operator has another word for a field, `_WORDS` has it.
"""

import ast
import functools
import inspect
import json
import math
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from relaygr.cascade.pipeline import PipelineConfig
from relaygr.config import EngineConfig
from relaygr.errors import InvalidInput
from relaygr.relay import MembershipConfig, RouterConfig, TriggerConfig
from relaygr.serving.admin import AdminSettings
from relaygr.serving.modes import RelaySettings
from relaygr.serving.ray_settings import RaySettings
from relaygr.shown import shown

__all__ = ["DataSettings", "GatewaySettings", "InstanceSettings", "Overrides", "Settings", "mistakes", "read", "render"]

T = TypeVar("T")
Overrides = Mapping[str, Mapping[str, object]]
"""Sections of the file as given otherwise, on a command line say; None: not given."""

_WORDS: Final = {
    "pipeline_ms": "pipeline_budget_ms",
    "ranking_ms": "ranking_budget_ms",
    "lease_share": "memory_share",
    "pre_infer_share": "device_time_share",
}
"""The operator's words for fields of components."""
_TOLD_ELSEWHERE: Final = {
    (TriggerConfig, "ranking_budget_ms"),
    (TriggerConfig, "mode"),
    (RouterConfig, "affinity"),
    (EngineConfig, "reuse"),
}
"""Fields that are no keys: the cascade's budget and the relay's mode say them."""
_WIDTH: Final = 100
_HEADER: Final = (
    "Settings of RelayGR's servers. A key that is left out keeps its default; an unknown one is refused. Options of "
    "the commands come before this file. `relaygr config --check FILE` tells whether a file is fine."
)


@dataclass(frozen=True)
class DataSettings:
    """What is served. Paths are relative to where the server is started; `serve all` makes what is not named here."""

    model: str | None = None
    """The checkpoint that instances serve."""
    catalogue: str | None = None
    """The items that the gateway can recommend."""
    store: str | None = None
    """Where histories are kept: a folder, for the gateway and the instances of one machine (LMDB), or
    "redis://host:6379/0", for those of many. An instance without a store is sent whole histories."""

    def __post_init__(self) -> None:
        for name in ("model", "catalogue", "store"):
            if getattr(self, name) == "":
                raise InvalidInput(name, "must not be empty; leave it out instead")

    def need(self, name: Literal["model", "catalogue", "store"]) -> str:
        """The path; InvalidInput if it is not set."""
        path: str | None = getattr(self, name)
        if path is None:
            raise InvalidInput(f"data.{name}", "is not set; write it in the file, or give the option of that name")
        return path


@dataclass(frozen=True)
class InstanceSettings:
    """One instance: an engine process and its frontend. `serve all` chooses slots, addresses and ports by itself."""

    slot: str = "slot-0"
    """Its stable name in the ring: the same after a restart."""
    host: str = "127.0.0.1"
    """The address to listen on; loopback unless told otherwise."""
    port: int = 8100
    """The port to listen on; 0 takes a free one."""
    drain_s: float = 10.0
    """How long it finishes what it has taken when it is told to stop."""
    threads: int | None = None
    """Threads for the model on a CPU; None: as many as there are cores but one, which the engine\'s loop needs."""

    def __post_init__(self) -> None:
        if not self.slot:
            raise InvalidInput("slot", "must not be empty")
        _check_listening(self.host, self.port, self.drain_s)
        if self.threads is not None and self.threads < 1:
            raise InvalidInput("threads", f"must be at least 1, not {self.threads}")


@dataclass(frozen=True)
class GatewaySettings:
    """One gateway, and where its instances are."""

    host: str = "127.0.0.1"
    """The address to listen on; loopback unless told otherwise."""
    port: int = 8000
    """The port to listen on; 0 takes a free one."""
    drain_s: float = 10.0
    """How long it finishes what it has taken when it is told to stop."""
    request_features: int = 0
    """Features of a request: as many as the model reads."""
    candidate_features: int = 0
    """Features of a candidate: as many as the model reads."""
    retrieval_url: str | None = None
    """A retrieval service of your own, asked by POST in JSON. None: FAISS over the catalogue."""
    retrieval_at_least_ms: float = 0.0
    """How long retrieval takes at least: stands in for one over more items where the relay is tried out."""
    instances: Mapping[str, str] = field(default_factory=dict)
    """The instances that `serve gateway` sends to, each slot with its address: slot-0 = "http://127.0.0.1:8100"."""

    def __post_init__(self) -> None:
        _check_listening(self.host, self.port, self.drain_s)
        for name in ("request_features", "candidate_features"):
            if getattr(self, name) < 0:
                raise InvalidInput(name, "must not be negative")
        if self.retrieval_url is not None and urlsplit(self.retrieval_url).scheme not in ("http", "https"):
            raise InvalidInput("retrieval_url", f"is {shown(self.retrieval_url)}; it begins with http:// or https://")
        if not 0 <= self.retrieval_at_least_ms < math.inf:
            raise InvalidInput("retrieval_at_least_ms", "must be finite and not negative")
        for slot, address in self.instances.items():
            if not slot:
                raise InvalidInput("instances", "has a slot without a name")
            if not _is_address(address):
                raise InvalidInput(f"instances.{slot}", f'is {shown(address)}; write it as "http://127.0.0.1:8100"')


@dataclass(frozen=True)
class Settings:
    """Everything that servers can be told. One field a section of the file."""

    relay: RelaySettings = field(default_factory=RelaySettings)
    cascade: PipelineConfig = field(default_factory=PipelineConfig)
    trigger: TriggerConfig = field(default_factory=TriggerConfig)
    """With the ranking budget of the cascade, whatever its own says: there is one."""
    router: RouterConfig = field(default_factory=RouterConfig)
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    data: DataSettings = field(default_factory=DataSettings)
    instance: InstanceSettings = field(default_factory=InstanceSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    ray: RaySettings = field(default_factory=RaySettings)

    def __post_init__(self) -> None:
        one_budget = replace(self.trigger, ranking_budget_ms=self.cascade.ranking_ms)
        object.__setattr__(self, "trigger", one_budget)

    @property
    def in_mode(self) -> "Settings":
        """With what the relay's mode says about engine, trigger and router: what servers run with."""
        mode = self.relay.mode
        return replace(
            self, engine=mode.engine(self.engine), trigger=mode.trigger(self.trigger), router=mode.router(self.router)
        )


# ---- reading


def read(path: str | Path | None = None, overrides: Overrides | None = None, base: Settings | None = None) -> Settings:
    """What the file says, with overrides before it and `base` behind it; no file: as if it were empty.

    Raises InvalidInput that names `section.key` for anything unknown, of the wrong type, or refused by its component.
    """
    settings, wrong = _read(path, overrides, base)
    if wrong:
        raise wrong[0]
    return settings


def mistakes(path: str | Path, base: Settings | None = None) -> list[InvalidInput]:
    """What `read` would refuse of the file, in its order; where values depend on each other, the first of them."""
    return _read(path, None, base)[1]


def _read(
    path: str | Path | None, overrides: Overrides | None, base: Settings | None
) -> tuple[Settings, list[InvalidInput]]:
    """The settings, without what is wrong; and that."""
    try:
        tables = {} if path is None else _load(Path(path))
    except InvalidInput as error:
        return base or Settings(), [error]
    for section, given in (overrides or {}).items():
        said = {key: value for key, value in given.items() if value is not None}
        table = tables.setdefault(section, {})
        if said and isinstance(table, dict):
            tables[section] = table | said
    wrong: list[InvalidInput] = []
    return _build(base or Settings(), tables, "", wrong), wrong


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InvalidInput(str(path), f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise InvalidInput(str(path), f"is not TOML: {error}") from error


def _build(base: T, table: Mapping[str, object], where: str, wrong: list[InvalidInput]) -> T:
    """`base` with what the table says, but for what is `wrong` in it, which is added there."""
    keys, changes = _keys(type(base)), dict[str, Any]()
    for name, value in table.items():
        at = f"{where}.{name}" if where else name
        try:
            if name not in keys:
                raise InvalidInput(at, _unknown(name, list(keys), where))
            key = keys[name]
            changes[key.field] = _value(key, value, getattr(base, key.field), at, wrong)
        except InvalidInput as error:
            wrong.append(error)
    while True:
        try:
            return replace(base, **changes)  # type: ignore[type-var]  # mypy cannot say "any dataclass"
        except InvalidInput as error:
            wrong.append(InvalidInput(f"{where}.{_in_words(error.field)}", _in_words(error.problem)))
            if changes.pop(error.field, None) is None:
                return base


def _value(key: "_Key", value: object, base: object, at: str, wrong: list[InvalidInput]) -> Any:
    """The value as its field has it; what it may be beyond its type is for the component to say."""
    if is_dataclass(base):
        return _build(base, _table(value, at), at, wrong)
    if get_origin(key.kind) is Mapping:
        return {name: _typed(str, each, f"{at}.{name}") for name, each in _table(value, at).items()}
    if isinstance(key.kind, type) and issubclass(key.kind, StrEnum):
        text = _typed(str, value, at)
        return key.kind(text) if text in list(key.kind) else text
    return _typed(str if get_origin(key.kind) is Literal else key.kind, value, at)


def _table(value: object, at: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise InvalidInput(at, f"must be a table, [{at}], not {_shown(value)}")
    return value


def _typed(kind: Any, value: object, at: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidInput(at, f"must be {_KINDS[kind]}, not {_shown(value)}")
    if kind is int and not -(2**63) <= value < 2**63:
        raise InvalidInput(at, "must fit 64 bits")
    return value


_KINDS: Final = {str: "text in quotes", int: "an integer", float: "a number", bool: "true or false"}


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "a table" if isinstance(value, dict) else repr(value)


def _unknown(name: str, known: list[str], where: str) -> str:
    """What to say of a name that is none: the nearest that is, where it belongs, or all there are."""
    thing = "key" if where else "section"
    if homes := [f"[{section}]" for section, kind in _sections(Settings) if name in _keys(kind)]:
        return f"is no {thing}; {name} belongs in {' or '.join(homes)}"
    if near := get_close_matches(_in_words(name), known, 1):
        return f"is no {thing}; did you mean {near[0]}?"
    return f"is no {thing}; there are {', '.join(known)}"


# ---- writing


def render(settings: Settings | None = None) -> str:
    """The whole file, with a comment for every key. Reading it gives the settings again; none given: the defaults."""
    blocks = ["\n".join(_comment(_HEADER)), *_tables(settings or Settings(), "")]
    return "\n\n".join(blocks) + "\n"


def _tables(config: object, where: str) -> Iterator[str]:
    """A block for each section below `where`, the tables within it after it."""
    for name, key in _keys(type(config)).items():
        value, at = getattr(config, key.field), f"{where}.{name}" if where else name
        about = key.comment
        if is_dataclass(value):
            summary = inspect.cleandoc(type(value).__doc__ or "").partition("\n\n")[0]
            about = f"{about} {summary}" if where else summary
            lines = [line for each in _keys(type(value)).values() for line in _line(each, getattr(value, each.field))]
        elif isinstance(value, Mapping):
            lines = [f"{_name(slot)} = {_text(address)}" for slot, address in value.items()]
        else:
            continue
        yield "\n".join((f"[{at}]", *_comment(about), *lines))
        if is_dataclass(value):
            yield from _tables(value, at)


def _line(key: "_Key", value: object) -> Iterator[str]:
    """One key under its comment; the tables among them have their own block."""
    if is_dataclass(value) or isinstance(value, Mapping):
        return
    yield ""
    yield from _comment(key.comment)
    if value is None:
        yield f"# {key.name} = <{_KINDS[key.kind]}>"
    else:
        yield f"{key.name} = {_text(value) if isinstance(value, str) else repr(value).lower()}"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH, break_on_hyphens=False, break_long_words=False)]


def _text(value: str) -> str:
    """A basic string of TOML: JSON's, but for DEL."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("settings", f"cannot be written: {shown(value)} is not Unicode") from error
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _name(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


# ---- what there is to say


@dataclass(frozen=True)
class _Key:
    """One key of a section."""

    name: str
    """In the operator's words."""
    field: str
    kind: Any
    """The field's type, without the None of those that may be left unset."""
    comment: str


def _keys(kind: Any) -> dict[str, _Key]:
    """The keys of a config class, by name, in its order."""
    hints, sentences = get_type_hints(kind), _sentences(kind)
    keys = [
        _Key(_in_words(each.name), each.name, _set(hints[each.name]), _in_words(sentences.get(each.name, "")))
        for each in fields(kind)
        if (kind, each.name) not in _TOLD_ELSEWHERE
    ]
    return {key.name: key for key in keys}


def _sections(kind: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The tables below a config class that have keys of their own, by their names in the file."""
    for name, key in _keys(kind).items():
        if is_dataclass(key.kind):
            at = f"{where}.{name}" if where else name
            yield at, key.kind
            yield from _sections(key.kind, at)


def _set(hint: Any) -> Any:
    """The type of a value that is set: `int | None` is int."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    return hint


@functools.cache  # finding a class in its file takes a while
def _sentences(kind: Any) -> dict[str, str]:
    """What stands under each field of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, below in zip(tree.body, tree.body[1:], strict=False):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _in_words(text: str) -> str:
    """A name or a sentence of a component, in the operator's words. What is None there is a key left out here."""
    words = re.sub(rf"\b({'|'.join(_WORDS)})\b", lambda found: _WORDS[found[0]], text)
    return re.sub(r"\bNone:", "not set:", words).replace(". not set", ". Not set")


def _check_listening(host: str, port: int, drain_s: float) -> None:
    if not host:
        raise InvalidInput("host", "must not be empty")
    if not 0 <= port <= 65535:
        raise InvalidInput("port", f"must be from 0 to 65535, not {port}")
    if not 0 < drain_s < math.inf:
        raise InvalidInput("drain_s", "must be positive and finite")


def _is_address(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme == "http" and bool(parts.hostname) and bool(parts.port) and parts.path in ("", "/")
    except ValueError:  # a port that is none
        return False
