"""Tools: how a request declares them, how a model is told of them, and the grammar of their calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from edgert.constraint import WHITESPACE, Grammar
from edgert.errors import RequestError
from edgert.server.errors import ApiError
from edgert.server.parsing import Calls

if TYPE_CHECKING:
    from edgert.template import ChatTemplate

Message = Mapping[str, Any]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_TOOLS = 128

HOW_TO_CALL = """You may call functions. Each line here describes one as JSON:
{tools}

To call a function, write its name and its arguments as JSON between two marks:
<tool_call>
{{"name": "a name from above", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


HERMES = (Calls.BEGIN, Calls.END)
# How families mark a call: its beginning, its end ("": that of the answer), and marks within it. The first whose
# beginning a template has is the one that it shows its model.
MARKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("<|tool_call_start|>", "<|tool_call_end|>", ()),
    (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    ("<|START_ACTION|>", "<|END_ACTION|>", ()),
    ("<|tools_prefix|>", "<|tools_suffix|>", ()),
    ("<|tool_call>", "<tool_call|>", ('<|"|>',)),
    (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    ("<minimax:tool_call>", "</minimax:tool_call>", ()),
    ("<seed:tool_call>", "</seed:tool_call>", ()),
    ("<TOOLCALL>", "</TOOLCALL>", ()),
    ("<tool_calls>", "</tool_calls>", ()),
    ("<|tool_call|>", "<|/tool_call|>", ()),
    ("<|function_call|>", "", ()),
    ("[TOOL_CALLS]", "", ("[CALL_ID]", "[ARGS]")),
    (*HERMES, ()),
)
_TAGGED = ("<function=", "<arg_key>", "<invoke name=", "<parameter=")  # calls that are no JSON


@dataclass(frozen=True)
class Style:
    """How a family of models writes calls.

    arguments:  the key of the arguments
    bare:       the answer is the call, without marks
    listed:     and a list of calls
    told:       the template tells the model of tools itself
    marks:      how a call of its own begins and ends
    inner:      marks within it
    forced:     whether calls that the model makes of its own accord are held to Hermes' form, which is its own
    """

    arguments: Literal["arguments", "parameters"] = "arguments"
    bare: bool = False
    listed: bool = False
    told: bool = True
    marks: tuple[str, str] = HERMES
    inner: tuple[str, ...] = ()
    forced: bool = True

    def visible(self, names: Mapping[str, int]) -> frozenset[int]:
        """The control tokens, by name, that must be seen for a call to be known as one."""
        return frozenset(names[mark] for mark in (*self.marks, *self.inner) if mark in names)


def style_of(template: ChatTemplate) -> Style:
    """The style that a template's text shows."""
    source = template.tool_source
    found = next((row for row in MARKS if row[0] in source), None)
    begin, end, inner = found or (*HERMES, ())
    style = Style(marks=(begin, end), inner=inner)
    if not re.search(r"\btools\b", source):
        return replace(style, told=False)
    if begin == "[TOOL_CALLS]":
        return replace(style, bare=True, listed=True)
    if not found and ('"parameters"' in source or "python_tag" in source):
        return replace(style, arguments="parameters", bare=True)
    forced = style.marks == HERMES and not any(tag in source for tag in _TAGGED)
    return replace(style, told=found is not None or "tool_call" in source, forced=forced)


@dataclass(frozen=True)
class Tool:
    """One function."""

    name: str
    schema: Mapping[str, Any]
    strict: bool


class Toolbox:
    """The tools of a request that may be called.

    choice:    "auto", "required", or the name of the one that must be called
    parallel:  whether several calls may stand in one answer
    """

    def __init__(self, raw: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> None:
        self.raw, self.choice, self.parallel = raw, choice, parallel
        self.tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(raw)]
        self.names = [tool.name for tool in self.tools]
        if len(set(self.names)) < len(self.names):
            raise ApiError(400, "tools: two have the same name.", param="tools")
        if choice not in ("auto", "required", *self.names):
            raise ApiError(400, f"tool_choice: there is no tool {choice[:80]!r}.", param="tool_choice")

    @classmethod
    def of(
        cls,
        tools: Sequence[Mapping[str, Any]] | None,
        choice: str | Mapping[str, Any] | None = None,
        parallel: bool | None = None,
    ) -> Toolbox | None:
        """The tools of a request's fields; None when none may be called. Raises: ApiError 400 or RequestError."""
        if isinstance(choice, str) and choice not in ("none", "auto", "required"):
            raise RequestError.wrong("tool_choice", "none, auto, required or a function", choice)
        if isinstance(choice, Mapping):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
            if not isinstance(name, str):
                accepted = 'such as {"type": "function", "function": {"name": ...}}'
                raise RequestError.wrong("tool_choice", accepted, choice)
            choice = f"={name}"
        if not tools:
            if choice not in (None, "none", "auto"):
                raise ApiError(400, "tool_choice: there are no tools.", param="tool_choice")
            return None
        if len(tools) > MAX_TOOLS:
            raise ApiError(400, f"tools: are more than {MAX_TOOLS}.", param="tools")
        box = cls(tools, (choice or "auto").removeprefix("=") if choice != "none" else "auto", parallel is not False)
        return None if choice == "none" else box

    def parser(self, style: Style) -> Calls:
        """What reads the calls of an answer."""
        own = () if style.marks == HERMES else (style.marks,)
        return Calls({tool.name: tool.schema for tool in self.tools}, style.bare, (HERMES, *own))

    def grammar(self, style: Style) -> Grammar | None:
        """The grammar of answers: calls that are sound, and text only where the choice is free.

        Raises: RequestError for parameters that no grammar can be made of.
        """
        chosen = [tool for tool in self.tools if self.choice in ("auto", "required", tool.name)]
        strict = all(tool.strict for tool in chosen)
        options = {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": not strict}}
        calls = [self._call(tool, style) for tool in chosen]
        call: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
        single = not self.parallel or self.choice not in ("auto", "required")
        if self.choice == "auto" and (style.bare or not style.forced):
            return None  # text and calls begin alike, or the model's own form is another
        if style.bare:
            if style.listed:
                call = {"type": "array", "items": call, "minItems": 1} | ({"maxItems": 1} if single else {})
            return Grammar.schema(call | options, "tools")
        body = f'"\\n" %json {json.dumps(call | options)} "\\n{Calls.END}"'
        if self.choice == "auto":
            repeat = "?" if single else "*"
            text = f'start: call{repeat} TEXT\ncall: begin {body}\nbegin[lazy]: TEXT "{Calls.BEGIN}"\n'
            text += "TEXT: /(.|\\n)*/\n"
        else:
            more = "" if single else ' ("\\n" call)*'
            text = f'start: call{more}\ncall: "{Calls.BEGIN}" {body}\n'
        return Grammar.lark("%llguidance {}\n" + text, "tools", call)

    @staticmethod
    def _call(tool: Tool, style: Style) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"name": {"const": tool.name}, style.arguments: dict(tool.schema)},
            "required": ["name", style.arguments],
            "additionalProperties": False,
        }

    def tell(self, style: Style, messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Any] | None]:
        """Messages and tools as the template takes them: where it knows of no tools, a system message tells."""
        if style.told:
            return messages, list(self.raw)
        lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in self.raw)
        return told(messages, HOW_TO_CALL.format(tools=lines)), None


