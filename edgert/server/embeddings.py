"""POST /v1/embeddings, and /embeddings, which tells the state of each token too where that is asked for."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Literal

import msgspec
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from edgert.model import Model, Pooling
from edgert.server import service as services
from edgert.server.errors import ApiError
from edgert.server.openai import answer
from edgert.server.requests import MAX_CHOICES, Prompt, ids_of, prompts_of
from edgert.server.sse import in_thread, until_left

MOST = 2048  # texts of one request


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Names are OpenAI's; `pooling` is ours, and "none" is for /embeddings only, as its answer is not OpenAI's."""

    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Pooling | None = None
    user: str | None = None
    keep_alive: float | str | None = None


async def embeddings(request: Request) -> Response:
    """Where texts stand among others."""
    service = services.of(request)
    body = await service.body(request, EmbeddingRequest)
    texts = prompts_of("input", body.input)
    if body.pooling == "none" and request.url.path.startswith("/v1/"):
        raise ApiError(400, 'pooling: "none" gives a vector for each token: ask /embeddings.', param="pooling")
    async with AsyncExitStack() as stack:
        loaded = await service.enter(
            stack, request, body.model, answers=places(texts), user=body.user, keep_alive=body.keep_alive
        )
        vectors, count = await embed(request, loaded.model, texts, body.pooling, body.dimensions, body.user)
        data = [
            {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
            for i, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        name = service.registry.find(body.model).spec.name
        return answer({"object": "list", "model": name, "data": data, "usage": usage})


def places(texts: Sequence[object]) -> int:
    """How many places a request with these texts takes. Raises: ApiError 400 for too many."""
    if len(texts) > MOST:
        raise ApiError(400, f"input: has more than {MOST} texts.", param="input")
    return min(len(texts), MAX_CHOICES)


async def embed(
    request: Request,
    model: Model,
    texts: list[str | list[int]],
    pooling: Pooling | None = None,
    dimensions: int | None = None,
    user: str | None = None,
) -> tuple[list[NDArray[Any]], int]:
    """What `Model.embed` gives for each text, and how many tokens all have.

    dimensions:  that the request wants; None: those there are

    Raises: as it does; ApiError 400 for other dimensions; ClientLeft when nobody waits for it any more.
    """
    service = services.of(request)
    found, count = await until_left(
        request.receive, _embed(service, model, texts, pooling, services.owner(request, user))
    )
    if dimensions not in (None, found[0].shape[-1]):
        raise ApiError(400, f"dimensions: this model has {found[0].shape[-1]}.", param="dimensions")
    return found, count


async def _embed(
    service: services.Service, model: Model, texts: list[str | list[int]], pooling: Pooling | None, user: str
) -> tuple[list[NDArray[Any]], int]:
    ids = await ids_of(texts, model.tokenizer.encode_whole, model.n_ctx)
    reading = partial(model.embed, pooling=pooling, user=user)
    if pooling == "none":
        vectors = [await in_thread(reading, tokens) for tokens in ids]
    else:
        vectors = list(await in_thread(reading, ids))
    count = sum(map(len, ids))
    service.metrics.prompt_tokens.inc(count)
    return vectors, count


def _encoded(vector: NDArray[Any], form: str | None) -> list[Any] | str:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    found: list[Any] = vector.tolist()
    return found
