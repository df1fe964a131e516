"""Server-sent events: one answer in pieces, pings while nothing is to say, an ear for the client's leaving."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from edgert.generation import Caller
from edgert.server import errors

logger = logging.getLogger(__name__)

PING_SECONDS = 5.0
STUCK_SECONDS = 60.0  # in which a client takes nothing of its answer, and is thought to have left
DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")

_WAITING = ThreadPoolExecutor(256, "edgert-waiting")
_encoder = msgspec.json.Encoder()


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def line(value: Any) -> bytes:
    """One line of JSON, which Ollama sends instead."""
    return _encoder.encode(value) + b"\n"


class EventStream:
    """An answer whose parts come from a generator; it is closed when the client leaves.

    failed:  what is sent when the generator raises
    ping:    what is sent after every PING_SECONDS
    done:    called at the end, however it came
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        *,
        failed: Callable[[BaseException], bytes] = lambda error: event(errors.of(error).body()),
        media_type: bytes = b"text/event-stream",
        ping: bytes = b": ping\n\n",
        done: Callable[[], Awaitable[None]],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._headers = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        self._parts, self._failed, self._media_type, self._ping, self._done = parts, failed, media_type, ping, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", self._media_type), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
        headers += self._headers
        since: float | None = None  # the client has not taken what was written then

        async def write(body: bytes, more: bool = True) -> None:
            nonlocal since
            since = time.monotonic()
            await send({"type": "http.response.body", "body": body, "more_body": more})
            since = None

        async def ping() -> None:
            if since is None:
                if self._ping:
                    await write(self._ping)
            elif time.monotonic() - since > STUCK_SECONDS:
                raise ClientLeft

        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await until_left(receive, self._copy(write), ping)
        except (ClientLeft, OSError):
            pass
        finally:
            await asyncio.shield(self._done())

    async def _copy(self, write: Callable[..., Awaitable[None]]) -> None:
        async with contextlib.aclosing(self._parts) as parts:
            try:
                async for part in parts:
                    await write(part)
            except Exception as error:
                if errors.of(error).status == 500:
                    logger.exception("an answer failed")
                await write(self._failed(error))
        await write(b"", False)


class ClientLeft(Exception):
    """The client closed the connection before its answer was whole."""


async def until_left(
    receive: Receive, work: Awaitable[Result], ping: Callable[[], Awaitable[None]] | None = None
) -> Result:
    """What `work` gives. It is cancelled when the client leaves: then ClientLeft is raised."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_watch(receive, ping))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for one in (task, watcher):
            if not one.done():
                one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def in_thread(call: Callable[..., Result], *arguments: Any) -> Result:
    """As `asyncio.to_thread`; what an engine does for it ends when nobody waits any more.

    The threads are others: those who wait for the engine must not keep texts from being cut into tokens.
    """
    caller = Caller()
    token = Caller.current.set(caller)
    try:
        work = partial(contextvars.copy_context().run, call, *arguments)
        return await asyncio.get_running_loop().run_in_executor(_WAITING, work)
    except asyncio.CancelledError:
        caller.leave()
        raise
    finally:
        Caller.current.reset(token)


async def _watch(receive: Receive, ping: Callable[[], Awaitable[None]] | None) -> None:
    """Returns when the client has left; pings it until then."""
    while True:
        try:
            message = await asyncio.wait_for(receive(), PING_SECONDS if ping else None)
        except TimeoutError:
            if ping:
                await ping()
            continue
        if message["type"] == "http.disconnect":
            return
