"""Embeddings of a tiny real model, beside llama.cpp's when it is there."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from harness import Server, serving

import edgert
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


def test_beside_generation(tiny: Server) -> None:
    """Reading for an embedding and generating at once disturb each other in nothing."""
    model = tiny.model()
    alone, vector = model.generate("hello", max_tokens=40, temperature=0).text, model.embed("and you " * 20)
    stream = model.generate("hello", True, max_tokens=40, temperature=0)
    vectors = [model.embed("and you " * 20) for _ in range(4)]
    assert stream.reply().text == alone
    assert all(np.allclose(found, vector, atol=1e-5) for found in vectors)


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
