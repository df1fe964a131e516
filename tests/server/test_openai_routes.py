"""OpenAI's routes by its own client and by bare requests, on a scripted model."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest
from conftest import ANSWER
from fake import BOS, fake_model, hashed, says
from harness import Server, serving_model

from edgert.options import SamplingParams

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
# FakeTemplate: "user: Hi\n" and the begin token
N_PROMPT = 10


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_chat_by_the_official_client(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=HI, temperature=0)  # type: ignore[arg-type]
    assert reply.choices[0].message.content == ANSWER
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == "fake"
    assert reply.usage
    n = len(ANSWER.encode()) + 1
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (N_PROMPT, n)
    assert reply.usage.total_tokens == N_PROMPT + n


def test_a_stream_by_the_official_client(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=HI,
        stream=True,
        stream_options={"include_usage": True},  # type: ignore[arg-type]
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage
    assert chunks[-1].usage.total_tokens == N_PROMPT + len(ANSWER.encode()) + 1
    assert all(c.usage is None for c in chunks[:-1])


def test_without_include_usage_no_chunk_has_it(server: Server) -> None:
    events = server.events(CHAT, messages=HI)
    assert not any("usage" in event for event in events)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "timings" in events[-1]


def test_characters_of_several_tokens_come_whole(server: Server) -> None:
    texts = [event["choices"][0]["delta"].get("content", "") for event in server.events(CHAT, messages=HI)]
    assert "".join(texts) == ANSWER
    assert "🙂" in texts
    assert not any("�" in text for text in texts)


def test_a_limit_within_a_character_is_valid_json(server: Server) -> None:
    with serving_model(fake_model(says("🙂"))) as other:
        reply = other.ok(CHAT, messages=HI, max_tokens=1)
        assert reply["choices"][0]["finish_reason"] == "length"
        assert isinstance(reply["choices"][0]["message"]["content"], str)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limits(server: Server, name: str) -> None:
    reply = server.ok(CHAT, messages=HI, **{name: 5})
    assert reply["choices"][0]["message"]["content"] == ANSWER[:5]
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 5


def test_a_limit_of_minus_one_ends_with_stop(server: Server) -> None:
    assert server.ok(CHAT, messages=HI, max_tokens=-1)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stop", ["two", ["xyz", "two"], ["two", ""]])
def test_stop(server: Server, stop: Any) -> None:
    before = ANSWER[: ANSWER.index("two")]
    reply = server.ok(CHAT, messages=HI, stop=stop)
    assert reply["choices"][0]["message"]["content"] == before
    assert reply["choices"][0]["finish_reason"] == "stop"
    events = server.events(CHAT, messages=HI, stop=stop)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == before


@pytest.mark.parametrize("stop", [None, [], "", [""]])
def test_an_empty_stop_is_none(server: Server, stop: Any) -> None:
    assert server.ok(CHAT, messages=HI, stop=stop)["choices"][0]["message"]["content"] == ANSWER


def test_n(server: Server) -> None:
    reply = server.ok(CHAT, messages=HI, n=3)
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    assert {c["message"]["content"] for c in reply["choices"]} == {ANSWER}
    assert reply["usage"]["prompt_tokens"] == N_PROMPT
    assert reply["usage"]["completion_tokens"] == 3 * (len(ANSWER.encode()) + 1)
    texts = ["", "", ""]
    for event in server.events(CHAT, messages=HI, n=3):
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [ANSWER] * 3


@pytest.mark.parametrize("n", [0, -1, 10**9, 1.5, "2", True])
def test_a_wrong_n(server: Server, n: Any) -> None:
    assert server.fails(CHAT, messages=HI, n=n)["param"] == "n"


def test_seeds_of_several_answers_differ() -> None:
    def loud(tokens: list[int]) -> int:
        return hashed(tokens)

    with serving_model(fake_model(loud, SamplingParams(temperature=100, top_k=0, top_p=1, min_p=0))) as server:
        reply = server.ok(CHAT, messages=HI, n=3, max_tokens=12, seed=5)
        texts = [c["message"]["content"] for c in reply["choices"]]
        assert len(set(texts)) == 3
        again = server.ok(CHAT, messages=HI, n=3, max_tokens=12, seed=5)
        assert [c["message"]["content"] for c in again["choices"]] == texts
        third = server.ok(CHAT, messages=HI, max_tokens=12, seed=7)
        assert third["choices"][0]["message"]["content"] == texts[2]


def test_answers_differ_where_the_seed_is_the_servers() -> None:
    wild = SamplingParams(temperature=100, top_k=0, top_p=1, min_p=0, seed=5)
    with serving_model(fake_model(hashed, wild)) as server:
        texts = [c["message"]["content"] for c in server.ok(CHAT, messages=HI, n=3, max_tokens=12)["choices"]]
        assert len(set(texts)) == 3
        asked = server.ok(CHAT, messages=HI, n=3, max_tokens=12, seed=5)
        assert [c["message"]["content"] for c in asked["choices"]] == texts
        free = [server.ok(CHAT, messages=HI, n=2, max_tokens=12, seed=-1) for _ in range(2)]
        assert len({c["message"]["content"] for reply in free for c in reply["choices"]}) == 4


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="fake",
        messages=HI,
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,  # type: ignore[arg-type]
    )
    assert reply.choices[0].logprobs
    content = reply.choices[0].logprobs.content
    assert content
    assert [c.token for c in content] == ["H", "e", "l"]
    assert [c.bytes for c in content] == [[72], [101], [108]]
    for one in content:
        assert len(one.top_logprobs) == 2
        assert one.top_logprobs[0].logprob == one.logprob < 0
    streamed = client.chat.completions.create(
        model="fake",
        messages=HI,
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
        stream=True,  # type: ignore[arg-type]
    )
    scores = [s for c in streamed if c.choices[0].logprobs for s in c.choices[0].logprobs.content or []]
    assert [s.token for s in scores] == ["H", "e", "l"]


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="fake", prompt="x\n", max_tokens=3, logprobs=2)
    scores = reply.choices[0].logprobs
    assert scores
    assert scores.tokens == ["H", "e", "l"]
    assert scores.text_offset == [0, 1, 2]
    assert scores.token_logprobs and scores.top_logprobs
    assert [max(top.values()) for top in scores.top_logprobs] == scores.token_logprobs


def test_top_logprobs_need_logprobs(server: Server) -> None:
    assert server.fails(CHAT, messages=HI, top_logprobs=3)["param"] == "top_logprobs"
    assert server.fails(CHAT, messages=HI, logprobs=True, top_logprobs=21)["param"] == "top_logprobs"


def test_logit_bias(server: Server) -> None:
    bias = {str(ord("H")): -100, str(ord("Q")): 100}
    assert server.ok(CHAT, messages=HI, logit_bias=bias, max_tokens=1)["choices"][0]["message"]["content"] == "Q"
    pairs = [[ord("Q"), 100], [ord("H"), False]]
    assert server.ok(CHAT, messages=HI, logit_bias=pairs, max_tokens=1)["choices"][0]["message"]["content"] == "Q"
    assert server.fails(CHAT, messages=HI, logit_bias={"99999": 1})["param"] == "logit_bias"
    assert server.fails(CHAT, messages=HI, logit_bias={"7": 1e9})["param"] == "logit_bias[7]"


def test_ignore_eos(server: Server) -> None:
    reply = server.ok(CHAT, messages=HI, ignore_eos=True, max_tokens=60)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 60


def test_the_cache_is_counted(server: Server) -> None:
    messages = [{"role": "user", "content": "something never said before"}]
    first, second = (server.ok(CHAT, messages=messages, max_tokens=2) for _ in range(2))
    n = first["usage"]["prompt_tokens"]
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (first, second)]
    assert cached[0] < n - 10
    assert cached[1] == n - 1
    assert second["timings"]["cache_n"] == n - 1
    assert second["timings"]["prompt_n"] == 1


def test_timings_have_llama_servers_names(server: Server) -> None:
    timings = server.ok(CHAT, messages=HI)["timings"]
    names = "cache_n prompt_n prompt_ms prompt_per_second predicted_n predicted_ms predicted_per_second"
    assert set(names.split()) <= set(timings)


def test_progress_of_the_prompt() -> None:
    with serving_model(fake_model(says("ok"), n_ctx=512, n_batch=32)) as server:
        events = server.events(CHAT, messages=[{"role": "user", "content": "x" * 200}], return_progress=True)
    reports = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    done = [report["processed"] for report in reports]
    assert done == sorted(done)
    assert len(done) > 4
    assert reports[-1]["processed"] == reports[-1]["total"] == 208
    assert set(reports[0]) == {"total", "cache", "processed", "time_ms"}


def test_progress_begins_with_what_is_cached_and_has_timings_where_pieces_have() -> None:
    with serving_model(fake_model(says("ok"), n_ctx=512, n_batch=32)) as server:
        first, second = ([{"role": "user", "content": "x" * 200 + end}] for end in ("", "y" * 100))
        server.ok(CHAT, messages=first, max_tokens=1)
        events = server.events(CHAT, messages=second, return_progress=True, timings_per_token=True)
    events = [event for event in events if "prompt_progress" in event]
    assert events[0]["prompt_progress"]["cache"] == events[0]["prompt_progress"]["processed"] > 190
    assert (events[0]["timings"]["prompt_n"], events[0]["timings"]["predicted_n"]) == (0, 0)
    assert len(events) > 3
    for event in events:
        progress, timings = event["prompt_progress"], event["timings"]
        assert (timings["cache_n"], timings["prompt_ms"]) == (progress["cache"], progress["time_ms"])
        assert timings["prompt_n"] == progress["processed"] - progress["cache"]
        assert all(value >= 0 for value in timings.values())


# Prompts of /v1/completions


@pytest.mark.parametrize(
    "prompt, count",
    [
        ("x\n", 1),
        (["x\n", "y\n"], 2),
        ([BOS, 120, 10], 1),
        ([[BOS, 120, 10], [121, 10]], 2),
        ([[BOS, 120, 10], "y\n"], 2),
    ],
)
def test_kinds_of_prompts(server: Server, prompt: Any, count: int) -> None:
    reply = server.ok("/v1/completions", prompt=prompt, n=2, max_tokens=5)
    assert [c["index"] for c in reply["choices"]] == list(range(2 * count))
    assert {c["text"] for c in reply["choices"]} == {"Hello"}


@pytest.mark.parametrize("prompt", [[], [[]], [300], [-1], [[5], 3], None, 5, {}, [1.5], [True], [10**30]])
def test_prompts_that_are_refused(server: Server, prompt: Any) -> None:
    assert "prompt" in server.fails("/v1/completions", prompt=prompt, max_tokens=1)["param"]


def test_echo(server: Server) -> None:
    reply = server.ok("/v1/completions", prompt="abc\n", echo=True, max_tokens=2)
    assert reply["choices"][0]["text"] == "abc\nHe"
    events = server.events("/v1/completions", prompt="abc\n", echo=True, max_tokens=2)
    assert "".join(e["choices"][0]["text"] for e in events) == "abc\nHe"
    nothing = server.ok("/v1/completions", prompt="abc\n", echo=True, max_tokens=0)
    assert nothing["choices"][0]["text"] == "abc\n"


@pytest.mark.parametrize("prompt", ["abcé\n", [97, 98, 99, 0xC3, 0xA9, 10]])
@pytest.mark.parametrize("limit", [0, 1])
def test_echo_with_logprobs_tells_those_of_the_prompt(server: Server, prompt: Any, limit: int) -> None:
    """As if each prompt token had been chosen after those before it."""
    fields = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": limit, "temperature": 0}
    reply = server.ok("/v1/completions", **fields)["choices"][0]
    model = server.model()
    ids = model.tokenize(prompt) if isinstance(prompt, str) else prompt
    found, n = reply["logprobs"], len(ids)
    assert reply["text"] == "abcé\n" + "H" * limit
    assert found["tokens"] == [model.tokenizer.piece(t).decode("utf-8", "replace") for t in ids] + ["H"] * limit
    assert {len(values) for values in found.values()} == {n + limit}
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    logits = model.logits(ids).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for i in range(1, n):
        assert found["token_logprobs"][i] == pytest.approx(expected[i - 1, ids[i]], abs=1e-5)
        assert max(found["top_logprobs"][i].values()) == pytest.approx(expected[i - 1].max(), abs=1e-5)
    begin = len(ids) - 6
    assert found["text_offset"][begin:] == [0, 1, 2, 3, 3, 4, 5][: 6 + limit]
    streamed = server.events("/v1/completions", **fields)
    parts = [e["choices"][0]["logprobs"] for e in streamed if e["choices"][0]["logprobs"]]
    assert [value for part in parts for value in part["token_logprobs"]] == found["token_logprobs"]
    assert "".join(e["choices"][0]["text"] for e in streamed) == reply["text"]


# Models, tokens, health


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "edgert"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gone")
    assert caught.value.code == "model_not_found"


def test_a_model_by_another_name_and_one_that_is_unknown(server: Server) -> None:
    assert server.ok(CHAT, messages=HI, model="other-name")["model"] == "fake"
    assert server.ok(CHAT, messages=HI, model="")["model"] == "fake"
    error = server.fails(CHAT, 404, messages=HI, model="../../etc/passwd")
    assert error["code"] == "model_not_found"
    assert "fake" in error["message"]


def test_tokens(server: Server) -> None:
    assert server.ok("/tokenize", content="héy") == {"tokens": list("héy".encode())}
    assert server.ok("/tokenize", content="a", add_special=True) == {"tokens": [BOS, 97]}
    pieces = server.ok("/tokenize", content="aé", with_pieces=True)["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert server.ok("/detokenize", tokens=list("héy".encode())) == {"content": "héy"}
    assert server.fails("/detokenize", tokens=[10**6])["param"] == "tokens"


def test_health(server: Server) -> None:
    assert server.get("/health") == (200, {"status": "ok"})


def test_unknown_routes_and_methods(server: Server) -> None:
    assert server.get("/v1/nothing")[0] == 404
    assert server.get(CHAT)[0] == 405
    assert json.loads(server.raw("GET", "/v1/nothing")[2])["error"]["type"] == "not_found_error"


def test_metrics_count(server: Server) -> None:
    def value(name: str) -> float:
        text = server.raw("GET", "/metrics")[2].decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    before = value("edgert_predicted_tokens_total"), value("edgert_first_token_seconds_count")
    server.ok(CHAT, messages=HI, max_tokens=4)
    server.events(CHAT, messages=HI, max_tokens=4)
    assert value("edgert_predicted_tokens_total") == before[0] + 8
    assert value("edgert_first_token_seconds_count") == before[1] + 2
    assert value("edgert_answers_inside") == 0


def test_timings_of_each_piece(server: Server) -> None:
    events = server.events(CHAT, messages=HI, timings_per_token=True)
    counts = [event["timings"]["predicted_n"] for event in events if "timings" in event]
    assert counts == sorted(counts)
    assert len(counts) > 20
    assert counts[-1] == len(ANSWER.encode()) + 1
    assert not any("timings" in event for event in server.events(CHAT, messages=HI)[:-1])


def test_an_answer_that_goes_on(server: Server) -> None:
    begun = [*HI, {"role": "assistant", "content": ANSWER[:7]}]
    with serving_model(fake_model(says(ANSWER), n_ctx=512)) as other:
        # The prompt without the begun answer ends with the mark after which ANSWER is said.
        reply = other.ok(CHAT, messages=begun, continue_final_message=True)
        assert reply["choices"][0]["message"]["content"] == ANSWER[7:]
        assert other.fails(CHAT, messages=HI, continue_final_message=True)["param"] == "messages"
        both = {"continue_final_message": True, "add_generation_prompt": True}
        assert other.fails(CHAT, messages=begun, **both)["param"] == "continue_final_message"


def test_props(server: Server) -> None:
    status, props = server.get("/props")
    assert status == 200
    assert props["total_slots"] == 8
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert "m.content" in props["chat_template"]
