"""What is wrong with a request is said with the name of its field, and the server lives on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake import fake_model, says
from harness import Server, serving_model
from hypothesis import given, settings
from hypothesis import strategies as st

from edgert import options
from edgert.server.service import Settings

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def alive(server: Server) -> None:
    assert server.ok(CHAT, messages=HI, max_tokens=1)["choices"]


NUMBERS = ["temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"]
COUNTS = ["top_k", "max_tokens", "seed", "n", "repeat_last_n"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"0.7"', "true", "[1]", "{}"])
@pytest.mark.parametrize("field", NUMBERS)
def test_numbers(server: Server, field: str, value: str) -> None:
    body = f'{{"messages": {json.dumps(HI)}, "{field}": {value}}}'
    status, answer = server.post(CHAT, body.encode())
    assert status == 400
    assert answer["error"]["param"] == field


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repeat_penalty"])
def test_negative_numbers(server: Server, field: str) -> None:
    assert server.fails(CHAT, messages=HI, **{field: -1})["param"] == field


@pytest.mark.parametrize("value", ["NaN", "1.5", '"7"', "true", "1e30", str(10**40), "-7"])
@pytest.mark.parametrize("field", COUNTS)
def test_counts(server: Server, field: str, value: str) -> None:
    body = f'{{"messages": {json.dumps(HI)}, "{field}": {value}}}'
    status, answer = server.post(CHAT, body.encode())
    assert status == 400, answer
    assert answer["error"]["param"] == field


@pytest.mark.parametrize(
    "field, value",
    [
        ("stop", 5),
        ("stop", [5]),
        ("stop", [f"{i}" for i in range(257)]),
        ("stream", "yes"),
        ("logprobs", 3),
        ("logit_bias", "x"),
        ("logit_bias", {"a": 1}),
        ("tools", "x"),
        ("stream_options", 1),
        ("response_format", "json"),
        ("messages", "hello"),
        ("messages", []),
        ("messages", None),
        ("model", 7),
        ("user", 7),
        ("keep_alive", "soon"),
        ("reasoning_effort", "utmost"),
    ],
)
def test_types(server: Server, field: str, value: Any) -> None:
    assert server.fails(CHAT, **{"messages": HI, field: value})["param"].startswith(field)


def test_a_bias_is_read_once_for_all_answers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a whole vocabulary takes a tenth of a second, in which nobody else would get a word."""
    read: list[Any] = []
    usual = options._logit_bias

    def counted(value: Any) -> dict[int, float]:
        read.append(value)
        return usual(value)

    monkeypatch.setattr(options, "_logit_bias", counted)
    given = {str(token): -1 for token in range(200)}
    for path, prompt in ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": ["x", "y"]})):
        read.clear()
        assert len(server.ok(path, n=8, max_tokens=1, logit_bias=given, **prompt)["choices"]) >= 8
        assert len(read) == 1


@pytest.mark.parametrize(
    "message, field",
    [
        ({"role": "user"}, "content"),
        ({"role": "system", "content": None}, "content"),
        ({"role": "assistant", "tool_calls": "weather"}, "tool_calls"),
        ({"role": "assistant", "tool_calls": ["weather"]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}, "tool_calls[0].function.name"),
    ],
)
def test_messages_that_say_nothing(server: Server, message: dict[str, Any], field: str) -> None:
    for path in (CHAT, "/apply-template"):
        assert server.fails(path, messages=[*HI, message])["param"] == f"messages[1].{field}"


def test_messages_are_needed(server: Server) -> None:
    assert server.fails(CHAT, model="fake")["param"] == "messages"


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("top_k", 1.5, "top_k: must be an integer, not 1.5"),
        ("top_k", -1, "top_k: must be an integer from 0 to 2147483647, not -1"),
        ("temperature", "hot", "temperature: must be a number, not 'hot'"),
        ("temperature", "hot " * 99,
         "temperature: must be a number, not 'hot hot hot hot hot ho...ot hot hot hot hot hot '"),
        ("temperature", 700, "temperature: must be a number from 0 to 100, not 700.0"),
        ("n", 0, "n: must be an integer from 1 to 128, not 0"),
        ("stop", 5, "stop: must be a text or a list, not 5"),
        ("stop", ["a", 5], "stop[1]: must be a text, not 5"),
        ("stream_options", {"include_usage": 5}, "stream_options.include_usage: must be true or false, not 5"),
        ("logit_bias", {"5": 1, "7": "b"}, "logit_bias[7]: must be true, false or a number, not 'b'"),
        ("logit_bias", {"a b": 1}, "logit_bias: has the key 'a b', which is not a token id"),
        ("logit_bias", [[1, 2, 3]], "logit_bias[0]: must be a list of 2, not [1, 2, 3]"),
        ("reasoning_effort", "utmost", "reasoning_effort: must be one of none, minimal, low, medium, high, xhigh, max, "
                                       "not 'utmost'"),
        ("keep_alive", "soon", "keep_alive: must be seconds, or a text such as \"5m\", not 'soon'"),
        ("response_format", {"type": "xml"}, "response_format.type: must be text, json_object, json_schema, regex or "
                                             "grammar, not 'xml'"),
        ("tools", [{"type": "function", "function": 5}], "tools[0].function: must be an object, not 5"),
        ("tool_choice", "some", "tool_choice: must be none, auto, required or a function, not 'some'"),
        ("messages", [{"role": 5}], "messages[0].role: must be a text such as \"user\", not 5"),
        ("messages", [{"role": "user", "content": {"a": 1}}],
         "messages[0].content: must be a text or a list of parts, not {'a': 1}"),
    ],
)  # fmt: skip
def test_the_value_and_what_would_do_are_told(server: Server, field: str, value: Any, said: str) -> None:
    error = server.fails(CHAT, **{"messages": HI, field: value})
    assert error["message"] == said
    assert error["param"] == said.partition(": ")[0]


