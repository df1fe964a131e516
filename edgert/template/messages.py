"""The messages of a chat: checked, and brought to the shape that a template understands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from edgert.errors import RequestError

Message = Mapping[str, Any]
Shape = Literal["any", "text", "parts"]

SPEAKERS = ("system", "developer", "user")  # whose messages are nothing without content


def checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages of a chat, whatever a caller gave. Raises: RequestError that names what is none."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError.wrong("messages", 'a list such as [{"role": "user", "content": "Hi"}]', messages)
    if not messages:
        raise RequestError("messages", "is empty")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError.wrong(f"messages[{i}]", "an object with role and content", message)
        if not isinstance(message.get("role"), str):
            raise RequestError.wrong(f"messages[{i}].role", 'a text such as "user"', message.get("role"))
        if message.get("content") is None and message["role"] in SPEAKERS:
            raise RequestError(f"messages[{i}].content", "is missing")
        for k, call in enumerate(objects(f"messages[{i}].tool_calls", message.get("tool_calls")) or ()):
            function = call.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str):
                raise RequestError.wrong(f"messages[{i}].tool_calls[{k}].function.name", "a text", name)
    return [dict(message) for message in messages]


def objects(field: str, value: Any) -> list[Any] | None:
    """The objects of a list, None for no list or an empty one. Raises: RequestError for anything else."""
    if value is None:
        return None
    if (
        isinstance(value, str | bytes)
        or not isinstance(value, Sequence)
        or not all(isinstance(v, Mapping) for v in value)
    ):
        raise RequestError.wrong(field, "a list of objects", value)
    return list(value) or None


def shaped(message: dict[str, Any], shape: Shape, i: int) -> dict[str, Any]:
    """The message with its content as the template understands it: one text, or a list of parts.

    i:  its place, for the error

    Raises: RequestError for a content that is neither.
    """
    content = message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, Sequence) and not isinstance(content, str | bytes):
        texts = [_part_text(part, f"messages[{i}].content[{k}]") for k, part in enumerate(content)]
        content = "\n".join(texts) if shape == "text" else [{"type": "text", "text": t} for t in texts]
    elif not isinstance(content, str):
        raise RequestError.wrong(f"messages[{i}].content", "a text or a list of parts", content)
    if shape == "parts" and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    return message | {"content": content}


def _part_text(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "output_text"):
        raise RequestError(field, f'parts of the type {kind!r} are not supported, {{"type": "text", ...}} is')
    if not isinstance(part.get("text"), str):
        raise RequestError(field, 'must have a text: {"type": "text", "text": "..."}')
    return part["text"]


def only_calls(message: Mapping[str, Any]) -> bool:
    """Whether a message has tool calls and no content."""
    return message.get("content") is None and bool(message.get("tool_calls"))


def with_arguments(messages: list[dict[str, Any]], as_text: bool) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, which most templates expect, or as JSON text."""
    change = _with_text if as_text else _with_object
    return [
        message | {"tool_calls": [change(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _with_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
