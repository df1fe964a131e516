"""Small routes of llama-server's: tokens and templates."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import edgert
from edgert.errors import RequestError
from edgert.server import service as services
from edgert.server.errors import ApiError
from edgert.server.openai import answer


class TokenizeRequest(msgspec.Struct):
    """POST /tokenize."""

    content: str
    model: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(msgspec.Struct):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class TemplateRequest(msgspec.Struct):
    """POST /apply-template."""

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True


async def tokenize(request: Request) -> Response:
    """The tokens of a text."""
    service = services.of(request)
    body = await service.body(request, TokenizeRequest)
    async with AsyncExitStack() as stack:
        model = (await service.enter(stack, request, body.model)).model
        flags = {"add_special": body.add_special, "parse_special": body.parse_special}
        ids = await asyncio.to_thread(partial(model.tokenize, body.content, **flags))
        if not body.with_pieces:
            return answer({"tokens": ids})
        pieces = [(token, model.tokenizer.piece(token)) for token in ids]
        return answer({"tokens": [{"id": token, "piece": _piece(data)} for token, data in pieces]})


def _piece(data: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are no whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    service = services.of(request)
    body = await service.body(request, DetokenizeRequest)
    async with AsyncExitStack() as stack:
        model = (await service.enter(stack, request, body.model)).model
        try:
            return answer({"content": await asyncio.to_thread(model.detokenize, body.tokens)})
        except RequestError as error:
            raise RequestError("tokens", error.reason) from None


async def apply_template(request: Request) -> Response:
    """The text that a chat becomes."""
    service = services.of(request)
    body = await service.body(request, TemplateRequest)
    async with AsyncExitStack() as stack:
        template = (await service.enter(stack, request, body.model)).model.template
        if template is None:
            raise RequestError("messages", "the file has no chat template")
        extra = dict(body.chat_template_kwargs or {})
        extra["add_generation_prompt"] = body.add_generation_prompt
        pieces = await asyncio.to_thread(partial(template.render, body.messages, tools=body.tools, **extra))
        return answer({"prompt": "".join(pieces)})


async def props(request: Request) -> Response:
    """GET /props: what the first model is, and how many answers are made at once."""
    service = services.of(request)
    place = service.registry.default
    if not place.loaded:
        raise ApiError(503, "The model is not loaded.", kind="unavailable_error", headers={"Retry-After": "1"})
    model = place.loaded.model
    return answer(
        {
            "model_alias": place.spec.name,
            "total_slots": service.admission.parallel,
            "chat_template": getattr(model.template, "source", ""),
            "default_generation_settings": {"n_ctx": model.n_ctx, "params": asdict(model.defaults)},
            "build_info": f"edgert-{edgert.__version__}",
        }
    )
