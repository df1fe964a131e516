"""OpenAI's routes: chat, completions, models."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from edgert.errors import EdgertError
from edgert.reply import Progress, Stats
from edgert.server import service as services
from edgert.server.answers import Answers, Kept, answers_to, compiled, timings
from edgert.server.body import parse, read
from edgert.server.chatting import Chat, prepare
from edgert.server.choosing import chosen
from edgert.server.errors import ApiError
from edgert.server.requests import MAX_CHOICES, ChatRequest, CompletionRequest, Generating, ids_of
from edgert.server.shapes import ChatShape, CompletionShape, Echo, Shape
from edgert.server.sse import DONE, EventStream, event, in_thread, until_left
from edgert.server.tools import Toolbox
from edgert.server.upstream import first_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from edgert.model import Model
    from edgert.server.choice import Choice
    from edgert.server.registry import Loaded


Body = TypeVar("Body", bound=Generating)


def answer(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def chat_completions(request: Request) -> ASGIApp:
    """POST /v1/chat/completions."""
    return await _or_upstream(request, "/chat/completions", ChatRequest, _chat)


async def completions(request: Request) -> ASGIApp:
    """POST /v1/completions."""
    return await _or_upstream(request, "/completions", CompletionRequest, _complete)


async def _or_upstream(
    request: Request, path: str, kind: type[Body], work: Callable[[Request, Body], Awaitable[ASGIApp]]
) -> ASGIApp:
    """What `work` answers, or the upstream server where there is one and this one cannot."""
    service = services.of(request)
    raw = await read(request, service.settings.max_body)
    body = parse(raw, kind)
    try:
        return await work(request, body)
    except Exception as error:
        if service.upstream and service.upstream.takes(error):
            return await service.upstream.forward(path, raw, error, request.receive)
        raise


async def _chat(request: Request, body: ChatRequest) -> ASGIApp:
    service = services.of(request)
    box = Toolbox.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    user = services.owner(request, body.user)

    async def prepared(model: Model) -> Chat:
        return await prepare(model, body.messages, body.params(), box, body.template_kwargs(), body.continued)

    async def told(model: Model) -> tuple[list[list[int]], dict[str, Any]]:
        chat = await prepared(model)
        return [chat.ids], chat.params

    body.model = await chosen(request, body.model, body.user, told)
    async with AsyncExitStack() as stack:
        model = (await enter(stack, request, body, body.choices)).model
        chat = await prepared(model)
        shape = ChatShape(service.registry.find(body.model).spec.name, model, chat.parser)
        answers = answers_to(service, model, [chat.ids], body.choices, chat.params, user)
        return await respond(stack, request, body, shape, answers)


async def _complete(request: Request, body: CompletionRequest) -> ASGIApp:
    service = services.of(request)
    prompts, n = body.prompts(), body.choices
    if n * len(prompts) > MAX_CHOICES:
        raise ApiError(400, f"prompt: asks for more than {MAX_CHOICES} answers at once.", param="prompt")

    async def told(model: Model) -> tuple[list[list[int]], dict[str, Any]]:
        params = await compiled(model, body.params())
        return await ids_of(prompts, model.tokenize, model.n_ctx), params

    body.model = await chosen(request, body.model, body.user, told)
    async with AsyncExitStack() as stack:
        model = (await enter(stack, request, body, n * len(prompts))).model
        ids, params = await told(model)
        user = services.owner(request, body.user)
        answers = answers_to(service, model, ids, n, params, user)
        stack.callback(answers.close)
        echoes = []
        if body.echo:
            for prompt, tokens in zip(prompts, ids, strict=True):
                text = prompt if isinstance(prompt, str) else model.detokenize(prompt)
                if body.logprobs is None or not tokens:
                    echoes.append(Echo(text))
                    continue
                weighing = in_thread(model.prompt_logprobs, tokens, body.logprobs, user)
                echoes.append(Echo(text, tokens, await until_left(request.receive, weighing)))
        shape = CompletionShape(service.registry.find(body.model).spec.name, model, echoes, n)
        return await respond(stack, request, body, shape, answers)


async def enter(stack: AsyncExitStack, request: Request, body: Generating, answers: int) -> Loaded:
    """A place and a model for a request."""
    return await services.of(request).enter(
        stack, request, body.model, answers=answers, user=body.user, keep_alive=body.keep_alive
    )


async def respond(stack: AsyncExitStack, request: Request, body: Generating, shape: Shape, answers: Answers) -> ASGIApp:
    """Sends the answers as events or whole; the stack is closed when they have ended."""
    stack.callback(answers.close)
    if isinstance(answers, Kept):
        shape.mark("result-cache")
    if body.stream:
        upstream = services.of(request).upstream
        parts = stream(body, shape, answers, bool(upstream))
        if upstream:  # which takes what has waited too long, as long as nothing was said
            parts = await until_left(request.receive, first_of(parts))
        return EventStream(parts, done=stack.pop_all().aclose)
    replies = await until_left(request.receive, answers.replies())
    choices = [shape.choice(index, reply) for index, reply in enumerate(replies)]
    return answer(
        shape.head(shape.whole) | {"choices": choices, "usage": answers.usage(), "timings": timings(answers.stats[0])}
    )


async def stream(
    body: Generating, shape: Shape, answers: Answers, patient: bool = False
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer: what begins each choice, its pieces, its end; then the counts.

    patient:  says nothing before the engine has begun
    """
    head = shape.head(shape.part)
    usage: dict[str, Any] = {"usage": None} if body.include_usage else {}
    begun = [choice for index in range(answers.count) for choice in shape.begin(index)]
    if not patient:
        for choice in begun:
            yield event(head | {"choices": [choice]} | usage)
    async with aclosing(answers.pieces(bool(body.return_progress) or patient)) as pieces:
        async for index, item in pieces:
            while patient and begun:
                yield event(head | {"choices": [begun.pop(0)]} | usage)
            if isinstance(item, Progress):
                if not body.return_progress:
                    continue
                report = {"total": item.total, "cache": item.cache, "processed": item.processed}
                facts: dict[str, Any] = {"prompt_progress": report | {"time_ms": item.time_ms}}
                if body.timings_per_token:
                    read = item.processed - item.cache
                    facts["timings"] = timings(Stats.of(item.cache, read, item.time_ms / 1e3, 0, 0.0))
                yield event(head | {"choices": [shape.empty(index)]} | usage | facts)
                continue
            stats = item.stats or (answers.so_far(index) if body.timings_per_token else None)
            extra = {"timings": timings(stats)} if stats else {}
            choices = shape.pieces(index, item)
            for choice in choices:
                yield event(head | {"choices": [choice]} | usage | (extra if choice is choices[-1] else {}))
    if body.include_usage:
        yield event(head | {"choices": [], "usage": answers.usage(), "timings": timings(answers.stats[0])})
    yield DONE


