"""The routes, put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgert.server import embeddings, ollama, openai, openapi, pages, texts
from edgert.server.errors import ApiError
from edgert.server.guard import Guard
from edgert.server.service import Service, of
from edgert.server.sse import ClientLeft
from edgert.server.threads import Threads

Handler = Callable[[Request], Awaitable[ASGIApp]]
SWEEP_SECONDS = 1.0

_THREADS = Threads()


class Endpoint:
    """A route's handler, whose answer may be any ASGI app."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        with suppress(ClientLeft):
            answer = await self._handler(request)
            await answer(scope, receive, send)


def _post(path: str, handler: Handler) -> Route:
    return Route(path, Endpoint(handler), methods=["POST"])


def _get(path: str, handler: Handler) -> Route:
    return Route(path, Endpoint(handler), methods=["GET"])


def routes() -> list[Route]:
    """All of them."""
    return [
        _post("/v1/chat/completions", openai.chat_completions),
        _post("/chat/completions", openai.chat_completions),
        _post("/v1/chat/completions/input_tokens", openai.input_tokens),
        _post("/chat/completions/input_tokens", openai.input_tokens),
        _post("/v1/completions", openai.completions),
        _post("/completions", openai.completions),
        _post("/v1/embeddings", embeddings.embeddings),
        _post("/embeddings", embeddings.embeddings),
        _get("/v1/models", openai.models),
        _get("/models", openai.models),
        _post("/v1/models/{name}/reload", openai.reload),
        _get("/v1/models/{name:path}", openai.one_model),
        _get("/health", health),
        _get("/v1/health", health),
        _post("/tokenize", texts.tokenize),
        _post("/detokenize", texts.detokenize),
        _post("/apply-template", texts.apply_template),
        _get("/props", texts.props),
        _get("/", pages.page),
        _get("/page/{name}", pages.page),
        _get("/favicon.ico", pages.icon),
        _get("/metrics", metrics),
        _get("/openapi.json", openapi.openapi),
        _post("/api/chat", ollama.chat),
        _post("/api/generate", ollama.generate),
        _post("/api/embed", ollama.embeddings),
        _post("/api/embeddings", ollama.old_embeddings),
        _get("/api/tags", ollama.tags),
        _get("/api/ps", ollama.running),
        _post("/api/show", ollama.show),
        _get("/api/version", ollama.version),
    ]


async def health(request: Request) -> Response:
    """GET /health: 503 until the first model is there."""
    place = of(request).registry.default
    if place.state == "loading":
        raise ApiError(
            503, "The model is being loaded.", kind="unavailable_error", code="loading", headers={"Retry-After": "1"}
        )
    if place.state == "failed":
        raise ApiError(503, "The model could not be loaded.", kind="unavailable_error", code="failed")
    return openai.answer({"status": "ok"})


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    text = await _THREADS.run(of(request).metrics.text)  # which may ask a driver
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: f"There is no route {request.url.path[:200]}.", 405: "The route has another method."}
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    headers = dict(error.headers or {})
    answer = ApiError(error.status_code, message.get(error.status_code, error.detail), kind=kind, headers=headers)
    return answer.response(plain=request.url.path.startswith("/api/"))


def create_app(service: Service) -> Starlette:
    """The ASGI app of a service; models are closed when it shuts down."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async def sweep() -> None:
            while True:
                await asyncio.sleep(SWEEP_SECONDS)
                service.registry.sweep()

        sweeper = asyncio.ensure_future(sweep())
        try:
            yield
        finally:
            sweeper.cancel()
            await service.registry.close()

    handlers: Any = {HTTPException: _not_found}
    app = Starlette(
        routes=routes(),
        middleware=[Middleware(Guard, service=service)],
        lifespan=lifespan,
        exception_handlers=handlers,
    )
    app.state.service = service
    service.metrics.watch(service.registry, service.admission)
    return app
