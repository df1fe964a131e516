"""Tools by the official client: declared, forced, streamed, answered, refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake import FakeTokenizer, fake_model, says
from harness import Server, serving_model
from test_speculation import Chancy

from edgert.model import Model
from edgert.options import SamplingParams
from edgert.server.tools import style_of
from edgert.template import ChatTemplate

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["place", "days"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ANSWER = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo", "days": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def random() -> Iterator[Server]:
    """A model that says anything."""
    wild = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    with serving_model(Model(Chancy(n_ctx=4096), FakeTokenizer(), object(), wild)) as running:  # type: ignore[arg-type]
        yield running


def calls_of(reply: Any) -> list[tuple[str, Any]]:
    calls = reply["choices"][0]["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_demanded_is_made(random: Server, choice: Any) -> None:
    for seed in range(6):
        reply = random.ok(CHAT, messages=HI, tools=[WEATHER, NOW], tool_choice=choice, seed=seed, max_tokens=400)
        calls = calls_of(reply)
        assert reply["choices"][0]["finish_reason"] == ("tool_calls" if calls else "length")
        if reply["choices"][0]["finish_reason"] == "tool_calls":
            assert reply["choices"][0]["message"]["content"] is None
            for name, arguments in calls:
                assert name in ("weather", "now")
                if name == "weather":
                    assert arguments["place"] in ("Rome", "Oslo")
                    assert 1 <= arguments["days"] <= 9
            if choice != "required":
                assert [name for name, _ in calls] == ["weather"]


def test_one_call_only(random: Server) -> None:
    for seed in range(4):
        reply = random.ok(
            CHAT, messages=HI, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, seed=seed
        )
        assert len(calls_of(reply)) == 1


def test_a_short_limit_is_told(random: Server) -> None:
    reply = random.ok(CHAT, messages=HI, tools=[WEATHER], tool_choice="required", max_tokens=20)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert not calls_of(reply)
    assert reply["choices"][0]["message"]["content"]


def test_a_stream_of_calls(random: Server) -> None:
    client = openai.OpenAI(base_url=f"{random.url}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model="fake",
        messages=HI,
        tools=[WEATHER],
        stream=True,
        seed=3,  # type: ignore[call-overload]
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    name, arguments, reason, ids = "", "", "", set()
    for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.index == 0
            ids.add(call.id)
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    assert (name, reason) == ("weather", "tool_calls")
    assert set(json.loads(arguments)) == {"place", "days"}
    assert len(ids - {None}) == 1


def test_a_free_choice_that_calls() -> None:
    with serving_model(fake_model(says(ANSWER, after="\x1d"), n_ctx=4096), end="\x1d") as server:
        messages = [{"role": "system", "content": "x"}, *HI]
        reply = server.ok(CHAT, messages=messages, tools=[WEATHER, NOW])
        assert calls_of(reply) == [("weather", {"place": "Oslo", "days": 3})]
        assert reply["choices"][0]["message"]["content"] == "Let me see."
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        none = server.ok(CHAT, messages=messages, tools=[WEATHER], tool_choice="none")
        assert not calls_of(none)
        assert none["choices"][0]["message"]["content"] == ANSWER
        assert none["choices"][0]["finish_reason"] == "stop"


def test_a_free_choice_that_does_not(server: Server) -> None:
    reply = server.ok(CHAT, messages=HI, tools=[WEATHER])
    assert not calls_of(reply)
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert "tool_calls" not in reply["choices"][0]["message"]


def test_calls_and_results_come_back(server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}}
    messages = [
        *HI,
        {"role": "assistant", "tool_calls": [call]},  # without content
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "warm"}]},
    ]
    for tools in (None, [WEATHER]):
        assert server.ok(CHAT, messages=messages, tools=tools)["choices"][0]["message"]["content"]
    prompt = server.ok("/apply-template", messages=messages)["prompt"]
    assert "assistant: " in prompt


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tools": [{"type": "code"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces!"}}]}, "tools[0].function.name"),
        (
            {"tools": [NOW, {"type": "function", "function": {"name": "x", "parameters": 5}}]},
            "tools[1].function.parameters",
        ),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [NOW] * 129}, "tools"),
        ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": "required", "regex": "a"}, "tool_choice"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "strong"}}}]},
            "tools",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "x", "strict": True, "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    assert server.fails(CHAT, messages=HI, **fields)["param"] == param


@pytest.mark.parametrize(
    "source, told, bare, arguments",
    [
        ("{{ messages }}", False, False, "arguments"),
        ("{% for t in tools %}{{ t }}{% endfor %}<tool_call>", True, False, "arguments"),
        ("{{ tools }} [TOOL_CALLS]", True, True, "arguments"),
        ("{{ tools }} <|python_tag|>", True, True, "parameters"),
    ],
)
def test_styles(source: str, told: bool, bare: bool, arguments: str) -> None:
    style = style_of(ChatTemplate(source))
    assert (style.told, style.bare, style.arguments) == (told, bare, arguments)


def test_thoughts_have_a_field_of_their_own() -> None:
    with serving_model(fake_model(says("<think>\nhm\n</think>\n\nFour.", after="\x1d")), end="\x1d") as server:
        message = server.ok(CHAT, messages=HI)["choices"][0]["message"]
        assert message["reasoning_content"] == "hm"
        assert message["content"] == "Four."
        deltas = [event["choices"][0]["delta"] for event in server.events(CHAT, messages=HI)]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
        assert "".join(delta.get("content", "") for delta in deltas) == "Four."
