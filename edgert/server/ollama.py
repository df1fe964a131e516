"""Ollama's routes, so that its clients work here: chat, generate, embed, and what is said about models."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import edgert
from edgert.errors import RequestError
from edgert.reply import Chunk, Stats
from edgert.server import facts
from edgert.server import service as services
from edgert.server.answers import Answers, compiled
from edgert.server.chatting import Chat, prepare
from edgert.server.choosing import chosen
from edgert.server.embeddings import embed, places
from edgert.server.errors import of
from edgert.server.openai import answer
from edgert.server.parsing import Delta, Parser, Plain
from edgert.server.registry import FOREVER, Place
from edgert.server.sse import EventStream, line, until_left
from edgert.server.tools import Toolbox
from edgert.tokenizer.limit import at_most

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from edgert.model import Model

Json = dict[str, Any]
_OPTIONS = {"num_predict": "max_tokens"} | {
    name: name
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "repeat_penalty", "repeat_last_n")
    + ("presence_penalty", "frequency_penalty")
}


class Generating(msgspec.Struct, kw_only=True):
    """What chat and generate have in common."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None

    def params(self) -> Json:
        """Fields of SamplingParams and Options; options that are not known are ignored, as Ollama does."""
        given = {_OPTIONS[name]: value for name, value in (self.options or {}).items() if name in _OPTIONS}
        if given.get("max_tokens") == -2:  # as many as fit
            given["max_tokens"] = -1
        if self.format == "json":
            given["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            given["json_schema"] = self.format
        elif self.format:
            raise RequestError.wrong("format", "json or a JSON schema", self.format)
        return given

    def template_kwargs(self) -> Json:
        """What the chat template gets besides."""
        if self.think is None:
            return {}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"enable_thinking": bool(self.think)} | effort


class ApiChatRequest(Generating, kw_only=True):
    """POST /api/chat."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None


class ApiGenerateRequest(Generating, kw_only=True):
    """POST /api/generate."""

    prompt: str = ""
    system: str = ""
    suffix: str = ""
    raw: bool | None = None
    images: list[str] | None = None


class EmbedRequest(msgspec.Struct, kw_only=True):
    """POST /api/embed."""

    input: str | list[str]
    model: str | None = None
    keep_alive: float | str | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None


class OldEmbedRequest(msgspec.Struct, kw_only=True):
    """POST /api/embeddings."""

    prompt: str
    model: str | None = None
    keep_alive: float | str | None = None


class NamedRequest(msgspec.Struct, kw_only=True):
    """A request about one model."""

    model: str | None = None
    name: str | None = None


async def chat(request: Request) -> ASGIApp:
    """POST /api/chat."""
    service = services.of(request)
    body = await service.body(request, ApiChatRequest)
    box = Toolbox.of(body.tools)
    messages = [_message(message, i) for i, message in enumerate(body.messages)]

    async def prepared(model: Model) -> Chat:
        return await prepare(model, messages, body.params(), box, body.template_kwargs())

    if body.messages:
        return await _answered(request, body, prepared, Spoken)
    return await _touched(request, body, {"message": {"role": "assistant", "content": ""}})


async def generate(request: Request) -> ASGIApp:
    """POST /api/generate."""
    service = services.of(request)
    body = await service.body(request, ApiGenerateRequest)
    if body.images:
        raise RequestError("images", "are not supported")
    if body.suffix:
        raise RequestError("suffix", "is not supported")
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": body.prompt}]

    async def prepared(model: Model) -> Chat:
        if not body.raw and model.template is not None:
            return await prepare(model, messages, body.params(), None, body.template_kwargs())
        with at_most(model.n_ctx):
            ids = await asyncio.to_thread(model.tokenize, body.prompt)
        return Chat(ids, await compiled(model, body.params()), Plain)

    if body.prompt:
        return await _answered(request, body, prepared, Written)
    return await _touched(request, body, {"response": ""})


async def _answered(
    request: Request, body: Generating, prepared: Callable[[Model], Awaitable[Chat]], shape: type[Spoken]
) -> ASGIApp:
    service, began = services.of(request), time.monotonic()

    async def told(model: Model) -> tuple[list[list[int]], Json]:
        chat = await prepared(model)
        return [chat.ids], chat.params

    with _in_its_words():
        name = await chosen(request, body.model, None, told)
        async with AsyncExitStack() as stack:
            model = (await service.enter(stack, request, name, keep_alive=body.keep_alive)).model
            loading = time.monotonic() - began
            chat = await prepared(model)
            answers = Answers(service, model, [chat.ids], 1, chat.params, services.owner(request, None))
            spoken = shape(service.registry.find(name).spec.name, chat.parser())
            return await _respond(stack, request, body, answers, spoken, began, loading)


@contextmanager
def _in_its_words() -> Iterator[None]:
    """Lets an error name the field as a request to these routes has it. Raises: RequestError."""
    try:
        yield
    except RequestError as error:
        field = error.field.partition(".")[0]
        raise RequestError(_WORDS.get(field, error.field), error.reason) from error


_WORDS = {
    "max_tokens": "options.num_predict",
    "json_schema": "format",
    "response_format": "format",
} | {name: f"options.{name}" for name in _OPTIONS if name != "num_predict"}


async def _touched(request: Request, body: Generating, content: Json) -> Response:
    """The answer to a request without a prompt, which loads a model or puts it away."""
    service = services.of(request)
    async with AsyncExitStack() as stack:
        await service.enter(stack, request, body.model, keep_alive=body.keep_alive)
    reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
    name = service.registry.find(body.model).spec.name
    return answer(_head(name) | content | {"done": True, "done_reason": reason})


def _message(message: Mapping[str, Any], i: int) -> Json:
    """A message as OpenAI has it: Ollama's calls have no ids and no JSON in JSON."""
    if message.get("images"):
        raise RequestError(f"messages[{i}].images", "are not supported")
    shown = {name: value for name, value in message.items() if name not in ("images", "thinking", "tool_name")}
    if isinstance(calls := message.get("tool_calls"), list):
        shown["tool_calls"] = [{"type": "function", **call} if isinstance(call, dict) else call for call in calls]
    return shown


