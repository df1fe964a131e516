"""Messages to the text that a model was trained on, by the Jinja template in its file."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from edgert.errors import ModelFileError, RequestError
from edgert.template.fallback import FAMILIES, family_of

if TYPE_CHECKING:
    from edgert.quantize.gguf_file import Model
    from edgert.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Shape = Literal["any", "text", "parts"]

_PROBE = "edgert probes"
_PROBE_SECONDS = 0.2
_THINKING = re.compile(r"[<\[]/?think(ing)?[>\]]", re.IGNORECASE)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_. -]*")


class ChatTemplate:
    """A chat template, ready to render from any thread.

    source:         Jinja, in Hugging Face's dialect
    tool_source:    another template for requests with tools, which a few files have
    bos, eos:       names of the begin and end tokens, for templates that print them
    control_texts:  names of control tokens: where they occur in messages they stay text
    """

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        bos: str = "",
        eos: str = "",
        control_texts: Collection[str] = (),
    ) -> None:
        """Compiles. Raises: ValueError when the source is no template; it says where."""
        self.source = source
        self.tool_source = tool_source or source
        self._names = {"bos_token": bos, "eos_token": eos}
        self._template = _compile(source)
        self._tool_template = _compile(tool_source) if tool_source else self._template
        self._guard = _Guard(control_texts)

    @classmethod
    def from_gguf(
        cls, file: Model[Any], override: str | None = None, tokenizer: Tokenizer | None = None
    ) -> ChatTemplate | None:
        """The file's template, or the one of its family, with a warning, or None: then it cannot chat.

        override:   a template in place of the file's, or the name of a family in fallback.FAMILIES
        tokenizer:  the file's, when it is there already

        Raises: ModelFileError, or RequestError for an override, when it is no template.
        """
        if tokenizer is None:
            from edgert.tokenizer import Tokenizer

            tokenizer = Tokenizer.from_gguf(file)
        source, tool_source = override, None
        if override in FAMILIES:
            source = FAMILIES[override][1]
        elif override is not None and not any(mark in override for mark in ("{{", "{%")):
            # Jinja would take it for a template that says the same whatever the messages are.
            raise RequestError(
                "chat_template",
                f"{override[:40]!r} is neither a Jinja template nor one of {', '.join(FAMILIES)}",
            )
        elif override is None:
            source = file.get("tokenizer.chat_template", str, None)
            tool_source = file.get("tokenizer.chat_template.tool_use", str, None)
        if source is None:
            family = family_of(tokenizer.control_texts)
            if family is None and tokenizer.vocabulary.model in ("bert", "t5"):
                return None  # of an encoder, which nobody chats with
            if family is None:
                logger.warning(
                    "%s has no chat template and no markers of a known family: it can continue texts, "
                    "not chat; give a template with --chat-template.",
                    file.path,
                )
                return None
            logger.warning(
                "%s has no chat template: the one of %s is used, as its vocabulary suggests; "
                "another is given with --chat-template.",
                file.path,
                family,
            )
            source = FAMILIES[family][1]
        try:
            return cls(
                source,
                tool_source=tool_source,
                bos=tokenizer.token_text(tokenizer.bos_id),
                eos=tokenizer.token_text(tokenizer.eos_id),
                control_texts=tokenizer.control_texts,
            )
        except ValueError as error:
            if override is not None:
                raise RequestError("chat_template", f"is no Jinja template: {error}") from None
            raise ModelFileError(
                f"{file.path}: the chat template cannot be used: {error}; give another with --chat-template."
            ) from None

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """The token ids of a conversation; the begin token stands there once, if the model wants one.

        Raises: RequestError as render() does.
        """
        pieces = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)
        return tokenizer.encode_pieces(pieces)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[str]:
        """The text of a conversation, in pieces for Tokenizer.encode_pieces: joined they are the text.

        A control token's name counts only within a piece, and names that messages, tools or kwargs hold are
        cut in two, so what a user typed stays text and what the template wrote becomes control tokens.

        Raises: RequestError when the template refuses the messages, fails, or takes too long.
        """
        known = checked(messages)
        tools = _objects("tools", tools)
        template = self._tool_template if tools else self._template
        shaped = [_shaped(message, self._shape, i) for i, message in enumerate(known)]
        if any(_only_calls(message) for message in known) and self._knows_no_content:
            shaped = [m | {"content": None} if _only_calls(k) else m for m, k in zip(shaped, known, strict=True)]
        attempts = [(_with_arguments(shaped), tools)]
        if any(message.get("tool_calls") for message in shaped):  # some print a call's arguments as their JSON text
            attempts.append((_with_texts(shaped), tools))
        if not tools:  # some are written for tools alone and do not ask whether there are any
            attempts.append((attempts[0][0], []))
        failures = []
        for messages_, tools_ in attempts:
            try:
                return self._render(template, messages_, tools_, add_generation_prompt, kwargs)
            except _FailedError as failed:
                failures.append(failed)
        raise RequestError("messages", str(failures[0])) from failures[0].__cause__

    def _render(
        self,
        template: Any,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> list[str]:
        from edgert.template import sandbox

        values = {"documents": None, **kwargs, "messages": messages, "tools": tools}
        values, mark = self._guard.cut(values)
        given = sum(map(len, _texts(values)))
        names = self._names | values | {"add_generation_prompt": add_generation_prompt}
        with sandbox.metered(sandbox.Meter(given, mark)):
            try:
                text = sandbox.run(template, names)
            except sandbox.RaisedError as error:
                raise RequestError("messages", str(error) or "the chat template refuses them") from None
            except (sandbox.LimitError, MemoryError, RecursionError) as error:
                what = str(error) if isinstance(error, sandbox.LimitError) else "it needs too much memory"
                raise RequestError("messages", f"the model's chat template was stopped: {what}") from None
            except Exception as error:
                raise _FailedError(f"the model's chat template fails: {error}") from error
        return text.split(mark) if mark else [text]

    @cached_property
    def _shape(self) -> Shape:
        """Which shapes of content the template understands, found by trying both."""
        text = self._probe(_PROBE)
        parts = self._probe([{"type": "text", "text": _PROBE}])
        if parts == text and _PROBE in text:
            return "any"
        return "parts" if _PROBE not in text and _PROBE in parts else "text"

    @cached_property
    def _knows_no_content(self) -> bool:
        """Whether the template can tell a message without content, only calls, from an empty text."""
        call = {"type": "function", "id": "123456789", "function": {"name": "probe", "arguments": {"probe": 1}}}
        outcomes = [
            self._probe_messages(
                [
                    {"role": "user", "content": _PROBE},
                    {"role": "assistant", "content": content, "tool_calls": [call]},
                    {"role": "tool", "name": "probe", "tool_call_id": "123456789", "content": _PROBE},
                ]
            )
            for content in (None, "")
        ]
        return bool(outcomes[0]) and not any(
            outcomes[0].count(word) > outcomes[1].count(word) for word in ("None", "null")
        )

    def _probe(self, content: Any) -> str:
        return self._probe_messages([{"role": "user", "content": content}])

    def _probe_messages(self, messages: list[dict[str, Any]]) -> str:
        """What the template makes of messages; "" when it fails."""
        from edgert.template import sandbox

        names = self._names | {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        with sandbox.metered(sandbox.Meter(seconds=_PROBE_SECONDS)):
            try:
                return sandbox.run(self._template, names)
            except Exception:
                return ""


class _FailedError(Exception):
    """The template failed in a way that other values might not make it fail."""


class _Guard:
    """Puts a mark into the names of control tokens in given texts.

    A name is known by its first two characters. A mark goes between them, and behind a last character that
    could begin a name with what the template writes next. Where a text begins with a sign that is the second
    character of names, a mark goes before it. Texts without such places are not touched.
    """

    def __init__(self, control_texts: Collection[str]) -> None:
        seconds: dict[str, set[str]] = {}
        starts: set[str] = set()
        for text in control_texts:
            seconds.setdefault(text[0], set()).update(text[1:2])
            starts.update(c for c in text[1:2] if not c.isalnum() and not c.isspace())
        thinking = "|".join(re.escape(t) for t in control_texts if _THINKING.fullmatch(t))
        places = [
            f"{re.escape(first)}(?=[{re.escape(''.join(sorted(follow)))}]|$(?!\n))"
            for first, follow in sorted(seconds.items())
        ]
        start = f"^(?=[{re.escape(''.join(sorted(starts)))}])" if starts else ""
        self._user = _pattern("|".join(filter(None, [start, *places])))
        self._model = _pattern(f"(?!{thinking})(?:{'|'.join(places)})" if thinking and places else "|".join(places))

    def cut(self, values: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The values with marks in them, and the mark; "" when no text needed one."""
        if self._user is None or not any(map(self._user.search, _texts(values))):
            return values, ""
        used = "".join(_texts(values))
        mark = next((c for c in map(chr, range(0x10FFFD, 0x100000, -1)) if c not in used), None)
        if mark is None:
            raise RequestError("messages", "hold every character of Unicode's private planes")
        return self._cut(values, mark, False), mark

    def _cut(self, value: Any, mark: str, model: bool) -> Any:
        if isinstance(value, str):
            pattern = self._model if model else self._user
            return value if pattern is None else pattern.sub(lambda m: m[0] + mark, value)
        if isinstance(value, Mapping):
            model = model or value.get("role") == "assistant"
            return {
                self._cut(key, mark, model): item
                if key == "role" and isinstance(item, str) and _PLAIN_NAME.fullmatch(item)
                else self._cut(item, mark, model)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._cut(item, mark, model) for item in value]
        return value


