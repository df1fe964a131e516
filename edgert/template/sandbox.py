"""A Jinja environment in which a template can neither run code, read files, nor use much time or memory.

Time is checked in every loop, macro, call and filter. Every text, list or number that an expression makes is
measured before it is made where it could be large, and charged to the render's account. That needs no signal
and no process, so it works in any thread on any system.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from time import monotonic, thread_time
from traceback import clear_frames
from typing import Any

from jinja2 import Template, TemplateError, Undefined, nodes, pass_environment
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

SECONDS = 1.0
OWN = 0.25  # of the time that a render must have computed itself: a busy machine's pauses are none of its
LONGEST = 1 << 20  # characters of one text, elements of one list; grows with the input
ACCOUNT = 64 << 20  # bytes of everything that a render makes; grows with the input
_DEEPEST = 64  # lists within lists
_ELEMENT = 8  # what an element weighs beside its characters
_PARTS = 4096  # texts that are kept before they are joined
_MOST_BITS = 1 << 14
_WIDEST = 1000  # digits or columns that a format may ask for

_REMOVED_FILTERS = frozenset({"center", "filesizeformat", "pprint", "striptags", "urlize", "wordwrap", "xmlattr"})
_REMOVED_METHODS = frozenset(
    {"center", "encode", "expandtabs", "format_map", "ljust", "maketrans", "rjust", "translate", "zfill"}
)
_FORMAT_WIDTH = re.compile(r"\d+")


class LimitError(Exception):
    """A template used more time or memory than a chat template needs."""


class RaisedError(TemplateError):
    """The template refused its input with raise_exception."""


class Meter:
    """What one render may still use.

    given:   characters that come in, which larger outputs are fair for
    unseen:  a character that tojson keeps as it is
    """

    def __init__(self, given: int = 0, unseen: str = "", seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._deadline = monotonic() + seconds
        self._own_deadline = thread_time() + OWN * seconds
        self._longest = LONGEST + 4 * given
        self._left = ACCOUNT + 64 * given
        self.unseen = unseen

    def tick(self) -> None:
        if monotonic() > self._deadline and thread_time() > self._own_deadline:
            raise LimitError(f"it ran for more than {self._seconds:g} s")

    def check(self, length: int) -> None:
        """Refuses a text or list of that length before it is made."""
        if length > self._longest:
            raise LimitError(f"it makes a text or list longer than {self._longest:,}")

    def made(self, value: Any) -> Any:
        """Charges a new value to the account."""
        self.tick()
        if isinstance(value, str):
            self.check(len(value))
            self._charge(sys.getsizeof(value))
        elif isinstance(value, list | tuple | dict | set | frozenset):
            self._charge(64 * len(value))
            self.check(self.weigh(value))
        elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise LimitError("it makes a huge number")
        return value

    def reserve(self, elements: int) -> None:
        """Refuses a list of small texts before it is made."""
        self.check(elements * (_ELEMENT + 1))
        if 64 * elements > self._left:
            raise LimitError("it uses too much memory")

    def _charge(self, n_bytes: int) -> None:
        self._left -= n_bytes
        if self._left < 0:
            raise LimitError("it uses too much memory")

    def weigh(self, value: Any, depth: int = 0) -> int:
        """Characters of a value with all that it holds, as often as it holds it; a number counts as some."""
        if isinstance(value, str):
            return len(value) + _ELEMENT
        if isinstance(value, Mapping):
            items: Iterable[Any] = (part for item in value.items() for part in item)
        elif isinstance(value, list | tuple | set | frozenset):
            items = value
        else:
            return _ELEMENT
        if depth > _DEEPEST:
            raise LimitError("it nests lists too deeply")
        total = _ELEMENT
        for item in items:
            total += self.weigh(item, depth + 1)
            if total > self._longest:
                break
        return total


_METER: ContextVar[Meter] = ContextVar("meter")


def _meter() -> Meter:
    return _METER.get()


@contextmanager
def metered(meter: Meter) -> Iterator[Meter]:
    """Everything inside is measured by this meter."""
    token = _METER.set(meter)
    try:
        yield meter
    finally:
        _METER.reset(token)


def run(template: Template, names: Mapping[str, Any]) -> str:
    """Renders within a meter. Template.render would keep what the template hoarded in copies of its frames."""
    try:
        return Environment.concat(template.root_render_func(template.new_context(dict(names))))
    except Exception as error:
        clear_frames(error.__traceback__)
        raise


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks the model's words for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    def __repr__(self) -> str:  # namespaces can hold each other, so that the usual text has no bound
        return "<Namespace>"


class _Generator(CodeGenerator):
    """Jinja's compiler, with our functions where it would make new values on its own."""

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Any) -> None:
        if isinstance(node.node, nodes.EnvironmentAttribute):
            self.writeline(f"environment.{node.node.name}()")
        else:
            super().visit_ExprStmt(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.made(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Any) -> None:
        self.write("environment.made(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.made(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:
        self.write("environment.made(")
        super().visit_Dict(node, frame)
        self.write(")")


class Environment(ImmutableSandboxedEnvironment):
    """Hugging Face's environment for chat templates, bounded. Rendering needs a meter around it."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            optimized=False,  # it would evaluate constant expressions while compiling
            cache_size=0,
        )
        own: dict[str, Callable[..., Any]] = {"join": _join, "sum": _sum, "tojson": _tojson}
        self.filters = {
            name: _bounded(name, own.get(name, function))
            for name, function in self.filters.items()
            if name not in _REMOVED_FILTERS
        }
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        loops: tuple[type[Any], ...] = (nodes.For, nodes.Macro, nodes.CallBlock)
        for node in tree.find_all(loops):
            node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("tick"), lineno=node.lineno))
        return tree

    @staticmethod
    def tick() -> None:
        _meter().tick()

    @staticmethod
    def made(value: Any) -> Any:
        return _meter().made(value)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What a block of the template printed, as one text."""
        meter, total, whole, out = _meter(), 0, "", []
        for part in parts:
            total += len(part)
            meter.check(total)
            out.append(part)
            if len(out) == _PARTS:  # many small texts take far more memory than one
                whole += "".join(out)
                out.clear()
        return meter.made(whole + "".join(out))

    @classmethod
    def joined(cls, values: Iterable[Any]) -> str:
        return cls.concat(map(str, values))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | bytes) and attr in _REMOVED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = _meter()
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    meter.check(len(many) * max(times, 0))
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            meter.check(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, "%", right)
        return meter.made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        text = getattr(value, "__self__", None)
        if not isinstance(text, str) or getattr(value, "__name__", "") != "format":
            return None
        formatter = SandboxedFormatter(self)

        def wrapper(*args: Any, **kwargs: Any) -> str:
            _check_format(text, "{", (args, kwargs))
            return formatter.vformat(text, args, kwargs)

        return wrapper

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            name = __obj.__name__
            if name == "join" and args:
                args = ([str(item) for item in args[0]], *args[1:])
                meter.check(sum(map(len, args[0])) + len(owner) * len(args[0]))
            elif name == "replace" and len(args) >= 2:
                _check_replace(owner, args[0], args[1])
            elif name in ("split", "rsplit", "splitlines", "partition"):
                _check_split(owner, args[0] if args else kwargs.get("sep"))
        return meter.made(super().call(__context, __obj, *args, **kwargs))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    check = _CHECKS.get(name)
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        meter = _meter()
        meter.tick()
        if check:
            check(*args[skipped:], **kwargs)
        return meter.made(function(*args, **kwargs))

    return bounded


def _check_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise LimitError("it makes a huge number")


def _check_format(text: str, mark: str, args: Any) -> None:
    """Formats may be wide by what they ask for and by how often they name an argument."""
    if (
        "*" in text
        or re.search(r"\{[^{}]*\{", text)
        or any(int(width[:9]) > _WIDEST for width in _FORMAT_WIDTH.findall(text))
    ):
        raise LimitError("it formats with an unusual width")
    meter = _meter()
    meter.check(len(text) + text.count(mark) * (_WIDEST * 2 + meter.weigh(args) * 10 if mark in text else 0))


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    _meter().check(len(text) + (text.count(old) * (len(new) - len(old)) if len(new) > len(old) else 0))


def _check_split(text: str, separator: Any) -> None:
    meter = _meter()
    if isinstance(separator, str) and separator:
        meter.reserve(text.count(separator) + 1)
    else:
        meter.reserve(len(text) // 2 + 1 if len(text) > LONGEST >> 2 else 0)


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    text = str(text)
    columns = len(width) if isinstance(width, str) else int(width)
    _meter().check(len(text) + (len(text.splitlines()) + 1) * max(columns, 0))


def _check_list(value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str):
        _meter().reserve(len(value))


def _check_count(_: Any, count: Any = 1, *__: Any, **___: Any) -> None:
    _meter().reserve(int(count))


def _check_round(_: Any, precision: Any = 0, *__: Any, **___: Any) -> None:
    if abs(int(precision)) > 30:
        raise LimitError("it rounds to an unusual precision")


def _check_percent(text: Any, *args: Any, **kwargs: Any) -> None:
    _check_format(str(text), "%", (args, kwargs))


_CHECKS: dict[str, Callable[..., None]] = {
    "batch": _check_count,
    "format": _check_percent,
    "indent": _check_indent,
    "list": _check_list,
    "replace": _check_replace,
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
    meter, total, parts = _meter(), 0, []
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
    meter, total, parts = _meter(), 0, []
    if isinstance(x, Undefined):
        raise TypeError("tojson of an undefined value")
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        meter.check(meter.weigh(x))
        parts = [encoder.encode(x)]
    else:
        _check_bits(len(indent) if isinstance(indent, str) else int(indent))
        for part in encoder.iterencode(x):
            total += len(part)
            meter.check(total)
            parts.append(part)
    text = "".join(parts)
    if ensure_ascii:
        kept = meter.unseen
        text = re.sub(r"[^\x00-\x7f]", lambda m: m[0] if m[0] == kept else json.dumps(m[0])[1:-1], text)
    return text


def _raise_exception(message: Any = "") -> None:
    raise RaisedError(str(message))


def _strftime_now(format: str) -> str:
    """The local time; %-d and its like give numbers without leading zeros on every system."""
    if len(format) > _WIDEST or re.search(r"%[^a-zA-Z%]*\d", format):
        raise LimitError("it formats the time with an unusual width")
    now = datetime.now()

    def plain(match: re.Match[str]) -> str:
        return str(int(now.strftime("%" + match[1])))

    return now.strftime(re.sub(r"(?<!%)%-([dmyHIMSj])", plain, format))


__all__ = ["Environment", "LimitError", "Meter", "RaisedError", "metered", "run"]
