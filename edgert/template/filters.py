"""What a chat template may call: Jinja's filters with bounds, and the functions that Hugging Face's templates know."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, Undefined, pass_environment
from jinja2.filters import make_attrgetter

from edgert.template.meter import WIDEST, LimitError, check_bits, check_format, check_replace, current

if TYPE_CHECKING:
    from edgert.template.sandbox import Environment

REMOVED = frozenset({"center", "filesizeformat", "pprint", "striptags", "urlize", "wordwrap", "xmlattr"})


class RaisedError(TemplateError):
    """The template refused its input with raise_exception."""


def bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Jinja's filter of that name, or ours, charged to the meter and checked before it makes something large."""
    function = _OWN.get(name, function)
    check = _CHECKS.get(name)
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        meter = current()
        meter.tick()
        if check:
            check(*args[skipped:], **kwargs)
        return meter.made(function(*args, **kwargs))

    return charged


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    text = str(text)
    columns = len(width) if isinstance(width, str) else int(width)
    current().check(len(text) + (len(text.splitlines()) + 1) * max(columns, 0))


def _check_list(value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str):
        current().reserve(len(value))


def _check_count(_: Any, count: Any = 1, *__: Any, **___: Any) -> None:
    current().reserve(int(count))


def _check_round(_: Any, precision: Any = 0, *__: Any, **___: Any) -> None:
    if abs(int(precision)) > 30:
        raise LimitError("it rounds to an unusual precision")


def _check_percent(text: Any, *args: Any, **kwargs: Any) -> None:
    check_format(str(text), "%", (args, kwargs))


_CHECKS: dict[str, Callable[..., None]] = {
    "batch": _check_count,
    "format": _check_percent,
    "indent": _check_indent,
    "list": _check_list,
    "replace": check_replace,
    "reverse": _check_list,
    "round": _check_round,
    "slice": _check_count,
    "sort": _check_list,
    "unique": _check_list,
}


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    meter, total, parts = current(), 0, []
    for item in value:
        parts.append(str(item))
        total += len(parts[-1]) + len(str(d))
        meter.check(total)
    return str(d).join(parts)


@pass_environment
def _sum(environment: Environment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    total = start
    for item in iterable:
        total = environment.call_binop(None, "+", total, item)
    return total


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: nothing escaped for HTML."""
    meter, total, parts = current(), 0, []
    if isinstance(x, Undefined):
        raise TypeError("tojson of an undefined value")
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        meter.check(meter.weigh(x))
        parts = [encoder.encode(x)]
    else:
        check_bits(len(indent) if isinstance(indent, str) else int(indent))
        for part in encoder.iterencode(x):
            total += len(part)
            meter.check(total)
            parts.append(part)
    text = "".join(parts)
    if ensure_ascii:
        kept = meter.unseen
        text = re.sub(r"[^\x00-\x7f]", lambda m: m[0] if m[0] == kept else json.dumps(m[0])[1:-1], text)
    return text


_OWN: dict[str, Callable[..., Any]] = {"join": _join, "sum": _sum, "tojson": _tojson}


def raise_exception(message: Any = "") -> None:
    """How a template refuses its input. Raises: RaisedError."""
    raise RaisedError(str(message))


def strftime_now(format: str) -> str:
    """The local time; %-d and its like give numbers without leading zeros on every system."""
    if len(format) > WIDEST or re.search(r"%[^a-zA-Z%]*\d", format):
        raise LimitError("it formats the time with an unusual width")
    now = datetime.now()

    def plain(match: re.Match[str]) -> str:
        return str(int(now.strftime("%" + match[1])))

    return now.strftime(re.sub(r"(?<!%)%-([dmyHIMSj])", plain, format))
