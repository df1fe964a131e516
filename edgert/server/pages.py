"""The page at /: files of this package, and nothing else."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from edgert.server.errors import ApiError

_KINDS = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def _content(name: str) -> bytes:
    return (files("edgert.server") / "page" / name).read_bytes()


async def page(request: Request) -> Response:
    """GET / and GET /page/NAME."""
    name = request.path_params.get("name", "index.html")
    if name not in _KINDS:
        raise ApiError(404, "There is no such page.", kind="not_found_error")
    return Response(_content(name), media_type=_KINDS[name], headers=_HEADERS)


async def icon(request: Request) -> Response:
    """GET /favicon.ico."""
    return Response(_content("icon.svg"), media_type="image/svg+xml")
