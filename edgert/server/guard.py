"""What stands before every route: which names of this machine, which web pages and which keys are let in."""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections.abc import MutableMapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgert.server import errors
from edgert.server.errors import ApiError
from edgert.server.service import Service, key_of

logger = logging.getLogger(__name__)

PUBLIC = ("/health", "/v1/health", "/", "/favicon.ico")  # and what lies in /page/; they tell nothing about anyone
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::\d{1,5})?")
_PROMPTS = dict.fromkeys(("chat/completions", "input_tokens", "apply-template"), "messages") | {"embeddings": "input"}
_ALLOWED = "authorization, content-type, x-api-key"


class Guard:
    """Refuses requests by their host, origin and key, turns errors into answers, and counts both."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, began = Request(scope, receive), time.monotonic()
        headers: dict[str, str] = {}
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *_pairs(headers)]
            await send(message)

        try:
            headers |= self._check(request)
            if request.method == "OPTIONS" and "origin" in request.headers:
                await _preflight(scope, receive, sending)
                return
            await self._app(scope, receive, sending)
        except Exception as error:
            answer = errors.of(error, _prompt_field(request.url.path))
            if answer.status == 500:
                logger.exception("a request failed")
            if not status:
                await answer.response(plain=request.url.path.startswith("/api/"))(scope, receive, sending)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._service.metrics.requests.labels(route, str(status or 499)).inc()
            logger.debug("%s %s %d %.0f ms", request.method, route, status, 1e3 * (time.monotonic() - began))

    def _check(self, request: Request) -> dict[str, str]:
        """The headers that the answer gets. Raises: ApiError for what is not let in."""
        settings = self._service.settings
        headers = request.headers
        host = _host(headers)
        if not settings.api_keys and not _is_ours(host, settings.hosts):
            raise ApiError(
                403,
                f"This server is not known as {host[:100]!r}: use localhost or an address, "
                "or start it with --allowed-host.",
                kind="permission_error",
            )
        granted: dict[str, str] = {"X-Content-Type-Options": "nosniff"}
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in _own_origins(headers):
            if origin not in settings.origins and "*" not in settings.origins:
                raise ApiError(
                    403,
                    "Pages of other web sites may not use this server: start it with --cors-origin to let one.",
                    kind="permission_error",
                )
            granted |= {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        if settings.api_keys and not _is_public(request) and not settings.opened_by(key_of(request)):
            raise ApiError(
                401,
                "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'.",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return granted


def _is_public(request: Request) -> bool:
    path = request.url.path
    return path in PUBLIC or path.startswith("/page/") or request.method == "OPTIONS"


def _prompt_field(path: str) -> str:
    """Where requests to a route have their prompt."""
    return next((field for end, field in _PROMPTS.items() if path.endswith(end)), "prompt")


def _host(headers: Headers) -> str:
    """The host that a request names, without its port. Raises: ApiError 400 for none."""
    found = _HOST.fullmatch(headers.get("host", ""))
    if not found or len(headers.getlist("host")) != 1:
        raise ApiError(400, "The request must name its host once.")
    return found[1].lower()


def _is_ours(host: str, known: tuple[str, ...]) -> bool:
    """Whether a page of another site could not have taken this name: it is an address, localhost, or known."""
    if host in ("localhost", *known) or "*" in known:
        return True
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _own_origins(headers: Headers) -> tuple[str, ...]:
    host = headers.get("host", "").lower()
    return f"http://{host}", f"https://{host}"


def _pairs(headers: MutableMapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]


async def _preflight(scope: Scope, receive: Receive, send: Send) -> None:
    headers = {
        "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
        "access-control-allow-headers": _ALLOWED,
        "access-control-max-age": "600",
    }
    await send({"type": "http.response.start", "status": 204, "headers": _pairs(headers)})
    await send({"type": "http.response.body", "body": b""})
