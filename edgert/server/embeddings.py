"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from contextlib import AsyncExitStack
from typing import Any, Literal

import msgspec
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from edgert.model import Model, Pooling
from edgert.server import service as services
from edgert.server.errors import ApiError
from edgert.server.openai import answer
from edgert.server.requests import MAX_CHOICES, Prompt, prompts_of

MOST = 2048  # texts of one request


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Names are OpenAI's; `pooling` is ours."""

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
    if len(texts) > MOST:
        raise ApiError(400, f"input: has more than {MOST} texts.", param="input")
    async with AsyncExitStack() as stack:
        loaded = await service.enter(
            stack,
            request,
            body.model,
            answers=min(len(texts), MAX_CHOICES),
            user=body.user,
            keep_alive=body.keep_alive,
        )
        vectors, count = await embed(loaded.model, texts, body.pooling)
        if body.dimensions not in (None, len(vectors[0])):
            raise ApiError(400, f"dimensions: this model has {len(vectors[0])}.", param="dimensions")
        data = [
            {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
            for i, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        name = service.registry.find(body.model).spec.name
        return answer({"object": "list", "model": name, "data": data, "usage": usage})


async def embed(
    model: Model, texts: list[str | list[int]], pooling: Pooling | None = None
) -> tuple[list[NDArray[Any]], int]:
    """float32 (n_embd,) for each text, and how many tokens all have. Raises: as `Model.embed`."""
    encode = model.tokenizer.encode_whole
    ids = [await asyncio.to_thread(encode, text) if isinstance(text, str) else text for text in texts]
    vectors = [await asyncio.to_thread(model.embed, tokens, pooling) for tokens in ids]
    return vectors, sum(map(len, ids))


def _encoded(vector: NDArray[Any], form: str | None) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    found: list[float] = vector.tolist()
    return found
