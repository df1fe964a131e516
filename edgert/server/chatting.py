"""A chat on its way from messages to tokens, and how its answers are read: the same for every route that chats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from edgert.errors import ContextFullError, RequestError
from edgert.server import tools
from edgert.server.answers import GRAMMARS, compiled
from edgert.server.parsing import Parser, Plain, Thoughts
from edgert.server.tools import Toolbox
from edgert.template.messages import checked
from edgert.tokenizer.limit import at_most

if TYPE_CHECKING:
    from edgert.model import Model


@dataclass(frozen=True)
class Chat:
    """What the engine gets, and what reads each of its answers."""

    ids: list[int]
    params: dict[str, Any]
    parser: Callable[[], Parser]


async def prepare(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    params: Mapping[str, Any],
    box: Toolbox | None,
    template_kwargs: Mapping[str, Any],
    continued: bool = False,
    whole: bool = False,
) -> Chat:
    """Renders the messages and compiles the grammar, of the request's own or of its tools.

    continued:  the answer goes on from the last message's text
    whole:      messages that are longer than the context are counted to their end

    Raises: RequestError or ApiError naming the field; ContextFullError.
    """
    if model.template is None:
        raise RequestError("messages", "the model's file has no chat template: use /v1/completions")
    if not whole and len(messages) > model.n_ctx:  # each of which is a token at least: to render them takes seconds
        raise ContextFullError(len(messages), model.n_ctx, whole=False)
    style = tools.style_of(model.template)
    messages, text = (messages[:-1], messages[-1]["content"]) if continued else (messages, "")
    with nullcontext() if whole else at_most(model.n_ctx):
        ids = await asyncio.to_thread(partial(_render, model, messages, box, style, template_kwargs))
        if text:
            ids = [*ids, *await asyncio.to_thread(partial(model.tokenize, text, add_special=False))]
    free = not any(params.get(name) is not None for name in GRAMMARS)
    if box and (free or box.choice != "auto") and (grammar := box.grammar(style)):
        if not free:
            raise RequestError("tool_choice", "cannot be had together with a grammar of the request's own")
        params = {**params, "grammar": grammar}
    params = await compiled(model, params)
    if not free:
        return Chat(ids, params, Plain)
    if box and (visible := style.visible(model.tokenizer.control_names)):
        params = {**params, "visible": visible}
    begun = b"".join(map(model.tokenizer.piece, ids[-8:])).rstrip().endswith(Thoughts.BEGIN.encode())

    def parser() -> Parser:
        return Thoughts(box.parser(style) if box else Plain(), begun)

    return Chat(ids, params, parser)


def _render(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    box: Toolbox | None,
    style: tools.Style,
    template_kwargs: Mapping[str, Any],
) -> list[int]:
    if taken := {"self", "tokenizer", "messages", "tools", "add_generation_prompt"}.intersection(template_kwargs):
        raise RequestError("chat_template_kwargs", f"cannot set {min(taken)}")
    known: Sequence[Any] | None = None
    messages = checked(messages)
    if box:
        messages, known = box.tell(style, messages)
    elif not style.told and any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
        messages = tools.told(messages, "")
    return model.render(messages, tools=known, **template_kwargs)
