"""Bytes from outside to typed requests; what is wrong is said with the name of its field."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from starlette.requests import ClientDisconnect, Request

from edgert.errors import shown
from edgert.server.errors import ApiError
from edgert.server.typed import T, convert

PATIENCE = 60.0  # seconds for a body to come
DRAINED = 64 << 20  # bytes beyond the limit that are read and forgotten, so that the client gets to read why
MOST_PARTS = 1_000_000  # lists and objects; millions more would hold up everybody for seconds while they are read


async def read(request: Request, limit: int) -> bytes:
    """The whole body. Raises: ApiError 413 for more than `limit` bytes, 408 for one that does not come."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(PATIENCE):
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    parts.append(part)
                elif size > limit + DRAINED:
                    break  # the connection is closed under the client's hands
    except ClientDisconnect:
        raise ApiError(400, "The client left before its request was whole.") from None
    except TimeoutError:
        raise ApiError(408, f"The request was not whole after {PATIENCE:.0f} seconds.") from None
    if size > limit:
        raise ApiError(
            413, f"The body has more than the {limit} bytes that this server takes.", code="request_too_large"
        )
    return b"".join(parts)


def parse(body: bytes, kind: type[T]) -> T:
    """A body as a request. Raises: RequestError that names the field; ApiError 400 that says what is no JSON."""
    value = decode(body)
    if not isinstance(value, dict):
        raise ApiError(400, f"The body must be a JSON object, not {shown(value)}.")
    try:
        return convert(value, kind)
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.") from None


def decode(body: bytes) -> Any:
    """A JSON value: UTF-8, no key twice, no number that is none. Raises: ApiError 400."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not UTF-8 (byte {error.start}).") from None
    if len(body) > MOST_PARTS and body.count(b"[") + body.count(b"{") > MOST_PARTS:
        raise ApiError(400, f"The body has more than {MOST_PARTS} lists and objects.")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_NotANumberError.raise_)
    except _NotANumberError as error:
        raise _not_finite(text, error.name) from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.") from None
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}.") from None
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ApiError(400, "The body has half of a surrogate pair, which is no character.") from None
    return value


class _NotANumberError(ValueError):
    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(name)

    @classmethod
    def raise_(cls, name: str) -> None:
        raise cls(name)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ApiError(400, f"{twice}: stands in an object twice.", param=twice)
    return found


def _not_finite(text: str, name: str) -> ApiError:
    """The error for NaN and its like, which JSON does not have: it names the field that has it."""
    field = re.search(rf'"(\w+)"\s*:\s*{re.escape(name)}', text)
    param = field[1] if field else None
    return ApiError(400, f"{f'{param}: ' if param else ''}{name} is not a number in JSON.", param=param)
