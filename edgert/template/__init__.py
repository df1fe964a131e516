"""Messages to the text that a model was trained on, by the Jinja template in its file."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from edgert.errors import ModelFileError, RequestError
from edgert.template.fallback import FAMILIES, family_of
from edgert.template.guard import Guard, texts_in
from edgert.template.messages import Message, Shape, checked, objects, only_calls, shaped, with_arguments
from edgert.template.meter import LimitError, Meter, metered

if TYPE_CHECKING:
    from edgert.quantize.gguf_file import Model
    from edgert.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_PROBE = "edgert probes"
_PROBE_SECONDS = 0.2


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
        self._guard = Guard(control_texts)

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
        tools = objects("tools", tools)
        template = self._tool_template if tools else self._template
        formed = [shaped(message, self._shape, i) for i, message in enumerate(known)]
        if any(only_calls(message) for message in known) and self._knows_no_content:
            formed = [m | {"content": None} if only_calls(k) else m for m, k in zip(formed, known, strict=True)]
        attempts = [(with_arguments(formed, as_text=False), tools)]
        if any(message.get("tool_calls") for message in formed):  # some print a call's arguments as their JSON text
            attempts.append((with_arguments(formed, as_text=True), tools))
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
        from edgert.template import filters, sandbox

        values = {"documents": None, **kwargs, "messages": messages, "tools": tools}
        values, mark = self._guard.cut(values)
        given = sum(map(len, texts_in(values)))
        names = self._names | values | {"add_generation_prompt": add_generation_prompt}
        with metered(Meter(given, mark)):
            try:
                text = sandbox.run(template, names)
            except filters.RaisedError as error:
                raise RequestError("messages", str(error) or "the chat template refuses them") from None
            except (LimitError, MemoryError, RecursionError) as error:
                what = str(error) if isinstance(error, LimitError) else "it needs too much memory"
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
        with metered(Meter(seconds=_PROBE_SECONDS)):
            try:
                return sandbox.run(self._template, names)
            except Exception:
                return ""


class _FailedError(Exception):
    """The template failed in a way that other values might not make it fail."""


def _compile(source: str) -> Any:
    from jinja2 import TemplateError

    from edgert.template import sandbox

    with metered(Meter(len(source))):
        try:
            return sandbox.Environment().from_string(source)
        except (TemplateError, SyntaxError, LimitError) as error:
            line = getattr(error, "lineno", None)
            raise ValueError(f"{error}" + (f" (line {line})" if line else "")) from None
        except (RecursionError, MemoryError):
            raise ValueError("it is nested too deeply") from None


__all__ = ["ChatTemplate"]
