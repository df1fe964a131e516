"""A Jinja environment in which a template can neither run code, read files, nor use much time or memory.

`meter.py` tells how the last two are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from traceback import clear_frames
from typing import Any

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from edgert.template import filters
from edgert.template.meter import check_bits, check_format, check_replace, check_split, current

_REMOVED_METHODS = frozenset(
    {"center", "encode", "expandtabs", "format_map", "ljust", "maketrans", "rjust", "translate", "zfill"}
)
_PARTS = 4096  # texts that are kept before they are joined


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

    def _charged(self, visit: Callable[[Any, Any], None], node: nodes.Node, frame: Any) -> None:
        """The code of an expression, its value charged to the meter."""
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._charged(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_List(self, node: nodes.List, frame: Any) -> None:
        self._charged(super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:
        if node.ctx == "load":
            self._charged(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:
        self._charged(super().visit_Dict, node, frame)


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
        self.filters = {
            name: filters.bounded(name, function)
            for name, function in self.filters.items()
            if name not in filters.REMOVED
        }
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = filters.raise_exception
        self.globals["strftime_now"] = filters.strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        loops: tuple[type[Any], ...] = (nodes.For, nodes.Macro, nodes.CallBlock)
        for node in tree.find_all(loops):
            node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("tick"), lineno=node.lineno))
        return tree

    @staticmethod
    def tick() -> None:
        current().tick()

    @staticmethod
    def made(value: Any) -> Any:
        return current().made(value)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What a block of the template printed, as one text."""
        meter, total, whole, out = current(), 0, "", []
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
        meter = current()
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    meter.check(len(many) * max(times, 0))
            if isinstance(left, int) and isinstance(right, int):
                check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * max(right, 0))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            meter.check(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            check_format(left, "%", right)
        return meter.made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        text = getattr(value, "__self__", None)
        if not isinstance(text, str) or getattr(value, "__name__", "") != "format":
            return None
        formatter = SandboxedFormatter(self)

        def wrapper(*args: Any, **kwargs: Any) -> str:
            check_format(text, "{", (args, kwargs))
            return formatter.vformat(text, args, kwargs)

        return wrapper

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = current()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            name = __obj.__name__
            if name == "join" and args:
                args = ([str(item) for item in args[0]], *args[1:])
                meter.check(sum(map(len, args[0])) + len(owner) * len(args[0]))
            elif name == "replace" and len(args) >= 2:
                check_replace(owner, args[0], args[1])
            elif name in ("split", "rsplit", "splitlines", "partition"):
                check_split(owner, args[0] if args else kwargs.get("sep"))
        return meter.made(super().call(__context, __obj, *args, **kwargs))