def test_an_ollama_option_too(server: Server) -> None:
    status, answer = server.post("/api/chat", {"messages": HI, "options": {"temperature": "hot"}})
    assert (status, answer) == (400, {"error": "options.temperature: must be a number from 0 to 100, not 'hot'"})
    status, answer = server.post("/api/chat", {"messages": HI, "format": "xml"})
    assert (status, answer) == (400, {"error": "format: must be json or a JSON schema, not 'xml'"})


def test_null_is_as_if_absent(server: Server) -> None:
    fields = [*NUMBERS, *COUNTS, "stop", "stream", "tools", "logit_bias", "response_format", "user", "stream_options"]
    assert server.ok(CHAT, messages=HI, **dict.fromkeys(fields))


def test_unknown_fields_are_taken(server: Server) -> None:
    assert server.ok(CHAT, messages=HI, store=True, metadata={"a": 1}, something_new=[1, 2])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b'"text"',
        b"{",
        '{"messages": [{"role": "user", "content": "你好"}]}'.encode("gbk"),
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "a\x00b"}]}',
        b'{"messages": [], "messages": []}',
        b'{"messages": [{"role": "user", "role": "user", "content": "x"}]}',
        b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"messages": ' + b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b'\xef\xbb\xbf{"messages": []}',
        b'{"temperature": 01, "messages": []}',
        b'{"max_tokens": 1' + b"0" * 5000 + b', "messages": []}',
        b'{"messages": [{"role": "user", "content": "x"}], "more": [' + b"[]," * 1_200_000 + b"[]]}",
    ],
    ids=range(18),
)
def test_bodies_that_are_no_requests(server: Server, body: bytes) -> None:
    status, answer = server.post(CHAT, body)
    assert status == 400
    assert answer["error"]["message"]
    alive(server)


def test_an_escaped_nul_is_text(server: Server) -> None:
    assert server.ok(CHAT, messages=[{"role": "user", "content": "a\x00b"}])


@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_any_bytes(server: Server, body: bytes) -> None:
    status, _, _ = server.raw("POST", CHAT, body)
    assert status == 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=150)
@given(
    field=st.sampled_from(
        [*NUMBERS, *COUNTS, "stop", "logit_bias", "tools", "tool_choice", "response_format", "messages", "prompt"]
        + ["stream_options", "grammar", "json_schema", "regex", "chat_template_kwargs", "reasoning_effort", "user"]
    ),
    value=json_values,
    path=st.sampled_from([CHAT, "/v1/completions", "/tokenize", "/detokenize", "/apply-template"]),
)
def test_any_value_of_any_field(server: Server, field: str, value: Any, path: str) -> None:
    body = {"messages": HI, "prompt": "x\n", "content": "x", "tokens": [5], "max_tokens": 2, "n": 1} | {field: value}
    status, _ = server.post(path, body)
    assert status in (200, 400)


@pytest.mark.parametrize("kind", ["thinking", "image_url", None])
def test_unknown_kinds_of_parts(server: Server, kind: Any) -> None:
    error = server.fails(CHAT, messages=[{"role": "user", "content": [{"type": kind, "text": "x"}]}])
    assert repr(kind) in error["message"]
    assert error["param"] == "messages[0].content[0]"
    error = server.fails(CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": kind and 5}]}])
    assert error["message"].startswith("messages[0].content[0]: must have a text")
    assert server.ok(CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}])


# Sizes


def test_bodies_of_all_sizes() -> None:
    with serving_model(fake_model(says("ok"), n_ctx=12_000), Settings(max_body=2_000_000)) as server:
        assert server.ok(CHAT, messages=[{"role": "user", "content": "x" * 9_000}])
        error = server.fails(CHAT, messages=[{"role": "user", "content": "x" * 1_100_000}])
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "messages"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (1_100_008, 12_000)
        assert "1100008 tokens, which exceeds the available context size of 12000" in error["message"]
        assert server.fails(CHAT, 413, messages=[{"role": "user", "content": "x" * 2_000_000}])["code"]
        alive(server)


def test_a_body_in_chunks_is_measured_too() -> None:
    with serving_model(fake_model(says("ok")), Settings(max_body=5_000)) as server:
        import http.client

        connection = http.client.HTTPConnection(server.host, server.port)
        connection.request(
            "POST", CHAT, iter([b"x" * 1000] * 6), encode_chunked=True, headers={"Transfer-Encoding": "chunked"}
        )
        assert connection.getresponse().status == 413
        alive(server)


def test_every_length_around_the_context() -> None:
    with serving_model(fake_model(says("ok"), n_ctx=64, n_batch=16)) as server:
        for n in [*range(11, 22), *range(27, 38), *range(59, 70)]:
            status, answer = server.post("/v1/completions", {"prompt": "x" * (n - 2) + "\n", "max_tokens": 3})
            assert status == (200 if n <= 64 else 400), (n, answer)
            assert status == 200 or answer["error"]["param"] == "prompt"
        assert server.ok("/v1/completions", prompt="", max_tokens=1)
    assert not server.service.admission.inside
