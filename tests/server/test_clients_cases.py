"""What clients of such servers met, where no other test has it: repeats, limits, absent fields."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from conftest import ANSWER
from fake import END_OF_TURN, fake_model, hashed, says
from harness import HI, FakeTemplate, Server, serving, serving_model

import edgert
from edgert.server.registry import Spec
from edgert.server.service import Settings
from edgert.template import ChatTemplate
from edgert.tokenizer import limit

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    path = tiny_model("llama", n_ctx=512)
    with serving([Spec("tiny", path)], lambda source, **_: edgert.load(source, n_threads=1, n_parallel=4)) as server:
        yield server


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", lambda text: {"prompt": text}),
        ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/v1/embeddings", lambda text: {"input": text}),
        ("/api/generate", lambda text: {"prompt": text, "raw": True}),
        ("/api/chat", lambda text: {"messages": [{"role": "user", "content": text}]}),
    ],
)
def test_megabytes_are_refused_without_being_read_to_their_end(
    tiny: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    text = "many words " * 100_000
    monkeypatch.setattr(limit, "PATIENCE", 0)
    status, answer = tiny.post(path, body(text))
    assert status == 400
    message = answer["error"] if path.startswith("/api") else answer["error"]["message"]
    count = int(message.split("has at least ")[1].split()[0])
    assert 512 < count < 100_000 and "exceeds the available context size of 512" in message
    counted = tiny.ok("/v1/chat/completions/input_tokens", messages=[{"role": "user", "content": text}])
    assert counted["input_tokens"] > 200_000


def test_tens_of_megabytes_are_refused_by_their_length(tiny: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """To cut them into words would keep the interpreter from everybody for seconds."""
    monkeypatch.setattr(limit, "LONG", 100_000)
    tokenizer = tiny.model().tokenizer
    for text in ("many words " * 10_000, "a" * 110_000):
        exact = len(tokenizer.encode(text))
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer._algorithm, "words", None)
            message = tiny.fails(PLAIN, prompt=text)["message"]
        assert 512 < int(message.split("has at least ")[1].split()[0]) <= exact
        assert tiny.fails(PLAIN, prompt=text[:50_000])["code"] == "context_length_exceeded"


def test_more_ids_than_the_context_has_places_are_not_looked_at(tiny: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.model(), "_checked", None)
    for path, field in ((PLAIN, "prompt"), ("/v1/embeddings", "input"), ("/embeddings", "input")):
        for value in ([7] * 600, [[7] * 600]):
            error = tiny.fails(path, **{field: value})
            assert (error["param"], error["n_prompt_tokens"], error["n_ctx"]) == (field, 600, 512)


def test_more_messages_than_the_context_has_places(server: Server) -> None:
    many = HI * 100_000
    for path, body in ((CHAT, {"stream": True}), ("/api/chat", {"model": "fake"})):
        status, answer = server.post(path, {"messages": many} | body)
        error = answer["error"] if path.startswith("/api") else answer["error"]["message"]
        assert status == 400 and "at least 100000 tokens, which exceeds the available context size of 2048" in error


def test_twenty_greedy_repeats_with_a_seed_are_one_answer(tiny: Server) -> None:
    """Cold and warm, alone and beside others, whole and in pieces, with one seed and with others."""
    fields: dict[str, Any] = {"prompt": list(range(3, 75)), "temperature": 0, "max_tokens": 24, "ignore_eos": True}

    def ask(i: int) -> str:
        given = fields | {"seed": 7 if i % 2 else i, "cache_prompt": i % 3 != 0}
        if i % 4 == 0:
            return "".join(event["choices"][0]["text"] for event in tiny.events(PLAIN, **given))
        return str(tiny.ok(PLAIN, **given)["choices"][0]["text"])

    alone = [ask(i) for i in range(10)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(ask, range(10, 20)))
    assert len({*alone, *together}) == 1
    assert len(set(alone[0])) > 3  # and it says something


def test_other_seeds_give_other_answers(tiny: Server) -> None:
    fields: dict[str, Any] = {"prompt": [3, 4, 5], "temperature": 1.5, "max_tokens": 16, "ignore_eos": True}
    texts = [tiny.ok(PLAIN, **fields, seed=seed)["choices"][0]["text"] for seed in (1, 2, 3, 4, 1, 2, 3, 4)]
    assert len(set(texts)) == 4 and texts[:4] == texts[4:]


@pytest.mark.parametrize("path, prompt", [(CHAT, {"messages": HI}), (PLAIN, {"prompt": "x\n"})])
def test_without_a_limit_an_answer_has_no_hidden_one(server: Server, path: str, prompt: Any) -> None:
    """It runs to the model's own end, or where there is none to the end of the context, and says which."""
    reply = server.ok(path, **prompt)
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == len(ANSWER.encode()) + 1 > 16
    with serving_model(fake_model(hashed, n_ctx=128)) as endless:
        reply = endless.ok(path, **prompt)
        assert reply["choices"][0]["finish_reason"] == "length"
        # the last token is said, and needs no place of its own
        assert reply["usage"]["total_tokens"] in (128, 129)
    with serving_model(fake_model(hashed, n_ctx=128), Settings(max_tokens=20)) as bounded:  # --max-tokens
        reply = bounded.ok(path, **prompt)
        assert (reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 20)
        assert bounded.ok(path, **prompt, max_tokens=30)["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_content_may_be_absent_beside_tool_calls(server: Server, content: dict[str, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [*HI, {"role": "assistant", **content, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "1", "content": "noon"}]
    tool = {"type": "function", "function": {"name": "now"}}
    for tools in ({}, {"tools": [tool]}):
        reply = server.ok(CHAT, messages=messages, **tools)
        assert reply["choices"][0]["message"]["content"] == ANSWER
    prompts = {server.ok("/apply-template", messages=messages)["prompt"]}
    prompts |= {server.ok("/apply-template", messages=[HI[0], messages[1] | {"content": ""}, messages[2]])["prompt"]}
    assert len(prompts) == 1


@pytest.mark.parametrize("end", [257, END_OF_TURN])
def test_an_empty_stop_list_leaves_the_models_own_ends(end: int) -> None:
    with serving_model(fake_model(says("ok", end))) as server:
        for stop in ({"stop": []}, {"stop": [""]}, {"stop": ""}, {"stop": None}, {}):
            for path, prompt in ((CHAT, {"messages": HI}), (PLAIN, {"prompt": "x\n"})):
                reply = server.ok(path, **prompt, **stop, max_tokens=40)
                choice = reply["choices"][0]
                assert (choice.get("text") or choice["message"]["content"]) == "ok"
                assert choice["finish_reason"] == "stop"
                assert reply["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "pattern, can",
    [
        (r"(?=a)b", False),
        (r"(?<!a)b", False),
        (r"\bfoo\b", False),
        (r"(a)\1", False),
        (r"[unclosed", False),
        (r"(?P<year>\d{4})", True),
        (r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", True),
        (r"([a-c]{3}|x+y)", True),
    ],
)
def test_a_pattern_is_enforced_or_refused(server: Server, pattern: str, can: bool) -> None:
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    for fields in ({"regex": pattern}, {"json_schema": schema}):
        if not can:
            assert server.fails(CHAT, messages=HI, **fields)["param"] == next(iter(fields))
            continue
        choice = server.ok(CHAT, messages=HI, **fields, max_tokens=40)["choices"][0]
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, text if "regex" in fields else json.loads(text))
    assert server.get("/health")[0] == 200


# What llama.cpp's server is tested for


@pytest.mark.parametrize("path, prompt", [(CHAT, {"messages": HI}), (PLAIN, {"prompt": "x\n"})])
@pytest.mark.parametrize("limit", [1, 8])
def test_timings_are_finite(server: Server, path: str, prompt: Any, limit: int) -> None:
    timings = server.ok(path, **prompt, max_tokens=limit)["timings"]
    assert timings["predicted_n"] == limit
    assert all(isinstance(value, (int, float)) and value >= 0 for value in timings.values())
    if limit == 1:  # it came with the prompt's logits, so no step can be timed
        assert timings["predicted_per_second"] == 0
    else:
        rate = 1e3 * (limit - 1) / timings["predicted_ms"]
        assert timings["predicted_per_second"] == pytest.approx(rate)


def test_how_long_a_conversation_is(server: Server) -> None:
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        counted = server.ok(path, messages=HI)
        assert counted == {"object": "response.input_tokens", "input_tokens": 10}
        assert counted["input_tokens"] == server.ok(CHAT, messages=HI, max_tokens=1)["usage"]["prompt_tokens"]
        long = [{"role": "user", "content": "x" * 5000}]  # beyond the context: who asks wants to know
        assert server.ok(path, messages=long)["input_tokens"] == 5008
        assert server.fails(path, messages="x")["param"] == "messages"
        assert server.fails(path, messages=[{"role": "user"}])["param"] == "messages[0].content"


def test_a_template_that_rejects_the_system_role_says_so() -> None:
    model = fake_model(says("ok"))
    refusal = "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    with serving_model(model) as server:
        model.template = FakeTemplate("{% for m in messages %}" + refusal + "{{ m.content }}{% endfor %}")
        for stream in (False, True):
            error = server.fails(CHAT, messages=[{"role": "system", "content": "Be brief."}, *HI], stream=stream)
            assert "System role not supported" in error["message"] and error["param"] == "messages"
        assert server.ok(CHAT, messages=HI, max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "attack",
    [
        "{% for i in range(99999) %}{% for k in range(99999) %}{% for n in range(99999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{{ 'a' * 10 ** 9 }}",
    ],
    ids=["loops", "repetition"],
)
def test_a_template_without_end_is_an_error_and_the_server_goes_on(attack: str) -> None:
    model = fake_model(says("ok"))
    attack = "{% if messages[0].content == 'attack' %}" + attack + "{% endif %}{{ messages[0].content }}"
    with serving_model(model) as server:
        model.template = FakeTemplate(attack)
        error = server.fails(CHAT, messages=[{"role": "user", "content": "attack"}])
        assert "template" in error["message"]
        assert server.ok(CHAT, messages=HI, max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_prompt_without_the_answers_beginning() -> None:
    model = fake_model(says("ok"))
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[answer]{% endif %}"
    with serving_model(model) as server:
        model.template = ChatTemplate(source)
        assert server.ok("/apply-template", messages=HI)["prompt"] == "[Hi][answer]"
        assert server.ok("/apply-template", messages=HI, add_generation_prompt=False)["prompt"] == "[Hi]"
        assert server.fails("/apply-template", messages=HI, add_generation_prompt=1)["param"] == "add_generation_prompt"


def test_what_a_context_that_is_too_small_says_in_a_stream(server: Server) -> None:
    long = [{"role": "user", "content": "x" * 5000}]
    errors = [server.fails(CHAT, messages=long, stream=stream) for stream in (False, True)]
    assert errors[0] == errors[1]
    assert (errors[0]["n_prompt_tokens"], errors[0]["n_ctx"]) == (5008, 2048)


def test_a_stream_of_logprobs_spells_the_answer(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model="fake",
        messages=HI,  # type: ignore[arg-type]
        max_tokens=5,
        logprobs=True,
        top_logprobs=10,
        stream=True,
    )
    text = spelled = ""
    for i, chunk in enumerate(stream):
        choice = chunk.choices[0]
        assert choice.delta.role == (None if i else "assistant")
        text += choice.delta.content or ""
        for score in (choice.logprobs and choice.logprobs.content) or []:
            assert score.logprob <= 0 and score.bytes and len(score.top_logprobs) == 10
            spelled += score.token
    assert spelled == text == ANSWER[:5]


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"response_format": {"type": "json_object", "schema": {"const": "42"}}}, '"42"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}}, '"foooooo"'),
        ({"json_schema": {"const": "42"}}, '"42"'),
        ({"grammar": 'root ::= "a"{5,5}'}, "aaaaa"),
        ({"response_format": {"type": "sound"}}, None),
        ({"response_format": {"type": "json_object", "schema": 123}}, None),
        ({"response_format": {"type": "json_object", "schema": {"type": 123}}}, None),
        ({"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}}, None),
        ({"grammar": "root ::= this is (not valid GBNF"}, None),
    ],
)
def test_formats(server: Server, fields: dict[str, Any], expected: str | None) -> None:
    if expected is None:
        assert server.fails(CHAT, messages=HI, **fields)["param"].startswith(next(iter(fields)))
    else:
        assert server.ok(CHAT, messages=HI, **fields)["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize("messages", [None, "string", [123], [{}], [{"role": 123}], [{"role": "user", "content": 123}]])
def test_messages_that_are_none(server: Server, messages: Any) -> None:
    assert server.fails(CHAT, messages=messages)["param"].startswith("messages")


def test_a_stream_and_a_whole_answer_say_the_same(tiny: Server) -> None:
    fields: dict[str, Any] = {"prompt": "hello world and you", "temperature": 0, "max_tokens": 32, "ignore_eos": True}
    whole = tiny.ok(PLAIN, **fields)
    events = tiny.events(PLAIN, **fields, stream_options={"include_usage": True})
    assert "".join(e["choices"][0]["text"] for e in events if e["choices"]) == whole["choices"][0]["text"]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 32


def test_prompts_of_alternating_lengths_go_in_and_out_of_the_cache(tiny: Server) -> None:
    lengths = [41, 44, 40, 43, 44, 41, 42, 40, 43, 42, 44, 40]
    for n in lengths:
        prompt = [5 + n, 6, 7, 8, 9] * n
        reply = tiny.ok(PLAIN, prompt=prompt, max_tokens=1 + n % 8, ignore_eos=True, temperature=0)
        timings = reply["timings"]
        assert timings["cache_n"] + timings["prompt_n"] == reply["usage"]["prompt_tokens"] == len(prompt)
        assert timings["predicted_n"] == 1 + n % 8
    assert json.loads(tiny.raw("GET", "/health")[2]) == {"status": "ok"}
