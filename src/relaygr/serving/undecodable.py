"""What a decoder says of a body, under the field that it says it of."""

import re
from typing import Final

from relaygr.errors import InvalidInput
from relaygr.shown import LONGEST, shown

__all__ = ["undecodable"]

_AT: Final = re.compile(r" - at (`key` in )?`\$\.?([^`]*)`\Z")
_NAMED: Final = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)
_PLACE: Final = re.compile(r"\[[^\]]*\]")
_PATH: Final = re.compile(r"\w+(\.\w+)*", re.ASCII)
_WORD: Final = re.compile(r"\w{1,64}", re.ASCII)
_KINDS: Final = re.compile(r"`([^`]*)`")
_IN_WORDS: Final = {
    "array": "a list",
    "object": "an object",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "bytes": "raw bytes",
    "null": "null",
}
"""What decoders call kinds of values, for people."""


def undecodable(error: Exception) -> InvalidInput:
    """The error of msgspec as InvalidInput.

    Its field is a dotted path of plain words, the same for every entry of a list: which of them it is, the sentence
    says. It is "body" where the body as a whole is wrong. A name that came with the body is in the path only where it
    is such a word.
    """
    problem, path, place = str(error), "", ""
    if isinstance(error, UnicodeDecodeError):
        return InvalidInput(
            "body", f"has text that is not UTF-8: the byte 0x{error.object[error.start]:02x} is none of it"
        )
    if found := _AT.search(problem):
        problem, path = problem[: found.start()], _PLACE.sub("", found[2])
        place = f", at {found[2]}" if "[" in found[2] else ""
        if found[1]:
            problem = "has a field whose name is no text"
        if len(path) + len(place) > LONGEST or not _PATH.fullmatch(path):
            path = place = ""
    if named := _NAMED.fullmatch(problem):
        name = named[2]
        if named[1] == "missing required":
            path, problem = _under(path, name), "is missing"
        elif _WORD.fullmatch(name):
            path, problem = _under(path, name), "is no field that is read here"
        else:
            problem = f"has a field {shown(name)}, which is not read here"
    return InvalidInput(path or "body", _plain(problem) + place)


def _plain(problem: str) -> str:
    """The same, where it is of the kind of a value, in plain words."""
    if not problem.startswith("Expected `"):
        return problem

    def words(found: re.Match[str]) -> str:
        kinds = found[1].split(" | ")
        return " or ".join(word for kind, word in _IN_WORDS.items() if kind in kinds) or found[0]

    problem = problem.replace(", got `float`", ", got a fraction")
    return _KINDS.sub(words, problem).replace("Expected", "must be", 1).replace(", got ", ", not ", 1)


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