def _pattern(expression: str) -> re.Pattern[str] | None:
    return re.compile(expression) if expression else None


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


SPEAKERS = ("system", "developer", "user")  # whose messages are nothing without content


def checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages of a chat, whatever a caller gave. Raises: RequestError that names what is none."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages", 'must be a list such as [{"role": "user", "content": "Hi"}]')
    if not messages:
        raise RequestError("messages", "is empty")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{i}]", "must be an object with role and content")
        if not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}].role", 'must be a text such as "user"')
        if message.get("content") is None and message["role"] in SPEAKERS:
            raise RequestError(f"messages[{i}].content", "is missing")
        for k, call in enumerate(_objects(f"messages[{i}].tool_calls", message.get("tool_calls")) or ()):
            function = call.get("function")
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise RequestError(f"messages[{i}].tool_calls[{k}].function.name", "must be a text")
    return [dict(message) for message in messages]


def _objects(field: str, value: Any) -> list[Any] | None:
    """The objects of a list, None for no list or an empty one. Raises: RequestError for anything else."""
    if value is None:
        return None
    if (
        isinstance(value, str | bytes)
        or not isinstance(value, Sequence)
        or not all(isinstance(v, Mapping) for v in value)
    ):
        raise RequestError(field, "must be a list of objects")
    return list(value) or None


