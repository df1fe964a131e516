"""Values of JSON and TOML to types: what is wrong is told by its field, the value that it has, and what would do."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from edgert.errors import RequestError, shown

T = TypeVar("T")

# How msgspec says it.
_PLACE = re.compile(r" - at `(?:key` in `)?\$(.*)`$")
_STEP = re.compile(r"\.?(\w+)|\[(\d+)\]|(\[\.\.\.\])")
_MISSING = re.compile(r"missing required field `(\w+)`")
_EXPECTED = re.compile(r"Expected `([\w |]+)`(?: of length (\d+))?, got ")
_WORDS = {
    "int": ["an integer"],
    "float": ["a number"],
    "str": ["a text"],
    "bool": ["true", "false"],
    "array": ["a list"],
    "object": ["an object"],
}
_KINDS = {"int": int, "float": float, "str": str, "bool": bool, "array": list, "object": dict, "null": type(None)}


def convert(value: Mapping[str, Any], kind: type[T], *, closed: bool = False) -> T:
    """The value as a struct or dataclass of the kind.

    closed:  whether fields that the kind does not have are refused

    Raises: RequestError that names the field.
    """
    if closed:
        known = typing.get_type_hints(kind)
        if unknown := next((name for name in value if name not in known), None):
            raise RequestError(str(unknown), f"is not known; known are {', '.join(known)}")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), value, kind) from None


def _refusal(message: str, value: Any, kind: type) -> RequestError:
    """What msgspec has said of a value, in the words of all refusals."""
    place = _PLACE.search(message)
    field, found = _at(place[1], value, message) if place else ("", value)
    if missing := _MISSING.search(message):
        return RequestError(f"{field}.{missing[1]}" if field else missing[1], "is missing")
    if expected := _EXPECTED.match(message):
        words = [word for name in expected[1].split(" | ") for word in _WORDS.get(name, [])]
        accepted = " or ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "null"
        if expected[2]:
            accepted = f"a list of {expected[2]}"
        if message.find("`key`") > 0:
            return RequestError(field, f"has a name that is not {accepted}")
        return RequestError.wrong(field, accepted, found)
    if choices := _choices(typing.get_type_hints(kind).get(field)):
        return RequestError.wrong(field, f"one of {', '.join(choices)}", found)
    return RequestError(field, f"is {shown(found)}: {message[: place.start()] if place else message}")


def _at(path: str, value: Any, message: str) -> tuple[str, Any]:
    """The field that a path leads to, and its value. A name that msgspec does not tell is that of the first fault."""
    field = ""
    for name, number, any_name in _STEP.findall(path):
        if any_name:
            got = _KINDS.get(message.partition("got `")[2].partition("`")[0])
            name = next((key for key, one in value.items() if type(one) is got), "...")
            field, value = f"{field}[{name}]", value.get(name)
        elif name:
            field, value = f"{field}.{name}" if field else name, value.get(name)
        else:
            field, value = f"{field}[{number}]", value[int(number)]
    return field, value


def _choices(hint: Any) -> list[str]:
    """The texts that a hint names."""
    if typing.get_origin(hint) is Literal:
        return [str(text) for text in typing.get_args(hint)]
    return [text for part in typing.get_args(hint) for text in _choices(part)]
