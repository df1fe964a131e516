"""Which model a name stands for that is a choice between two."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from edgert.errors import ContextFullError
from edgert.server import service as services
from edgert.server.sse import until_left

if TYPE_CHECKING:
    from edgert.model import Model

Prepare = Callable[["Model"], Awaitable[tuple[Sequence[Sequence[int]], Mapping[str, Any]]]]


async def chosen(request: Request, name: str | None, user: str | None, prepare: Prepare) -> str | None:
    """The model that a request's name stands for: itself, or the one of a choice that shall answer.

    prepare:  gives the request's prompts and parameters as a model takes them

    Raises: as `Service.enter` and `prepare`.
    """
    service = services.of(request)
    choice = service.choices.get(name or "")
    if not choice:
        return name
    settings = service.settings
    limits = {"timeout": settings.timeout or None, "queue_timeout": settings.queue_timeout or None}
    async with AsyncExitStack() as stack:
        model = (await service.enter(stack, request, choice.small, user=user)).model
        with suppress(ContextFullError):  # which the large one's may be long enough for
            prompts, params = await prepare(model)
            asking = choice.takes_small(model, prompts, params, services.owner(request, user), **limits)
            if await until_left(request.receive, asking):
                return choice.small
    return choice.large
