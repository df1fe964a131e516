"""What all routes share: models, places, measures, and how a request gets hold of them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet

from starlette.requests import Request

from edgert.server.admission import Admission
from edgert.server.body import T, parse, read
from edgert.server.choice import Choice
from edgert.server.errors import EndsError
from edgert.server.metrics import Metrics
from edgert.server.results import Results
from edgert.server.sse import until_left
from edgert.server.upstream import Upstream

if TYPE_CHECKING:
    from edgert.server.answers import Answers
    from edgert.server.registry import Loaded, Registry


@dataclass(frozen=True)
class Settings:
    """What a server was told at its start.

    api_keys:       any of them opens it; none: it is open
    hosts:          names of this machine that requests may use, besides localhost and addresses
    origins:        web origins whose pages may use it, besides its own; "*": all
    max_body:       bytes
    timeout:        seconds that one answer may take; 0: without end
    queue_timeout:  seconds that a request may wait for its turn; 0: without end
    max_tokens:     of answers whose request gives no limit; None: until the model ends
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_body: int = 16 << 20
    timeout: float = 0.0
    queue_timeout: float = 0.0
    max_tokens: int | None = None

    def opened_by(self, key: str) -> bool:
        """Whether a key is one of them; the time that it takes tells nothing about them."""
        given = key.encode("utf-8", "replace")
        equal = [hmac.compare_digest(given, known.encode()) for known in self.api_keys]
        return any(equal)


@dataclass
class Service:
    """One server's state; routes find it at `request.app.state.service`."""

    registry: Registry
    admission: Admission
    settings: Settings
    metrics: Metrics
    upstream: Upstream | None = None
    results: Results = field(default_factory=lambda: Results(0))
    choices: Mapping[str, Choice] = field(default_factory=dict)
    answers: WeakSet[Answers] = field(default_factory=WeakSet)  # those in work

    def farewell(self) -> None:
        """Ends all answers in work with an error that says why."""
        for answers in list(self.answers):
            answers.end(EndsError())

    async def body(self, request: Request, kind: type[T]) -> T:
        """The request's body. Raises: ApiError 400 that names the field, or 413."""
        return parse(await read(request, self.settings.max_body), kind)

    async def enter(
        self,
        stack: AsyncExitStack,
        request: Request,
        model: str | None,
        *,
        answers: int = 1,
        user: str | None = None,
        keep_alive: object = None,
    ) -> Loaded:
        """A place and a model until the stack is closed. Raises: BusyError; ApiError 404; EdgertError."""
        self.registry.find(model)
        stack.enter_context(self.admission.enter(owner(request, user), answers))
        entering = stack.enter_async_context(self.registry.use(model, keep_alive))
        return await entering if self.registry.ready(model) else await until_left(request.receive, entering)


def key_of(request: Request) -> str:
    """The key that a request brings, "" for none."""
    given = request.headers.get("authorization", "")
    scheme, _, key = given.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def owner(request: Request, user: str | None) -> str:
    """Who a request belongs to: its key and its `user` field, not readable any more."""
    return hashlib.sha256(f"{key_of(request)}\0{user or ''}".encode("utf-8", "replace")).hexdigest()[:16]


def of(request: Request) -> Service:
    """The service of a request's app."""
    service: Service = request.app.state.service
    return service
