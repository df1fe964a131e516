"""Embeddings of a tiny real model, beside llama.cpp's when it is there."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from fake import PATIENCE
from harness import Server, serving, wait_for

import edgert
from edgert.backends.base import Batch
from edgert.errors import RequestError
from edgert.quantize.gguf_file import GGUFFile
from edgert.server.registry import Spec


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    path = tiny_model("llama", n_ctx=512)
    with serving([Spec("tiny", path)], lambda source, **_: edgert.load(source, n_threads=1)) as server:
        yield server


def test_the_official_client(tiny: Server) -> None:
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)
    reply = client.embeddings.create(model="tiny", input=["hello world", "and you", "hello world"])
    vectors = [item.embedding for item in reply.data]  # the client asks for base64
    assert [item.index for item in reply.data] == [0, 1, 2]
    assert len(vectors[0]) == 128
    assert vectors[0] == vectors[2] != vectors[1]
    assert np.linalg.norm(vectors[0]) == pytest.approx(1, abs=1e-5)
    assert reply.usage.prompt_tokens > 3


def test_forms(tiny: Server) -> None:
    floats = tiny.ok("/v1/embeddings", input="hello")["data"][0]["embedding"]
    packed = tiny.ok("/v1/embeddings", input="hello", encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == pytest.approx(floats)
    ids = tiny.ok("/tokenize", content="hello", add_special=True)["tokens"]
    assert tiny.ok("/v1/embeddings", input=ids)["data"][0]["embedding"] == floats
    assert tiny.ok("/v1/embeddings", input=[ids])["data"][0]["embedding"] == floats


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/embeddings", {"input": [[7] * 400] * 2048}),
        ("/embeddings", {"input": [[7] * 400] * 2048, "pooling": "none"}),
        ("/api/embed", {"input": ["word " * 200] * 2048}),
        ("/v1/completions", {"prompt": [[7] * 400] * 64, "echo": True, "logprobs": 1, "max_tokens": 0}),
    ],
)
def test_texts_are_not_read_for_who_has_left(
    tiny: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    data, backend = json.dumps(body).encode(), tiny.model().backend

    left = threading.Event()

    def slow(usual: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
        def slowly(batch: Batch) -> Any:
            if read():
                left.wait(PATIENCE)  # until the server has noticed
            return usual(batch)

        return slowly

    monkeypatch.setattr(backend, "states", slow(backend.states))
    monkeypatch.setattr(backend, "forward", slow(backend.forward))
    before = tiny.model().snapshot().prompt_tokens

    def read() -> int:
        return tiny.model().snapshot().prompt_tokens - before

    with socket.create_connection((tiny.host, tiny.port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        wait_for(read)
    wait_for(lambda: not tiny.service.admission.inside)
    left.set()
    wait_for(lambda: not tiny.model().snapshot().n_running + tiny.model().snapshot().n_waiting)
    assert read() < 200 * len(body.get("input") or body["prompt"])  # half of it


def test_who_waits_for_an_embedding_keeps_nobody_from_reading(tiny: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are threads in which texts are cut into tokens."""
    backend, hold, usual = tiny.model().backend, threading.Event(), tiny.model().backend.states

    def held(batch: Batch) -> Any:
        hold.wait(PATIENCE)
        return usual(batch)

    monkeypatch.setattr(backend, "states", held)
    with ThreadPoolExecutor(48) as pool:
        found = [pool.submit(tiny.ok, "/v1/embeddings", input="hello") for _ in range(48)]
        wait_for(lambda: tiny.service.admission.inside == 48)
        time.sleep(0.1)
        assert tiny.ok("/tokenize", content="hello")["tokens"]
        assert not any(one.done() for one in found)
        hold.set()
        assert len({str(one.result(PATIENCE)["data"]) for one in found}) == 1


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_embeddings_are_their_users(tiny: Server, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """So that he who asks for many takes no more than his part."""
    engine, users = tiny.model()._engine, []
    usual = engine.submit

    def submit(task: Any) -> None:
        users.append(task.user)
        usual(task)

    monkeypatch.setattr(engine, "submit", submit)
    for user in ("a", "b", "a"):
        fields = {"pooling": "none"} if path == "/embeddings" else {}
        tiny.ok(path, input=["hello", "you"], user=user, **fields)
    first, second, third = users[:2], users[2:4], users[4:]
    assert len({*first}) == len({*second}) == 1 and first == third != second


@pytest.mark.parametrize("value", [[], [[]], None, 5, [1.5], [10**6], ""])
def test_what_is_refused(tiny: Server, value: object) -> None:
    status, answer = tiny.post("/v1/embeddings", {"input": value})
    if value == "":  # the begin token alone
        assert status in (200, 400)
    else:
        assert status == 400
        assert answer["error"]["param"].startswith("input")
    assert tiny.fails("/v1/embeddings", input="x", dimensions=7)["param"] == "dimensions"
    error = tiny.fails("/v1/embeddings", input="x " * 2000)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


def test_poolings(tiny: Server) -> None:
    model = tiny.model()
    ids = model.tokenize("hello world and you, is a the 00 12 " * 9)
    vectors = {kind: model.embed(ids, kind) for kind in ("mean", "cls", "last")}  # type: ignore[arg-type]
    assert len({vector.tobytes() for vector in vectors.values()}) == 3
    assert np.allclose(model.embed(ids[:1], "mean"), vectors["cls"], atol=2e-2)


def test_the_state_of_each_token(tiny: Server) -> None:
    """The pooling "none" tells what the others are made of, as it is; OpenAI's route has no place for it."""
    ids = tiny.ok("/tokenize", content="hello hello hello", add_special=True)["tokens"]
    states = np.array(tiny.ok("/embeddings", input=ids, pooling="none")["data"][0]["embedding"], np.float32)
    assert states.shape == (len(ids), 128)
    assert (np.abs(np.linalg.norm(states, axis=1) - 1) > 1e-3).all()
    for kind, pooled in (("mean", states.mean(0)), ("cls", states[0]), ("last", states[-1])):
        vector = tiny.ok("/embeddings", input=ids, pooling=kind)["data"][0]["embedding"]
        assert np.allclose(vector, pooled / np.linalg.norm(pooled), atol=1e-5)
    packed = tiny.ok("/embeddings", input=ids, pooling="none", encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == states.reshape(-1).tolist()
    assert tiny.fails("/v1/embeddings", input=ids, pooling="none")["param"] == "pooling"
    assert tiny.fails("/embeddings", input=ids, pooling="rank")["param"] == "pooling"
    with pytest.raises(RequestError, match="pooling"):
        tiny.model().embed(["one", "two"], "none")


@pytest.mark.parametrize(
    "value, count", [("string", 1), (["one", "two"], 2), (["one", [3, 4, 5]], 2), ([[3, 4], [5]], 2)]
)
def test_texts_and_ids_side_by_side(tiny: Server, value: object, count: int) -> None:
    data = tiny.ok("/v1/embeddings", input=value)["data"]
    assert [(item["index"], len(item["embedding"])) for item in data] == [(i, 128) for i in range(count)]


def test_the_same_text_five_times(tiny: Server) -> None:
    reply = tiny.ok("/v1/embeddings", input=["I believe the meaning of life is"] * 5)
    assert len({tuple(item["embedding"]) for item in reply["data"]}) == 1
    one = tiny.ok("/v1/embeddings", input="I believe the meaning of life is")["usage"]
    assert reply["usage"] == {name: 5 * n for name, n in one.items()}
    assert one["prompt_tokens"] == one["total_tokens"] > 5


def test_their_tokens_are_counted(tiny: Server) -> None:
    def value(line: str) -> float:
        text = tiny.raw("GET", "/metrics")[2].decode()
        return sum(float(found.split()[-1]) for found in text.splitlines() if found.startswith(line))

    names = (
        "edgert_prompt_tokens_total",
        'edgert_engine{figure="prompt_tokens"',
        "edgert_predicted_tokens_total",
    )
    before = [value(name) for name in names]
    count = tiny.ok("/v1/embeddings", input=["hello world " * 40, "you", [7]])["usage"]["prompt_tokens"]
    assert count > 100
    assert [value(name) - known for name, known in zip(names, before, strict=True)] == [count, count, 0]


def test_beside_generation(tiny: Server) -> None:
    """Reading for an embedding and generating at once disturb each other in nothing."""
    model = tiny.model()
    alone, vector = model.generate("hello", max_tokens=40, temperature=0).text, model.embed("and you " * 20)
    stream = model.generate("hello", True, max_tokens=40, temperature=0)
    vectors = [model.embed("and you " * 20) for _ in range(4)]
    assert stream.reply().text == alone
    assert all(np.allclose(found, vector, atol=1e-5) for found in vectors)


def test_what_is_read_beside_a_reply_is_counted_once(tiny: Server) -> None:
    model = tiny.model()
    before = model.snapshot().prompt_tokens
    stream = model.generate("hello", True, max_tokens=60, temperature=0, ignore_eos=True, cache_prompt=False)
    texts = ["and you " * n for n in (1, 7, 30)] + ["you"]
    for text in texts:
        model.embed(text)
    read = stream.reply().stats.prompt_n + sum(len(model.tokenizer.encode_whole(text)) for text in texts)
    wait_for(lambda: model.snapshot().prompt_tokens - before >= read)
    assert model.snapshot().prompt_tokens - before == read


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_they_are_what_the_head_reads(tiny_model: Callable[..., Path], family: str) -> None:
    """The states times the head's weights are the logits."""
    path = tiny_model(family, n_ctx=512)
    with GGUFFile.open(path) as file:
        name = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        head = file.tensor(name).dequantize()
    with edgert.load(path, n_threads=1) as model:
        ids = model.tokenize("hello world and you")
        for i, row in enumerate(model.logits(ids)):
            state = model.embed(ids[: i + 1], "last")
            logits = head @ state
            assert np.corrcoef(logits, row)[0, 1] > 0.999


def test_four_in_a_context_that_is_too_small(tiny_model: Callable[..., Path]) -> None:
    """Each is what it is alone, or ends with "length"; none is wrong."""
    path = tiny_model("llama", n_ctx=512)
    with edgert.load(path, n_threads=1) as model:
        prompts = [model.tokenize(f"hello world {i} and you is a the")[:20] for i in range(4)]
        alone = [model.generate(ids, max_tokens=100, temperature=0, ignore_eos=True).text for ids in prompts]

    def load(source: str | Path, **_: object) -> edgert.Model:
        return edgert.load(source, n_threads=1, n_ctx=128, n_cached=128)

    with serving([Spec("tiny", path)], load) as server:
        texts: dict[int, str] = {}

        def ask(i: int) -> None:
            reply = server.ok(
                "/v1/completions", prompt=prompts[i], max_tokens=100, temperature=0, ignore_eos=True, user=f"u{i}"
            )
            assert reply["choices"][0]["finish_reason"] == "length"
            texts[i] = reply["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [texts[i] for i in range(4)] == alone
