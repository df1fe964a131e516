"""Ollama's routes by its own client, and OpenAI's by litellm where it is installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from conftest import ANSWER
from fake import fake_model, says
from harness import Server, serving, serving_model, wait_for

import edgert
from edgert.server.registry import Spec

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url)


def test_chat(client: ollama.Client) -> None:
    reply = client.chat("fake", HI)
    assert reply.message.content == ANSWER
    assert (reply.done, reply.done_reason) == (True, "stop")
    assert reply.prompt_eval_count == 10
    assert reply.eval_count == len(ANSWER.encode()) + 1
    assert reply.total_duration and reply.total_duration > 0
    assert reply.model == "fake"


def test_chat_in_pieces(client: ollama.Client) -> None:
    pieces = list(client.chat("fake:latest", HI, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == ANSWER
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].eval_count


def test_generate(client: ollama.Client) -> None:
    reply = client.generate("fake", "Hi", system="x", options={"num_predict": 5, "temperature": 0, "num_ctx": 99})
    assert (reply.response, reply.done_reason) == (ANSWER[:5], "length")
    raw = client.generate("fake", "x\n", raw=True, options={"stop": ["two"]})
    assert raw.response == ANSWER[: ANSWER.index("two")]
    assert "".join(piece.response for piece in client.generate("fake", "Hi", stream=True)) == ANSWER


def test_formats(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    reply = client.chat("fake", HI, format=schema)
    assert json.loads(reply.message.content or "")["n"] in (1, 2)
    assert (client.generate("fake", "Hi", format="json", options={"num_predict": 3}).response).startswith("{")
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("fake", HI, format={"not": {}})
    assert caught.value.status_code == 400


def test_tools() -> None:
    answer = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'

    def add(a: int, b: int) -> int:
        """Adds.

        Args:
            a: One number
            b: Another
        """
        return a + b

    with serving_model(fake_model(says(answer, after="\x1d"), n_ctx=4096), end="\x1d") as server:
        client = ollama.Client(host=server.url)
        reply = client.chat("fake", HI, tools=[add])
        assert reply.message.tool_calls
        call = reply.message.tool_calls[0].function
        assert (call.name, dict(call.arguments)) == ("add", {"a": 1, "b": 2})
        pieces = list(client.chat("fake", HI, tools=[add], stream=True))
        assert [piece for piece in pieces if piece.message.tool_calls]
        history = [*HI, reply.message, {"role": "tool", "content": "3", "tool_name": "add"}]
        assert client.chat("fake", history, tools=[add]).message.tool_calls


def test_thoughts() -> None:
    with serving_model(fake_model(says("<think>hm</think>Four.", after="\x1d")), end="\x1d") as server:
        client = ollama.Client(host=server.url)
        message = client.chat("fake", HI, think=True).message
        assert (message.thinking, message.content) == ("hm", "Four.")
        assert client.generate("fake", "Hi").thinking == "hm"


def test_errors_are_plain(server: Server, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="no model") as caught:
        client.chat("gone", HI)
    assert caught.value.status_code == 404
    for body in ({"model": "fake", "messages": 5}, {"model": "fake", "messages": HI, "options": {"temperature": "x"}}):
        status, answer = server.post("/api/chat", body)
        assert status == 400
        assert isinstance(answer["error"], str)
    assert server.post("/api/generate", {"model": "fake", "prompt": "x", "images": ["aaaa"]})[0] == 400
    for path, wanted in (("/api/pull", 404), ("/api/tags", 405)):  # a route that there is not, and a wrong method
        status, answer = server.post(path, {"model": "fake"})
        assert status == wanted
        assert isinstance(answer["error"], str), path


@pytest.mark.parametrize(
    "options, said",
    [
        ({"num_predict": -7}, "options.num_predict: must be"),
        ({"num_predict": 10**40}, "options.num_predict: must be"),
        ({"temperature": "hot"}, "options.temperature: must be"),
        ({"temperature": -1}, "options.temperature: must be"),
        ({"top_k": -1}, "options.top_k: must be"),
        ({"stop": 5}, "options.stop: must be"),
        ({"seed": True}, "options.seed: must be"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_field_as_these_routes_have_it(server: Server, options: Any, said: str, stream: bool) -> None:
    for path, prompt in (("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "x"})):
        status, answer = server.post(path, {"model": "fake", "options": options, "stream": stream} | prompt)
        assert status == 400 and answer["error"].startswith(said), answer
        status, answer = server.post(path, {"model": "fake", "format": {"type": "strong"}, "stream": stream} | prompt)
        assert status == 400 and answer["error"].startswith("format: cannot be enforced"), answer


def test_an_error_in_a_stream() -> None:
    def rule(tokens: list[int]) -> int:
        if len(tokens) > 12:
            raise edgert.EdgertError("The engine is gone.")
        return ord("a")

    with serving_model(fake_model(rule)) as server, pytest.raises(ollama.ResponseError, match="engine is gone"):
        list(ollama.Client(host=server.url).chat("fake", HI, stream=True))


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    specs = [Spec(name, tiny_model("llama", n_ctx=512)) for name in ("one", "two")]
    with serving(specs, lambda source, **_: edgert.load(source, n_threads=1, n_cached=1024)) as server:
        yield server


def test_models(tiny: Server) -> None:
    client = ollama.Client(host=tiny.url)
    listed = client.list().models
    assert [model.model for model in listed] == ["one", "two"]
    assert listed[0].size and listed[0].details
    assert (listed[0].details.family, listed[0].details.quantization_level) == ("llama", "Q4_0")
    shown = client.show("one")
    assert shown.modelinfo
    assert shown.modelinfo["llama.embedding_length"] == 128
    assert client.embed("one", ["hello", "you"]).embeddings[0] != client.embed("one", "you").embeddings[0]
    assert len(client.embeddings("one", "hello").embedding) == 128
    assert len(client.embed("one", "hello", dimensions=128).embeddings[0]) == 128
    for fields, said in (
        ({"input": "x", "dimensions": 7}, "dimensions: this"),
        ({"input": ["x"] * 2049}, "input: has"),
    ):
        status, answer = tiny.post("/api/embed", {"model": "one"} | fields)
        assert status == 400 and answer["error"].startswith(said), answer


def test_loading_and_unloading(tiny: Server) -> None:
    client = ollama.Client(host=tiny.url)

    def loaded() -> list[Any]:
        return sorted(model.model or "" for model in client.ps().models)

    assert client.generate("two", "").done_reason == "load"
    assert loaded() == ["one", "two"]
    assert client.generate("two", "", keep_alive=0).done_reason == "unload"
    wait_for(lambda: loaded() == ["one"])
    client.generate("two", "hello", options={"num_predict": 2})
    assert loaded() == ["one", "two"]
    client.generate("two", "hello", options={"num_predict": 2}, keep_alive="300ms")
    wait_for(lambda: loaded() == ["one"])


@pytest.mark.slow
def test_litellm(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it would ask the internet
    litellm = pytest.importorskip("litellm", reason="needs litellm")
    where = {"model": "openai/fake", "api_base": f"{server.url}/v1", "api_key": "none"}
    reply = litellm.completion(messages=HI, **where)
    assert reply.choices[0].message.content == ANSWER
    pieces = litellm.completion(messages=HI, stream=True, **where)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == ANSWER
    schema = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert (
        json.loads(litellm.completion(messages=HI, response_format=form, **where).choices[0].message.content)["n"] == 1
    )
    several = litellm.completion(messages=HI, n=2, stop=["two"], seed=3, logprobs=True, top_logprobs=2, **where)
    assert [choice.message.content for choice in several.choices] == [ANSWER[: ANSWER.index("two")]] * 2
    assert len(several.choices[0].logprobs.content[0].top_logprobs) == 2
    tool = {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}},
    }
    called = litellm.completion(
        messages=HI, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=400, **where
    )
    assert {call.function.name for call in called.choices[0].message.tool_calls} == {"now"}
    plain = litellm.text_completion(prompt="x\n", max_tokens=5, **where | {"model": "text-completion-openai/fake"})
    assert plain.choices[0].text == ANSWER[:5]
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=HI, temperature=-1, num_retries=0, **where)
    native = litellm.completion(messages=HI, model="ollama_chat/fake", api_base=server.url)
    assert native.choices[0].message.content == ANSWER