def told(messages: Sequence[Message], about: str) -> list[Message]:
    """The messages for a template that knows of no tools: calls and their results become text.

    about:  what the system message says besides; "": nothing
    """
    shown: list[Message] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "tool":
            text = f"<tool_response>\n{_plain(content)}\n</tool_response>"
            if shown and shown[-1].get("from_tools"):
                shown[-1] = {**shown[-1], "content": f"{shown[-1]['content']}\n{text}"}
            else:
                shown.append({"role": "user", "content": text, "from_tools": True})
        elif message.get("tool_calls"):
            calls = [_written(call) for call in message["tool_calls"]]
            shown.append({"role": role, "content": "\n".join(filter(None, [_plain(content), *calls]))})
        else:
            shown.append(message)
    if about:
        if shown and shown[0].get("role") in ("system", "developer"):
            shown[0] = {**shown[0], "content": f"{_plain(shown[0].get('content'))}\n\n{about}"}
        else:
            shown.insert(0, {"role": "system", "content": about})
    return [{name: value for name, value in message.items() if name != "from_tools"} for message in shown]


def _written(call: Any) -> str:
    function = call.get("function", {}) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'{Calls.BEGIN}\n{{"name": {name}, "arguments": {text}}}\n{Calls.END}'


def _plain(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(part.get("text", "") if isinstance(part, Mapping) else str(part) for part in content)
    return ""


def _tool(value: Mapping[str, Any], field: str) -> Tool:
    """Raises: RequestError that names what is wrong."""
    kind = value.get("type", "function")
    if kind != "function":
        raise RequestError.wrong(f"{field}.type", "function", kind)
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise RequestError.wrong(f"{field}.function", "an object", function)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError.wrong(f"{field}.function.name", "of letters, digits, -, _ and ., 64 at most", name)
    schema = function.get("parameters")
    if schema is None:
        schema = {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise RequestError.wrong(f"{field}.function.parameters", "a JSON schema", schema)
    return Tool(name, schema, function.get("strict") is True)
