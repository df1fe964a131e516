"""Another server with OpenAI's API that takes what this one cannot: too long, too many, too late."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from starlette.responses import Response

from edgert.errors import ContextFullError, DoesNotFitError, EdgertError, QueueFullError, QueueTimeoutError
from edgert.server.errors import ApiError, BusyError
from edgert.server.sse import EventStream

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger(__name__)

MARK = "X-Edgert-Served-By"
BLOCK = 1 << 16


@dataclass(frozen=True)
class Upstream:
    """Where it is.

    url:      its base, such as https://host/v1
    model:    the name that it knows; "": the one that the request names
    timeout:  seconds that it may be silent

    Raises: EdgertError for a url that is none of a server.
    """

    url: str
    key: str = field(default="", repr=False)
    model: str = ""
    timeout: float = 120.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is no number
            sound = False
        if not sound:
            raise EdgertError(f"upstream: must be such as https://host/v1, not {self.url!r}.")

    @staticmethod
    def takes(error: BaseException) -> bool:
        """Whether an error is one that a larger or idler server may not have."""
        too_long = isinstance(error, ApiError) and error.code == "context_length_exceeded"
        kinds = (BusyError, ContextFullError, DoesNotFitError, QueueFullError, QueueTimeoutError)
        return too_long or isinstance(error, kinds)

    async def forward(self, path: str, body: bytes, why: BaseException) -> ASGIApp:
        """Its answer to a request, marked as such; `why` is what happened here.

        Raises: `why` when it cannot be reached; ApiError of its status when it refuses.
        """
        fields = json.loads(body)
        if self.model:
            fields["model"] = self.model
        if any(fields.get(name) is not None for name in _BINDING):
            raise why
        for name in (*_OURS, *_OURS_IN_SAMPLING):
            fields.pop(name, None)
        try:
            answer = await asyncio.to_thread(self._send, path, json.dumps(fields).encode())
        except (OSError, http.client.HTTPException) as error:
            logger.warning("the upstream server cannot be reached: %s", error)
            raise why from None
        if answer.status != 200:
            data = await asyncio.to_thread(answer.read, BLOCK)
            logger.warning("the upstream server answered %d", answer.status)
            if answer.status >= 500 or answer.status in (401, 403, 404, 429):
                raise why
            raise ApiError(answer.status, _message(data), kind="upstream_error", code="upstream_refused")
        if "text/event-stream" in (answer.getheader("content-type") or ""):
            return EventStream(_copied(answer), done=_closing(answer), headers={MARK: "upstream"})
        data = await asyncio.to_thread(answer.read)
        answer.close()
        try:
            whole = {**json.loads(data), "served_by": "upstream"}
        except (ValueError, TypeError):
            raise ApiError(502, "The upstream server's answer is not JSON.", kind="upstream_error") from None
        return Response(msgspec.json.encode(whole), 200, {MARK: "upstream"}, "application/json")

    def _send(self, path: str, body: bytes) -> http.client.HTTPResponse:
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=self.timeout, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self.timeout)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        connection.request("POST", parts.path.rstrip("/") + path, body, headers)
        return connection.getresponse()


# Fields that a strict server of OpenAI's API would refuse.
_OURS = ("cache_prompt", "return_progress", "timings_per_token", "keep_alive", "ignore_eos")
_OURS_IN_SAMPLING = ("top_k", "min_p", "repeat_penalty", "repeat_last_n", "chat_template_kwargs")
_BINDING = ("grammar", "json_schema", "regex")  # fields without which an answer would not be what was asked for


async def _copied(answer: http.client.HTTPResponse) -> AsyncGenerator[bytes, None]:
    while data := await asyncio.to_thread(answer.read1, BLOCK):
        yield data


def _closing(answer: http.client.HTTPResponse) -> Any:
    async def close() -> None:
        answer.close()

    return close


def _message(data: bytes) -> str:
    """What an error says, as far as it is OpenAI's."""
    try:
        message: str = json.loads(data)["error"]["message"]
        return f"The upstream server refused: {message}"[:500]
    except (ValueError, KeyError, TypeError):
        return "The upstream server refused."


async def first_of(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same parts, the first of which is there already. Raises: what comes in its place."""
    first = await anext(parts)

    async def all_() -> AsyncGenerator[bytes, None]:
        async with aclosing(parts):
            yield first
            async for part in parts:
                yield part

    return all_()