def _shaped(message: dict[str, Any], shape: Shape, i: int) -> dict[str, Any]:
    """The message with its content as the template understands it: one text, or a list of parts."""
    content = message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, Sequence) and not isinstance(content, str | bytes):
        texts = [_part_text(part, f"messages[{i}].content[{k}]") for k, part in enumerate(content)]
        content = "\n".join(texts) if shape == "text" else [{"type": "text", "text": t} for t in texts]
    elif not isinstance(content, str):
        raise RequestError(f"messages[{i}].content", "must be a text or a list of parts")
    if shape == "parts" and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    return message | {"content": content}


def _part_text(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
        raise RequestError(field, f'parts of the type {kind!r} are not supported, {{"type": "text", ...}} is')
    return part["text"]


def _with_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, which most templates expect, instead of JSON text."""
    return [
        message | {"tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _only_calls(message: dict[str, Any]) -> bool:
    return message.get("content") is None and bool(message.get("tool_calls"))


def _with_texts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls with their arguments as JSON text."""
    return [
        message | {"tool_calls": [_with_text(call) for call in message["tool_calls"]]}
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


def _compile(source: str) -> Any:
    from jinja2 import TemplateError

    from edgert.template import sandbox

    with sandbox.metered(sandbox.Meter(len(source))):
        try:
            return sandbox.Environment().from_string(source)
        except (TemplateError, SyntaxError, sandbox.LimitError) as error:
            line = getattr(error, "lineno", None)
            raise ValueError(f"{error}" + (f" (line {line})" if line else "")) from None
        except (RecursionError, MemoryError):
            raise ValueError("it is nested too deeply") from None


__all__ = ["ChatTemplate"]
