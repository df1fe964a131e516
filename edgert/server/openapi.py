"""GET /openapi.json: what the routes take, from the very types that check requests."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import edgert
from edgert.server import embeddings, ollama, requests, texts

BODIES: dict[str, tuple[str, type]] = {
    "/v1/chat/completions": ("Answers a conversation.", requests.ChatRequest),
    "/v1/chat/completions/input_tokens": ("How long a conversation is in tokens.", requests.ChatRequest),
    "/v1/completions": ("Continues texts.", requests.CompletionRequest),
    "/v1/embeddings": ("Says where texts stand among others.", embeddings.EmbeddingRequest),
    "/embeddings": ("The same, or the state of each token.", embeddings.EmbeddingRequest),
    "/tokenize": ("The tokens of a text.", texts.TokenizeRequest),
    "/detokenize": ("The text of tokens.", texts.DetokenizeRequest),
    "/apply-template": ("The text that a conversation becomes.", texts.TemplateRequest),
    "/api/chat": ("Ollama's chat.", ollama.ApiChatRequest),
    "/api/generate": ("Ollama's completion.", ollama.ApiGenerateRequest),
    "/api/embed": ("Ollama's embeddings.", ollama.EmbedRequest),
    "/api/embeddings": ("Ollama's older embeddings.", ollama.OldEmbedRequest),
    "/api/show": ("Ollama's facts of a model.", ollama.NamedRequest),
}
READS = {
    "/v1/models": "The models.",
    "/v1/models/{name}": "One of them.",
    "/props": "What the first model is.",
    "/metrics": "What is counted and measured, for Prometheus.",
    "/health": "Whether the first model is there.",
    "/api/tags": "The models, as Ollama lists them.",
    "/api/ps": "The models in memory, as Ollama lists them.",
    "/api/version": "The version.",
}
_ERRORS = {
    "400": "A field has a wrong value; the error names it.",
    "401": "The API key is missing or wrong.",
    "403": "The host or origin is not let in.",
    "404": "There is no such model.",
    "409": "The new file was not taken.",
    "408": "The body did not come.",
    "413": "The body is too large.",
    "429": "The user has too many requests here.",
    "500": "The engine failed.",
    "501": "The model's backend cannot do this.",
    "503": "There is no room now.",
    "504": "The answer took too long.",
}


@cache
def document() -> dict[str, Any]:
    """The document."""
    types = [kind for _, kind in BODIES.values()]
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    failed = {"application/json": {"schema": {"type": "object", "required": ["error"]}}}
    answers: dict[str, Any] = {code: {"description": text, "content": failed} for code, text in _ERRORS.items()}
    answers["200"] = {
        "description": "Done.",
        "content": {kind: {} for kind in ("application/json", "text/event-stream", "application/x-ndjson")},
    }
    paths: dict[str, Any] = {}
    for (path, (text, _)), reference in zip(BODIES.items(), references, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths[path] = {"post": {"summary": text, "requestBody": body, "responses": answers}}
    for path, text in READS.items():
        paths[path] = {"get": {"summary": text, "responses": answers}}
    paths["/v1/models/{name}"]["parameters"] = name = [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    reload = {"summary": "Takes the model's file anew, if it passes a self-check.", "responses": answers}
    paths["/v1/models/{name}/reload"] = {"post": reload, "parameters": name}
    return {
        "openapi": "3.1.0",
        "info": {"title": "edgert", "version": edgert.__version__},
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    return Response(msgspec.json.encode(document()), media_type="application/json")
