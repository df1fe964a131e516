"""Another server with OpenAI's API that takes what this one cannot: too long, too many, too late."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from starlette.responses import Response

from edgert.errors import ContextFullError, DoesNotFitError, EdgertError, QueueFullError, QueueTimeoutError
from edgert.server.errors import ApiError, BusyError, EndsError
from edgert.server.exchange import FAILURES, Exchange, events
from edgert.server.sse import EventStream, until_left

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive

logger = logging.getLogger(__name__)

MARK = "X-Edgert-Served-By"
MOST_BYTES = 256 << 20  # of an answer
MOST_OF_ERROR = 1 << 16


@dataclass
class Upstream:
    """Where it is.

    url:      its base, such as https://host/v1
    model:    the name that it knows; "": the one that the request names
    timeout:  seconds that it may be silent
    most:     requests that may be with it at once

    Raises: EdgertError for a url that is none of a server.
    """

    url: str
    key: str = field(default="", repr=False)
    model: str = ""
    timeout: float = 120.0
    most: int = 256
    inside: int = field(default=0, init=False)

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
        return (too_long or isinstance(error, kinds)) and not isinstance(error, EndsError)

    async def forward(self, path: str, body: bytes, why: BaseException, receive: Receive) -> ASGIApp:
        """Its answer to a request, marked as such; `why` is what happened here.

        Raises: `why` when it cannot be reached or has enough to do; ApiError of its status when it refuses; ClientLeft.
        """
        fields = json.loads(body)
        if self.model:
            fields["model"] = self.model
        if self.inside >= self.most or any(fields.get(name) is not None for name in _BINDING):
            raise why
        for name in (*_OURS, *_OURS_IN_SAMPLING):
            fields.pop(name, None)
        self.inside += 1
        try:
            answer = await until_left(receive, self._answer(path, json.dumps(fields).encode(), why))
        except BaseException:
            self.inside -= 1
            raise
        if isinstance(answer, Exchange):
            return EventStream(_copied(answer), done=self._ending(answer), headers={MARK: "upstream"})
        self.inside -= 1
        return Response(answer, 200, {MARK: "upstream"}, "application/json")

    async def _answer(self, path: str, body: bytes, why: BaseException) -> bytes | Exchange:
        """A whole answer, marked, or a stream that has begun. Raises: as `forward`."""
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        headers = {"Content-Type": "application/json", **key}
        exchange = None
        try:
            exchange = await Exchange.begin(self.url.rstrip("/") + path, headers, body, self.timeout)
            if exchange.status == 200 and "text/event-stream" in exchange.headers.get("content-type", ""):
                streamed, exchange = exchange, None
                return streamed
            data = await exchange.whole(MOST_BYTES if exchange.status == 200 else MOST_OF_ERROR)
            status = exchange.status
        except FAILURES as error:
            logger.warning("the upstream server cannot be reached: %s", error or type(error).__name__)
            raise why from None
        finally:
            if exchange:
                exchange.close()
        if status != 200:
            logger.warning("the upstream server answered %d", status)
            if not 400 <= status < 500 or status in (401, 403, 404, 408, 429):
                raise why
            raise ApiError(status, _message(data), kind="upstream_error", code="upstream_refused")
        try:
            return msgspec.json.encode({**json.loads(data), "served_by": "upstream"})
        except (ValueError, TypeError, RecursionError):
            raise ApiError(502, "The upstream server's answer is not JSON.", kind="upstream_error") from None

    def _ending(self, exchange: Exchange) -> Any:
        async def end() -> None:
            exchange.close()
            self.inside -= 1

        return end


# Fields that a strict server of OpenAI's API would refuse.
_OURS = ("cache_prompt", "return_progress", "timings_per_token", "keep_alive", "ignore_eos")
_OURS_IN_SAMPLING = ("top_k", "min_p", "repeat_penalty", "repeat_last_n", "chat_template_kwargs")
_BINDING = ("grammar", "json_schema", "regex")  # fields without which an answer would not be what was asked for


async def _copied(exchange: Exchange) -> AsyncGenerator[bytes, None]:
    try:
        async for part in events(exchange.parts()):
            yield part
    except FAILURES as error:
        logger.warning("the upstream server broke off: %s", error or type(error).__name__)
        raise ApiError(502, "The upstream server broke off its answer.", kind="upstream_error") from None


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
