"""A server from its settings to its end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from edgert.errors import DoesNotFitError, EdgertError
from edgert.server.admission import Admission
from edgert.server.app import create_app
from edgert.server.choice import Choice
from edgert.server.metrics import Metrics
from edgert.server.registry import FOREVER, Registry, Spec
from edgert.server.results import Results
from edgert.server.service import Service, Settings
from edgert.server.sse import STUCK_SECONDS
from edgert.server.upstream import Upstream

if TYPE_CHECKING:
    from edgert.model import Model

logger = logging.getLogger(__name__)

CONTEXTS = 4  # positions cached in all, as a multiple of one context, unless told otherwise
GRACE_SECONDS = 2.0  # that answers in work may still take when the server ends
FAREWELL_SECONDS = 5  # after which connections are cut


def loader(parallel: int, cache_tokens: int | None, **always: Any) -> Callable[..., Model]:
    """`edgert.load` for many requests at once.

    parallel:      answers made at once
    cache_tokens:  positions that all of them may have together; None: as many contexts as fit, up to CONTEXTS
    always:        further arguments of every model that its own do not name
    """

    def load(source: str | Path, **options: Any) -> Model:
        import edgert
        from edgert.cli.progress import ProgressLine, compiling

        options = {"n_parallel": parallel} | always | options
        with ProgressLine() as line:
            options["progress"] = compiling(line)
            if cache_tokens is not None or "n_cached" in options:
                options.setdefault("n_cached", cache_tokens)
                return edgert.load(source, **options)
            try:
                n_cached = min(CONTEXTS, parallel) * _context(source, options.get("n_ctx"))
                return edgert.load(source, n_cached=n_cached, **options)
            except DoesNotFitError:
                return edgert.load(source, **options)

    return load


def _context(source: str | Path, n_ctx: int | None) -> int:
    """The context that `edgert.load` will give a model."""
    from edgert import context, store
    from edgert.quantize.gguf_file import GGUFFile

    if n_ctx:
        return n_ctx
    with GGUFFile.open(store.resolve(source)) as file:
        return context.chosen(file, n_ctx)


def service_of(
    specs: Sequence[Spec],
    load: Callable[..., Model],
    settings: Settings | None = None,
    *,
    parallel: int = 8,
    queue: int = 256,
    models_max: int = 0,
    upstream: Upstream | None = None,
    result_cache: int = 0,
    choices: Mapping[str, Choice] | None = None,
) -> Service:
    """A service of its own. Raises: EdgertError for a choice among models that are not served."""
    settings = settings or Settings()
    registry = Registry(specs, load, models_max, settings.queue_timeout or FOREVER)
    for choice in (choices or {}).values():
        for name in (choice.small, choice.large):
            if name not in registry.places:
                raise EdgertError(f"choice.{choice.name}: {name} is none of the models that are served.")
    return Service(
        registry,
        Admission(parallel, queue),
        settings,
        Metrics(),
        upstream,
        Results(result_cache),
        choices or {},
    )


class _Server(uvicorn.Server):
    """Tells those who wait for a model when it goes down, and those whose answers are in work some time before it would
    cut them off."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:  # the second time nothing is waited for
            self.force_exit = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.registry.end()
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._service.farewell)
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()  # which uvicorn leaves out, and models are closed in


class Runner:
    """A server from its start to its end.

    ready:  called with the URL when it listens; the first model is loaded from then on

    Raises: EdgertError when the address cannot be listened on.
    """

    def __init__(
        self, service: Service, host: str, port: int, ready: Callable[[str], object] = lambda url: None
    ) -> None:
        self._service, self._ready = service, ready
        service.registry.default.state = "loading"
        self._listening = _bind(host, port)
        self.url = url(host, self._listening.getsockname()[1])
        config = uvicorn.Config(
            create_app(service),
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=FAREWELL_SECONDS,
            timeout_keep_alive=30,
        )
        self._server = _Server(config, service)

    def stop(self) -> None:
        """Ends it; may be called from any thread."""
        self._server.should_exit = True

    async def run(self) -> None:
        """Serves until it is told to stop. Raises: what kept the first model from being loaded."""
        with self._listening:
            serving = asyncio.ensure_future(self._server.serve([self._listening]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.01)
            self._ready(self.url)
            loading = asyncio.ensure_future(_load_first(self._service))
            await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
            failed = loading.done() and loading.exception() is not None and not self._server.should_exit
            if failed:
                self.stop()
            await serving
            if failed:
                loading.result()
            self._service.registry.end()  # as the server has done, if it came so far
            await asyncio.wait({loading})


async def _load_first(service: Service) -> None:
    place = service.registry.default
    async with service.registry.use(None) as loaded:
        logger.info("%s is ready: %s", place.spec.name, loaded.model.verdict)


def url(host: str, port: int) -> str:
    """Where a browser finds it."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"


def _bind(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises: EdgertError when the address is taken or is none of this machine."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(found[0], socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # closes connections on which nothing is taken, which uvicorn cannot
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2e3 * STUCK_SECONDS))
        listening.bind(found[4])
    except OSError as error:
        raise EdgertError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}; choose another --port."
        ) from error
    return listening
