"""Calls of tools in the ways that families of models write them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

Call = tuple[str, dict[str, Any]]  # a tool's name and its arguments


def calls_in(text: str, tools: Mapping[str, Mapping[str, Any]]) -> list[Call]:
    """The calls that a text makes; none where it is no sound call, or one of a tool that there is not.

    text:   what stands between the marks of a call
    tools:  schemas of arguments by the tools' names
    """
    for read in (_as_json, _as_python, _with_tags, _with_bare_keys, _with_json_behind):
        if calls := read(text, tools):
            return calls if all(name in tools for name, _ in calls) else []
    return []


def _as_json(text: str, tools: Mapping[str, Mapping[str, Any]]) -> list[Call]:
    """{"name": ..., "arguments": {...}}, several one behind the other or in a list; {NAME: {...}}"""
    found: list[Call] = []
    for value in _values(text):
        if not isinstance(value, dict):
            return []
        name = value.get("name", value.get("tool_name"))
        arguments = value.get("arguments", value.get("parameters", {}))
        if name is None and len(value) == 1:
            ((name, arguments),) = value.items()
        if isinstance(arguments, str):
            arguments = next(iter(_values(arguments)), None)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return []
        found.append((name, arguments))
    return found


def _values(text: str) -> list[Any]:
    """The JSON values of a text: one, several one behind the other, or those of a list; none if there is more."""
    decoder, at, found = json.JSONDecoder(), 0, []
    text = text.strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        found += value if isinstance(value, list) else [value]
        while at < len(text) and text[at] in " \t\r\n;,":
            at += 1
    return found


def _as_python(text: str, tools: Mapping[str, Mapping[str, Any]]) -> list[Call]:
    """[NAME(key='value', other=2)]"""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [
            (ast.unparse(node.func), {str(key.arg): _literal(key.value) for key in node.keywords})
            for node in nodes
            if isinstance(node, ast.Call) and not node.args and all(key.arg for key in node.keywords)
        ]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []


class _Words(ast.NodeTransformer):
    """JSON's words for what Python calls otherwise."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = {"true": True, "false": False, "null": None}
        return ast.Constant(known[node.id]) if node.id in known else node


def _literal(node: ast.expr) -> Any:
    """Raises: ValueError for what is no value of JSON's."""
    value = ast.literal_eval(_Words().visit(node))
    try:
        json.dumps(value, allow_nan=False)
    except TypeError:
        raise ValueError("a set, bytes or an ellipsis") from None
    return value


_NAMED = re.compile(
    r"<(?:\w+:)?(?:function|invoke)(?:=|\s+name=\")(?P<a>[^\">\n]+)\"?[^>]*>|^\s*(?P<b>[\w.-]+)\s*(?=<arg_key>)"
    r"|(?<=>)\s*(?P<c>[\w.-]+)\s*(?=<arg_key>)",
)
_PARTS = (
    re.compile(r"<((?:\w+:)?param(?:eter)?)(?:=|\s+name=\")([^\">\n]+)\"?[^>]*>(.*?)</\1>", re.DOTALL),
    re.compile(r"<(arg_key)>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
)
_CLOSED = re.compile(r"</(?:\w+:)?(?:function|invoke)>")


def _with_tags(text: str, tools: Mapping[str, Mapping[str, Any]]) -> list[Call]:
    """<function=NAME><parameter=key>value</parameter></function>, NAME<arg_key>key</arg_key><arg_value>...

    Values are texts, save where the tool's schema wants something else.
    """
    heads = list(_NAMED.finditer(text))
    found: list[Call] = []
    for head, following in zip(heads, [*heads[1:], None], strict=False):
        name = (head["a"] or head["b"] or head["c"]).strip()
        body = text[head.end() : following.start() if following else len(text)]
        parts = [match for pattern in _PARTS for match in pattern.finditer(body)]
        rest = body
        for pattern in (*_PARTS, _CLOSED):
            rest = pattern.sub("", rest)
        if not parts and (arguments := _first(body)[0]) is not None:
            found.append((name, arguments))
            continue
        if rest.strip():  # something that is not understood: the call would not be what the model wanted
            return []
        properties = tools.get(name, {}).get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        found.append((name, {key: _value(value, schemas.get(key)) for _, key, value in (p.groups() for p in parts)}))
    return found


def _value(text: str, schema: Any) -> Any:
    """What a text between tags stands for, where a schema wants such a value."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds == "string" or (kinds is None and isinstance(schema, Mapping) and "enum" in schema):
        return text
    for read in (json.loads, lambda text: _literal(ast.parse(text.strip(), mode="eval").body)):
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return text if kinds is None and isinstance(value, str) else value
    return text


def _first(text: str, at: int = 0) -> tuple[dict[str, Any] | None, int]:
    """The JSON object that stands at a place of a text, None if none does, and where it ends."""
    at = len(text) - len(text[at:].lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at
    return (value, end) if isinstance(value, dict) else (None, at)


_TEXT = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
_KEY = re.compile(r"([{,]\s*)([^\W\d][\w.-]*)(\s*:)")
_CALLED = re.compile(r"call:([\w.-]+)(?=\{)")


def _with_bare_keys(text: str, tools: Mapping[str, Mapping[str, Any]]) -> list[Call]:
    """call:NAME{key:<|"|>text<|"|>,other:2}"""
    texts: list[str] = []

    def put_away(match: re.Match[str]) -> str:
        texts.append(match[1])
        return f'"\\u0000{len(texts) - 1}"'

    def back(value: Any) -> Any:
        if isinstance(value, str) and (place := re.fullmatch("\0(\\d+)", value)):
            return texts[int(place[1])] if int(place[1]) < len(texts) else value
        if isinstance(value, list):
            return [back(item) for item in value]
        return {key: back(item) for key, item in value.items()} if isinstance(value, dict) else value

    told = _TEXT.sub(put_away, text)
    found: list[Call] = []
    for match in _CALLED.finditer(told):
        arguments, _ = _first(re.sub(r"\bNone\b", "null", _KEY.sub(r'\1"\2"\3', told[match.end() :])))
        if arguments is None:
            return []
        found.append((match[1], back(arguments)))
    return found


def _with_json_behind(text: str, tools: Mapping[str, Mapping[str, Any]]) -> list[Call]:
    """NAME[ARGS]{...}, functions.NAME:0<mark>{...}, function<mark>NAME and then JSON in a fence"""
    names = "|".join(sorted(map(re.escape, tools), key=len, reverse=True))
    pattern = re.compile(
        rf"(?<![\w.-])(?:functions\.)?({names})(?::\d+)?\s*(?:\[CALL_ID\][\w-]*)?"
        r"(?:\[ARGS\]|<[|｜][^<>{{}}]*[|｜]>|\s|```(?:json)?)*(?=\{)"
    )
    found: list[Call] = []
    at = 0
    while match := pattern.search(text, at):
        arguments, at = _first(text, match.end())
        if arguments is None:
            return []
        found.append((match[1], arguments))
    return found
