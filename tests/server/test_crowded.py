"""More requests than a small context has room for, and the form of every kind of reply, by the official client."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake import FakeTemplate, FakeTokenizer
from harness import HI, Server, serving_model
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from paged_fake import PagedFake
from test_overload import told

from edgert.generation import Limits
from edgert.model import Model
from edgert.options import SamplingParams

CHAT = "/v1/chat/completions"


def crowded(n_ctx: int, n_cached: int, n_parallel: int) -> Model:
    backend = PagedFake(n_ctx=n_ctx, n_batch=32, n_seq_max=n_parallel, n_cached=n_cached)
    return Model(
        backend,
        FakeTokenizer(),  # type: ignore[arg-type]
        FakeTemplate(),  # type: ignore[arg-type]
        SamplingParams(temperature=0),
        limits=Limits(n_parallel=n_parallel),
    )


def test_four_requests_share_a_context_that_holds_one() -> None:
    """128 positions in all, four times 128 tokens: each waits or ends by length, and none says anything wrong."""
    with serving_model(crowded(128, 128, 4)) as server:

        def ask(i: int) -> tuple[str, int, str]:
            choice = server.ok("/v1/completions", prompt=[65 + i, 66], max_tokens=126, ignore_eos=True)["choices"][0]
            return choice["text"], i, choice["finish_reason"]

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, range(4)))
        for text, i, reason in answers:
            assert text == bytes(told([65 + i, 66], 126)).decode() and reason == "length"


def test_ten_endless_replies_in_two_hundred_positions_each_do_end() -> None:
    """The end token is banned, some prompts are longer than the context."""
    with serving_model(crowded(200, 800, 10)) as server:

        def ask(i: int) -> tuple[int, Any]:
            return server.post("/v1/completions", {"prompt": [70 + i % 10] * (10 + 23 * i), "ignore_eos": True})

        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(ask, range(20)))
        for i, (status, answer) in enumerate(answers):
            if 10 + 23 * i > 200:
                assert status == 400 and str(10 + 23 * i) in answer["error"]["message"]
                continue
            assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 200 - (10 + 23 * i) + 1
        assert not server.service.admission.inside


KINDS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 0},
    {"max_tokens": 1},
    {"n": 3},
    {"stop": "two"},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"temperature": 1.3, "seed": 5},
    {"json_schema": {"type": "object"}, "max_tokens": 60},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
]


@pytest.mark.parametrize("fields", KINDS)
@pytest.mark.parametrize("stream", [False, True])
def test_replies_are_what_the_official_client_says_they_are(
    server: Server, fields: dict[str, Any], stream: bool
) -> None:
    """Its types read them strictly: no field is missing, none is of another type."""
    if stream:
        for event in server.events(CHAT, messages=HI, **fields, stream_options={"include_usage": True}):
            ChatCompletionChunk.model_validate_json(json.dumps(event), strict=True)
    else:
        ChatCompletion.model_validate_json(json.dumps(server.ok(CHAT, messages=HI, **fields)), strict=True)
    if {"tools", "n"} & fields.keys():
        return
    for more in ({}, {"logprobs": 2, "echo": True}):
        plain = {name: value for name, value in fields.items() if "logprobs" not in name} | more
        replies = server.events("/v1/completions", prompt="x\n", **plain) if stream else []
        for reply in replies or [server.ok("/v1/completions", prompt="x\n", **plain)]:
            for choice in reply["choices"]:
                # OpenAI's own replies have null here, though its types do not say so.
                assert choice["finish_reason"] or stream
                choice["finish_reason"] = choice["finish_reason"] or "stop"
                if (scores := choice["logprobs"]) and choice["text"].startswith("x\n"):
                    assert scores["token_logprobs"].pop(0) is scores["top_logprobs"].pop(0) is None
            Completion.model_validate_json(json.dumps(reply), strict=True)
