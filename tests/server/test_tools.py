"""Tools by the official client: declared, forced, streamed, answered, refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fake import BOS, FakeTokenizer, fake_model, says
from harness import FakeTemplate, Server, serving_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_speculation import Chancy

from edgert.errors import RequestError
from edgert.model import Model
from edgert.options import SamplingParams
from edgert.server import tools
from edgert.server.calls import calls_in
from edgert.server.tools import Toolbox, style_of
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
    for given_tools in (None, [WEATHER]):
        assert server.ok(CHAT, messages=messages, tools=given_tools)["choices"][0]["message"]["content"]
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


CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "flags": {}}}
GIVEN = {"city": "Zürich", "days": 2, "flags": {"a": [1, True, None]}}
JSON = json.dumps(GIVEN)


@pytest.mark.parametrize(
    "text",
    [
        f'{{"name": "weather", "arguments": {JSON}}}',
        f'[{{"name": "weather", "arguments": {JSON}, "id": "abc"}}]',
        f'[{{"tool_call_id": "0", "tool_name": "weather", "parameters": {JSON}}}]',
        f'[{{"weather": {JSON}}}]',
        f"weather[CALL_ID]abc[ARGS]{JSON}",
        f"weather[ARGS]{JSON}",
        f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>",
        f"<function=weather>{JSON}</function>",
        "\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        '<parameter=flags>\n{"a": [1, true, null]}\n</parameter>\n</function>\n',
        "<function=weather><parameter=city>Zürich</parameter><parameter=days>2</parameter>"
        "<parameter=flags>{'a': [1, True, None]}</parameter></function>",
        '<invoke name="weather">\n<parameter name="city">Zürich</parameter>\n<parameter name="days">2</parameter>\n'
        '<parameter name="flags">{"a": [1, true, null]}</parameter>\n</invoke>',
        "weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n"
        '<arg_value>2</arg_value>\n<arg_key>flags</arg_key><arg_value>{"a": [1, true, null]}</arg_value>\n',
        "[weather(city='Zürich', days=2, flags={\"a\": [1, true, null]})]",
        'call:weather{city:<|"|>Zürich<|"|>,days:2,flags:{a:[1,true,None]}}',
    ],
)
def test_calls_as_families_write_them(text: str) -> None:
    assert calls_in(text, {"weather": CITY, "now": {}}) == [("weather", GIVEN)]
    assert calls_in(text, {"now": {}}) == []  # there is no such tool
    for end in range(len(text)):  # a limit ends it anywhere
        for name, arguments in calls_in(text[:end], {"weather": CITY}):
            assert name == "weather"
            assert all(key in GIVEN for key in arguments)


@pytest.mark.parametrize(
    "text, calls",
    [
        ("[weather(city='a'), now()]", [("weather", {"city": "a"}), ("now", {})]),
        ("<function=now>\n</function>", [("now", {})]),
        (
            "<function=weather><parameter=city>a</parameter></function>\n<function=now></function>",
            [("weather", {"city": "a"}), ("now", {})],
        ),
        ("weather[ARGS]{}now[ARGS]{}", [("weather", {}), ("now", {})]),
        ("<function=weather><parameter=city>12</parameter></function>", [("weather", {"city": "12"})]),  # a text
        ("<function=weather><parameter=flags>12</parameter></function>", [("weather", {"flags": 12})]),
        ("<function=weather><parameter=days>two</parameter></function>", [("weather", {"days": "two"})]),
        ("<function=weather><parameter=city>\n a\nb \n</parameter></function>", [("weather", {"city": " a\nb "})]),
        ('call:weather{city:<|"|>a "b", {c:1}<|"|>}', [("weather", {"city": 'a "b", {c:1}'})]),
        ("<function=weather><city>a</city></function>", []),
        ("<function=weather><parameter=city>a", []),
        ("[weather(city=open('x'))]", []),
        ("[weather('a')]", []),
        ("[weather(**{})]", []),
        ("[weather(city={1})]", []),
        ("[weather(days=1e999)]", []),
        ("weather", []),
        ("I call weather {now}", []),
        ("", []),
        ("(" * 100_000, []),
        ("[" * 100_000, []),
        ("-" * 100_000 + "1", []),
    ],
)
def test_calls_and_what_is_none(text: str, calls: Any) -> None:
    assert calls_in(text, {"weather": CITY, "now": {}}) == calls


@settings(max_examples=300)
@given(text=st.text("<>=/{}[]():|'\"`\\ \nweathrn1,._", max_size=80))
def test_no_text_ends_the_reader(text: str) -> None:
    for name, arguments in calls_in(text, {"weather": CITY, "now": {}}):
        assert name in ("weather", "now")
        assert json.loads(json.dumps(arguments, allow_nan=False)) == arguments


NOT_READ = ("command-r-plus", "GigaChat3-10B", "Kimi-K3", "DeepSeek-V", "functionary", "muse", "gpt-oss", "MiniCPM5")
NOT_READ += ("Hy3", "Solar", "MiniMax-M3")  # whose forms no mark shows, or which no family here writes


def test_templates_write_calls_that_are_read(llama_cpp_source: Path) -> None:
    """Every template that shows its model tools writes a call, which is read again, in pieces too."""
    known = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    asked = {"role": "user", "content": "Weather?"}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": JSON}}
    read = 0
    for path in sorted((llama_cpp_source / "models" / "templates").glob("*.jinja")):
        template = ChatTemplate(path.read_text("utf-8"), bos="<s>", eos="</s>")
        style = style_of(template)
        messages = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            before = "".join(template.render(messages[:1], tools=known))
            text = "".join(template.render(messages, tools=known, add_generation_prompt=False))
        except RequestError:  # it needs more than OpenAI's requests tell
            continue
        if not style.told or "Zürich" not in text or any(name in path.name for name in NOT_READ):
            continue
        begin = text.find(style.marks[0], len(before) - 40)
        text = text[begin:] if begin >= 0 else text.removeprefix(before)
        text = re.sub(r"(<\|[\w_]*(eot|eom|end|message_sep|tool_response)[\w_]*\|>|</s>|<eos>)\s*$", "", text)
        for pieces in ([text], list(text)):
            parser = Toolbox(known, "auto", True).parser(style)
            deltas = [delta for piece in pieces for delta in parser.push(piece)]
            tail, reason = parser.end("stop")
            calls = [call["function"] for delta in deltas + tail for call in delta.get("tool_calls", ())]
            assert [call.get("name") for call in calls] == ["weather", None], (path.name, text, calls)
            assert json.loads(calls[1]["arguments"]) == GIVEN, path.name
            assert reason == "tool_calls"
        read += 1
    assert read > 35, read


def test_marks_that_are_control_tokens_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "MARKS", (("<s>", "<end>", ()), *tools.MARKS))
    call = b'[weather(place="Oslo", days=3)]'
    rule = says([*b"Wait.", BOS, *call], after="\x1d")
    with serving_model(fake_model(rule, n_ctx=4096)) as server:
        server.model().template = FakeTemplate("{{ tools }}<s>{% for m in messages %}{{ m.content }}\x1d{% endfor %}")
        message = server.ok(CHAT, messages=HI, tools=[WEATHER])["choices"][0]
        assert message["finish_reason"] == "tool_calls"
        assert message["message"]["content"] == "Wait."
        assert calls_of({"choices": [message]}) == [("weather", {"place": "Oslo", "days": 3})]
        plain = server.ok(CHAT, messages=HI)["choices"][0]
        assert plain["message"]["content"] == f"Wait.{call.decode()}"


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
