"""What went wrong, in OpenAI's envelope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from edgert.errors import (
    BackendUnavailableError,
    ContextFullError,
    DoesNotFitError,
    EdgertError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
)


class ApiError(Exception):
    """An answer that is an error.

    kind:   OpenAI's `type`
    param:  the field of the request that is at fault
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers, self.facts = dict(headers or {}), facts

    def body(self) -> dict[str, Any]:
        """The envelope."""
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields | self.facts}

    def response(self, *, plain: bool = False) -> Response:
        """The envelope as an answer; plain: the message alone, as Ollama has it."""
        body = {"error": self.message} if plain else self.body()
        return Response(msgspec.json.encode(body), self.status, self.headers, "application/json")


class BusyError(ApiError):
    """There is no room for the request now."""

    def __init__(self, message: str, *, status: int = 503, retry_after: int = 1) -> None:
        code = "rate_limit_exceeded" if status == 429 else "server_busy"
        super().__init__(
            status, message, kind="overloaded_error", code=code, headers={"Retry-After": str(max(1, retry_after))}
        )


class EndsError(BusyError):
    """There is no time for the request any more; another server that it was sent to would not be waited for."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down: try again later.", retry_after=5)


def of(error: BaseException, prompt: str = "messages") -> ApiError:
    """The answer that an error becomes; what is nobody's fault outside says no more than its kind.

    prompt:  the request's field that holds the prompt
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextFullError):
        return ApiError(
            400,
            str(error),
            param=prompt,
            code="context_length_exceeded",
            n_prompt_tokens=error.n_tokens,
            n_ctx=error.n_ctx,
        )
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, QueueFullError | QueueTimeoutError):
        return BusyError(str(error), retry_after=int(error.retry_after) + 1)
    if isinstance(error, DoesNotFitError):
        return BusyError(str(error), retry_after=2)
    if isinstance(error, BackendUnavailableError):
        return ApiError(501, str(error), kind="server_error")
    if isinstance(error, EdgertError):
        return ApiError(500, str(error), kind="server_error")
    return ApiError(
        500, f"edgert met an error of its own ({type(error).__name__}): its log says more.", kind="server_error"
    )
