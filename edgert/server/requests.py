"""OpenAI's requests as types. Unknown fields are taken and ignored; ranges are checked by `edgert.options`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from edgert.errors import ContextFullError, RequestError
from edgert.server.errors import ApiError
from edgert.tokenizer.limit import at_most

MAX_CHOICES = 128  # answers that one request may ask for


class StreamOptions(msgspec.Struct):
    """What a stream tells besides its text."""

    include_usage: bool | None = None


class Generating(msgspec.Struct, kw_only=True):
    """What chat and plain completion have in common; names that OpenAI lacks are llama.cpp's."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float | bool] | list[tuple[int, float | bool]] | None = None
    user: str | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    keep_alive: float | str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    regex: str | None = None
    response_format: dict[str, Any] | None = None

    @property
    def choices(self) -> int:
        """How many answers to one prompt. Raises: RequestError."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_CHOICES:
            raise RequestError.wrong("n", f"an integer from 1 to {MAX_CHOICES}", n)
        return n

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def params(self) -> dict[str, Any]:
        """The fields of SamplingParams and Options that were given."""
        given = {name: value for name in _PARAMS if (value := getattr(self, name)) is not None}
        if isinstance(given.get("logit_bias"), list):
            given["logit_bias"] = dict(given["logit_bias"])
        return given


_PARAMS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "stop",
    "seed",
    "logit_bias",
    "ignore_eos",
    "cache_prompt",
    "grammar",
    "json_schema",
    "regex",
    "response_format",
)


class ChatRequest(Generating, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def continued(self) -> bool:
        """Whether the answer goes on from the last message, which is the model's. Raises: ApiError 400."""
        if not self.continue_final_message:
            return False
        if self.add_generation_prompt:
            field = "continue_final_message"
            raise ApiError(400, f"{field}: cannot be had together with add_generation_prompt.", param=field)
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
            raise ApiError(400, "messages: the last must be the assistant's text to be continued.", param="messages")
        return True

    def params(self) -> dict[str, Any]:
        given = super().params()
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true.", param="top_logprobs")
        if self.logprobs:
            given |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return given

    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template gets besides messages and tools."""
        given = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            given.setdefault("reasoning_effort", self.reasoning_effort)
            given.setdefault("enable_thinking", self.reasoning_effort != "none")
        return given


Prompt = str | list[str | int | list[int]]


class CompletionRequest(Generating, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def params(self) -> dict[str, Any]:
        given = super().params()
        if self.logprobs is not None:
            given |= {"logprobs": True, "top_logprobs": self.logprobs}
        if self.suffix:
            raise ApiError(400, "suffix: is not supported.", param="suffix")
        if self.best_of not in (None, self.choices):
            raise RequestError.wrong("best_of", f"{self.choices}, the same as n", self.best_of)
        return given

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, a text or token ids. Raises: ApiError 400, RequestError."""
        return prompts_of("prompt", self.prompt)


def prompts_of(field: str, value: Prompt) -> list[str | list[int]]:
    """The texts or token ids that a field holds. Raises: ApiError 400 or RequestError naming it."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise ApiError(400, f"{field}: is an empty list.", param=field)
    if all(isinstance(part, int) for part in value):
        return [value]  # type: ignore[list-item]
    if any(isinstance(part, int) or part == [] for part in value):
        raise RequestError.wrong(field, "texts, or token ids, or lists of token ids", value)
    return value  # type: ignore[return-value]


async def ids_of(prompts: Sequence[str | list[int]], encode: Callable[[str], list[int]], n_ctx: int) -> list[list[int]]:
    """The token ids of prompts. Raises: ContextFullError for one that is longer than the context."""
    found = []
    with at_most(n_ctx):
        for prompt in prompts:
            if isinstance(prompt, str):
                found.append(await asyncio.to_thread(encode, prompt))
            elif len(prompt) > n_ctx:  # millions of ids would take seconds to be looked at
                raise ContextFullError(len(prompt), n_ctx)
            else:
                found.append(prompt)
    return found