class Spoken:
    """Pieces of a chat."""

    def __init__(self, name: str, parser: Parser) -> None:
        self._name, self._parser = name, parser
        self._calls: dict[int, str] = {}  # names of those whose arguments have not come yet

    def pieces(self, chunk: Chunk) -> list[Json]:
        """What a piece of the engine's adds; the last has what is known about all."""
        deltas = self._parser.push(chunk.text) if chunk.text else []
        reason = chunk.finish_reason
        if reason is not None:
            tail, _ = self._parser.end(reason)
            deltas += tail
        found = [self._piece(content) for delta in deltas if (content := self._content(delta))]
        if chunk.stats and reason is not None:
            last = self._piece({"content": ""}) | {"done": True, "done_reason": _reason(reason)}
            found.append(last | _durations(chunk.stats))
        return found

    def _content(self, delta: Delta) -> Json | None:
        if "reasoning_content" in delta:
            return {"content": "", "thinking": delta["reasoning_content"]}
        if "tool_calls" not in delta:
            return {"content": delta["content"]}
        for call in delta["tool_calls"]:
            function, place = call["function"], call["index"]
            if "name" in function:
                self._calls[place] = function["name"]
            if function["arguments"]:
                made = {"name": self._calls.pop(place), "arguments": json.loads(function["arguments"])}
                return {"content": "", "tool_calls": [{"function": made}]}
        return None

    def _piece(self, content: Json) -> Json:
        return _head(self._name) | {"message": {"role": "assistant"} | content, "done": False}

    def whole(self, pieces: Sequence[Json]) -> Json:
        """All pieces in one."""
        message: Json = {"role": "assistant", "content": ""}
        for piece in pieces:
            for key, value in piece["message"].items():
                if key != "role":
                    message[key] = (message[key] + value) if key in message else value
        return dict(pieces[-1]) | {"message": message}


class Written(Spoken):
    """Pieces of a text."""

    def _piece(self, content: Json) -> Json:
        thinking = {"thinking": content["thinking"]} if "thinking" in content else {}
        return _head(self._name) | {"response": content["content"]} | thinking | {"done": False}

    def whole(self, pieces: Sequence[Json]) -> Json:
        texts = {
            key: "".join(piece.get(key, "") for piece in pieces)
            for key in ("response", "thinking")
            if key == "response" or any(key in piece for piece in pieces)
        }
        return dict(pieces[-1]) | texts