async def input_tokens(request: Request) -> Response:
    """POST /v1/chat/completions/input_tokens: how long the prompt is that a conversation becomes."""
    service = services.of(request)
    body = await service.body(request, ChatRequest)
    box = Toolbox.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    choice = service.choices.get(body.model or "")
    name = choice.large if choice else body.model
    async with AsyncExitStack() as stack:
        model = (await service.enter(stack, request, name, user=body.user, keep_alive=body.keep_alive)).model
        chat = await prepare(
            model, body.messages, body.params(), box, body.template_kwargs(), body.continued, whole=True
        )
        return answer({"object": "response.input_tokens", "input_tokens": len(chat.ids)})


async def models(request: Request) -> Response:
    """GET /v1/models."""
    service = services.of(request)
    data = [_model(place) for place in service.registry.places.values()]
    data += [_choice(service, choice) for choice in service.choices.values()]
    return answer({"object": "list", "data": data})


async def one_model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    service, name = services.of(request), request.path_params["name"]
    if choice := service.choices.get(name):
        return answer(_choice(service, choice))
    return answer(_model(service.registry.find(name)))


async def reload(request: Request) -> Response:
    """POST /v1/models/NAME/reload: reads its file again and takes the new one if it passes a self-check."""
    registry = services.of(request).registry
    place = registry.find(request.path_params["name"])
    try:
        await registry.swap(place.spec.name)
    except (EdgertError, OSError) as error:
        kept = "the one in memory stays" if place.loaded else "there is none in memory"
        raise ApiError(409, f"The new file was not taken, {kept}: {error}", code="reload_failed") from error
    return answer(_model(place))


def _choice(service: services.Service, choice: Choice) -> dict[str, Any]:
    created = service.registry.default.created
    about = {"id": choice.name, "object": "model", "created": created, "owned_by": "edgert", "aliases": []}
    return about | {"meta": {"small": choice.small, "large": choice.large}}


def _model(place: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"state": place.state}
    if place.loaded:
        model: Model = place.loaded.model
        facts |= {"n_ctx": model.n_ctx, "n_vocab": model.n_vocab, "verdict": str(model.verdict)}
    return {
        "id": place.spec.name,
        "object": "model",
        "created": place.created,
        "owned_by": "edgert",
        "aliases": list(place.spec.aliases),
        "meta": facts,
    }