async def _respond(
    stack: AsyncExitStack,
    request: Request,
    body: Generating,
    answers: Answers,
    shape: Spoken,
    began: float,
    loading: float,
) -> ASGIApp:
    stack.callback(answers.close)

    def timed(piece: Json) -> Json:
        if not piece["done"]:
            return piece
        total = {"total_duration": int(1e9 * (time.monotonic() - began)), "load_duration": int(1e9 * loading)}
        return piece | total

    if body.stream is False:
        reply = (await until_left(request.receive, answers.replies()))[0]
        pieces = shape.pieces(Chunk(reply.text, reply.tokens, reply.finish_reason, reply.stats))
        return answer(timed(shape.whole(pieces)))

    async def parts() -> AsyncGenerator[bytes, None]:
        async with aclosing(answers.pieces()) as chunks:
            async for _, chunk in chunks:
                assert isinstance(chunk, Chunk)
                for piece in shape.pieces(chunk):
                    yield line(timed(piece))

    return EventStream(
        parts(),
        failed=lambda error: line({"error": of(error).message}),
        media_type=b"application/x-ndjson",
        ping=b"",
        done=stack.pop_all().aclose,
    )


def _head(name: str) -> Json:
    return {"model": name, "created_at": _time(time.time())}


def _reason(reason: str) -> str:
    return "length" if reason == "length" else "stop"


def _durations(stats: Stats) -> Json:
    return {
        "prompt_eval_count": stats.cache_n + stats.prompt_n,
        "prompt_eval_duration": int(1e6 * max(0.0, stats.prompt_ms)),
        "eval_count": stats.predicted_n,
        "eval_duration": int(1e6 * max(0.0, stats.predicted_ms)),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


async def embeddings(request: Request) -> Response:
    """POST /api/embed."""
    service, began = services.of(request), time.monotonic()
    body = await service.body(request, EmbedRequest)
    texts: list[Any] = [body.input] if isinstance(body.input, str) else list(body.input)
    async with AsyncExitStack() as stack:
        entering = service.enter(stack, request, body.model, answers=places(texts), keep_alive=body.keep_alive)
        model = (await entering).model
        loading = time.monotonic() - began
        vectors, count = await embed(request, model, texts, dimensions=body.dimensions)
        return answer(
            {
                "model": service.registry.find(body.model).spec.name,
                "embeddings": [vector.tolist() for vector in vectors],
                "total_duration": int(1e9 * (time.monotonic() - began)),
                "load_duration": int(1e9 * loading),
                "prompt_eval_count": count,
            }
        )


async def old_embeddings(request: Request) -> Response:
    """POST /api/embeddings, which Ollama has replaced by /api/embed."""
    service = services.of(request)
    body = await service.body(request, OldEmbedRequest)
    async with AsyncExitStack() as stack:
        loaded = await service.enter(stack, request, body.model, keep_alive=body.keep_alive)
        vectors, _ = await embed(request, loaded.model, [body.prompt])
        return answer({"embedding": vectors[0].tolist()})


async def tags(request: Request) -> Response:
    """GET /api/tags."""
    places = services.of(request).registry.places.values()
    return answer({"models": [await asyncio.to_thread(_described, place) for place in places]})


async def running(request: Request) -> Response:
    """GET /api/ps."""
    found = []
    for place in services.of(request).registry.places.values():
        if place.loaded:
            model = place.loaded.model
            left = place.expires - time.monotonic()
            until = time.time() + left if left < FOREVER else time.time() + 100 * 365 * 86400
            memory = sum(size for name, size in model.backend.memory().items() if name in ("weights", "kv", "buffers"))
            described = await asyncio.to_thread(_described, place)
            found.append(
                described | {"size": memory, "size_vram": 0, "context_length": model.n_ctx, "expires_at": _time(until)}
            )
    return answer({"models": found})


def _described(place: Place) -> Json:
    about = facts.of(place.spec.source)
    return {
        "name": place.spec.name,
        "model": place.spec.name,
        "modified_at": _time(about.modified),
        "size": about.size,
        "digest": about.digest,
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": about.family,
            "families": [about.family],
            "parameter_size": about.parameters,
            "quantization_level": about.quantization,
        },
    }


async def show(request: Request) -> Response:
    """POST /api/show."""
    service = services.of(request)
    body = await service.body(request, NamedRequest)
    place = service.registry.find(body.model or body.name)
    about = await asyncio.to_thread(facts.of, place.spec.source)
    described = await asyncio.to_thread(_described, place)
    return answer(
        {
            "modelfile": f"FROM {place.spec.name}",
            "parameters": "",
            "template": about.template,
            "license": about.licence,
            "details": described["details"],
            "model_info": about.metadata,
            "capabilities": ["completion", "tools"] if about.template else ["completion"],
            "modified_at": described["modified_at"],
        }
    )


async def version(request: Request) -> Response:
    """GET /api/version."""
    return answer({"version": edgert.__version__})
