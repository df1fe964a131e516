"""The Model facade on real engines: two models that people use, and tiny random ones."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgert
from edgert import ContextFullError, EdgertError, Model, RequestError

USER = "user"


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": USER, "content": text}]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Model]:
    with edgert.load(smollm2_path, n_ctx=1024) as model:
        yield model


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Iterator[Model]:
    with edgert.load(gemma3_path, n_ctx=1024) as model:
        yield model


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Path]) -> Iterator[Model]:
    with edgert.load(tiny_model("llama"), n_ctx=200, sampling={"temperature": 0}) as model:
        yield model


# The package


def test_import_is_light() -> None:
    code = """
import sys, time
start = time.process_time()
import edgert
seconds = time.process_time() - start
heavy = {"numpy", "numba", "llvmlite", "llama_cpp", "onnxruntime", "tokenizers", "jinja2", "gguf", "rich"}
print(seconds, *(heavy & set(sys.modules)))
"""
    seconds = []
    for _ in range(5):
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        first, *heavy = output.split()
        assert heavy == []
        seconds.append(float(first))
    assert min(seconds) < 0.1


def test_every_public_name_exists_and_an_unknown_one_says_so() -> None:
    for name in edgert.__all__:
        assert getattr(edgert, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = edgert.nothing


def test_it_is_silent(smollm2: Model, capfd: pytest.CaptureFixture[str]) -> None:
    smollm2.chat(ask("Hi"), max_tokens=3)
    with pytest.raises(RequestError):
        smollm2.chat(ask("Hi"), temperature=-1)
    assert capfd.readouterr() == ("", "")


def test_prompts_are_not_logged(tiny: Model, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    tiny.generate("canary", max_tokens=3)
    assert "canary" not in caplog.text


def test_a_program_that_leaves_in_the_middle_of_a_reply_ends(tiny_model: Callable[..., Path]) -> None:
    code = f"""
import edgert
model = edgert.load({str(tiny_model("llama"))!r}, n_ctx=512)
stream = model.generate("x", stream=True, ignore_eos=True)
print(next(stream).finish_reason)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")


# Text


def test_tokens_and_back(smollm2: Model, gemma3: Model) -> None:
    for model in (smollm2, gemma3):
        for text in ("Hello world", "Crème brûlée — 456 🙂", "\t\t\t\t\t\ttest", "a  b\n\n\nc"):
            assert model.detokenize(model.tokenize(text)) == text
    assert smollm2.tokenize("<|im_end|>", parse_special=True) == [2]
    assert 2 not in smollm2.tokenize("<|im_end|>")
    assert gemma3.tokenize("x")[0] == 2
    assert gemma3.tokenize("x", add_special=False)[0] != 2


def test_a_verdict_says_what_runs_and_why(smollm2: Model) -> None:
    assert smollm2.verdict.backend == "cpu"
    assert smollm2.verdict.reason in str(smollm2.verdict)


def test_logits(smollm2: Model) -> None:
    ids = smollm2.tokenize("The capital of France is")
    logits = smollm2.logits(ids)
    assert (logits.shape, logits.dtype) == ((len(ids), smollm2.n_vocab), np.float32)
    assert smollm2.detokenize([int(logits[-1].argmax())]) == " Paris"
    assert smollm2.generate(ids, max_tokens=1, temperature=0).tokens == [logits[-1].argmax()]
    assert (smollm2.logits("The capital of France is") == logits).all()
    scores = smollm2.generate(ids, max_tokens=1, temperature=0, top_logprobs=2).logprobs[0]
    exact = logits[-1].astype(np.float64)
    assert scores.logprob == pytest.approx(
        exact.max() - np.log(np.exp(exact - exact.max()).sum()) - exact.max(), abs=1e-3
    )
    with pytest.raises(RequestError, match="prompt"):
        smollm2.logits([10**6])
    with pytest.raises(ContextFullError):
        smollm2.logits([1] * 1025)


def test_logits_of_a_text_longer_than_a_batch(tiny_model: Callable[..., Path]) -> None:
    ids = [5 + i % 200 for i in range(400)]
    with edgert.load(tiny_model("llama"), n_ctx=512, n_batch=512) as whole:
        expected = whole.logits(ids)
    with edgert.load(tiny_model("llama"), n_ctx=512, n_batch=64) as parts:
        np.testing.assert_allclose(parts.logits(ids), expected, atol=2e-2)


def test_the_length_of_the_context(tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_model("llama", n_ctx=300)
    for asked, given in ((None, 300), (0, 300), (64, 64), (400, 400)):
        with edgert.load(path, n_ctx=asked) as model:
            assert model.n_ctx == given
        assert ("trained on" in caplog.text) == (asked == 400)
    for wrong in (-1, 2**40, 1.5, "many", True):
        with pytest.raises(EdgertError, match="n_ctx"):
            edgert.load(path, n_ctx=wrong)  # type: ignore[arg-type]


# Streaming and stopping


def test_stream_equals_reply(smollm2: Model, gemma3: Model) -> None:
    for model in (smollm2, gemma3):
        chunks = list(model.chat(ask("Write a line about rain."), True, temperature=0, max_tokens=64))
        reply = model.chat(ask("Write a line about rain."), temperature=0, max_tokens=64)
        assert "".join(chunk.text for chunk in chunks) == reply.text
        assert [token for chunk in chunks for token in chunk.tokens] == reply.tokens
        assert model.detokenize(reply.tokens) == reply.text
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_gemma_ends_at_either_of_its_end_tokens(gemma3: Model) -> None:
    assert {1, 106} <= set(gemma3.tokenizer.end_ids)
    for end in (1, 106):
        reply = gemma3.chat(ask("Say hello."), temperature=0, max_tokens=20, stop=[], logit_bias={end: 100})
        assert (reply.text, reply.tokens, reply.finish_reason) == ("", [], "stop")
    reply = gemma3.chat(ask("Say hello."), temperature=0, max_tokens=20, ignore_eos=True, logit_bias={106: 100})
    assert (len(reply.tokens), reply.finish_reason) == (20, "length")
    assert 106 not in reply.tokens


def test_a_stop_over_three_tokens_of_the_known_answer(smollm2: Model) -> None:
    full = smollm2.chat(ask("Hi"), temperature=0)
    assert full.finish_reason == "stop"
    at = len(full.tokens) // 2
    stop = smollm2.detokenize(full.tokens[at : at + 3])
    before = full.text[: full.text.index(stop)]
    chunks = list(smollm2.chat(ask("Hi"), True, temperature=0, stop=stop))
    assert "".join(chunk.text for chunk in chunks) == before
    assert chunks[-1].finish_reason == "stop"
    late = list(smollm2.chat(ask("Hi"), True, temperature=0, stop="x" * 200))
    first = late[0].tokens  # more than one where guesses were right
    assert late[0].text and first == full.tokens[: len(first)]
    assert len(late) > 1
    assert "".join(chunk.text for chunk in late) == full.text


# Sampling


def test_greedy_gives_one_answer(smollm2: Model) -> None:
    texts = {smollm2.chat(ask("Name a fruit."), temperature=0, seed=i, max_tokens=12).text for i in range(20)}
    assert len(texts) == 1


def test_without_a_seed_answers_differ_with_one_they_repeat(smollm2: Model) -> None:
    def hot(**params: Any) -> str:
        return smollm2.chat(ask("Name a fruit."), temperature=1.5, max_tokens=12, **params).text

    assert len({hot() for _ in range(10)}) > 1
    assert len({hot(seed=7) for _ in range(5)}) == 1


def test_defaults_come_from_the_file_and_the_caller(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model(
        "llama", metadata={"general.sampling.temp": 0.25, "general.sampling.top_k": 7, "general.sampling.top_p": 0.5}
    )
    with edgert.load(path, n_ctx=64, sampling={"top_k": 3}) as model:
        d = model.defaults
        assert (d.temperature, d.top_k, d.top_p, d.min_p) == (0.25, 3, 0.5, 0.05)
    with pytest.raises(RequestError, match="top_k"):
        edgert.load(path, sampling={"top_k": -3})


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [math.nan, 1e999, -1, "0.7", True])
def test_wrong_values_name_the_field_and_harm_nothing(tiny: Model, name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        tiny.generate("x", max_tokens=1, **{name: value})
    assert caught.value.field == name
    assert tiny.generate("x", max_tokens=1).tokens


def test_logits_that_are_no_numbers_are_an_error_of_the_request(tiny_model: Callable[..., Path]) -> None:
    bad = np.ones(128, np.float32)
    bad[5] = np.nan
    try:
        with edgert.load(tiny_model("llama", weights={"output_norm.weight": bad}), n_ctx=64) as model:
            for _ in range(2):
                with pytest.raises(EdgertError, match="not a finite number"):
                    model.generate("x", max_tokens=1)
    except EdgertError as error:
        assert "output_norm.weight" in str(error)


# Limits


def test_a_prompt_beyond_the_context_is_refused_with_both_counts(smollm2: Model) -> None:
    text = "The secret word is aubergine. " + "More words follow here. " * 500
    with pytest.raises(ContextFullError) as caught:
        smollm2.chat(ask(text))
    assert caught.value.n_ctx == 1024
    assert caught.value.n_tokens == len(smollm2.render(ask(text))) > 2048
    assert str(caught.value.n_tokens) in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_length_near_the_sizes_of_the_engine(tiny_model: Callable[..., Path], family: str) -> None:
    with edgert.load(tiny_model(family), n_ctx=160, n_batch=64, sampling={"temperature": 0}) as model:
        page = 16
        sizes = {160, 64, 128, page, 2 * page}
        lengths = sorted({1} | {size + d for size in sizes for d in range(-5, 6)})
        for length in lengths:
            prompt = [5 + (3 * i + length) % 250 for i in range(length)]
            if length > 160:
                with pytest.raises(ContextFullError):
                    model.generate(prompt)
                continue
            reply = model.generate(prompt, max_tokens=3, ignore_eos=True)
            assert len(reply.tokens) == min(3, 161 - length)
            assert reply.finish_reason == "length"


def test_no_limit_means_until_the_end(smollm2: Model) -> None:
    for limit in ({}, {"max_tokens": -1}, {"max_tokens": None}):
        reply = smollm2.chat(ask("Hi"), temperature=0, **limit)  # type: ignore[arg-type]
        assert reply.finish_reason == "stop"
        assert len(reply.tokens) > 0
    assert smollm2.generate("Once upon", max_tokens=16, temperature=0).finish_reason == "length"


# Cache and concurrency


def test_a_turn_of_a_chat_reads_only_what_is_new(smollm2: Model) -> None:
    messages = ask("Hello there, please answer in a few words.")
    first = smollm2.chat(messages, temperature=0, max_tokens=20)
    messages += [{"role": "assistant", "content": first.text}, *ask("Thank you. And now?")]
    second = smollm2.chat(messages, temperature=0, max_tokens=20)
    assert second.stats.cache_n >= first.stats.cache_n + first.stats.prompt_n
    assert second.stats.cache_n + second.stats.prompt_n == len(smollm2.render(messages))
    assert second.stats.prompt_n < 40


def test_turns_beyond_the_window_equal_cold_ones(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("gemma3")
    prompt: list[int] = []
    with edgert.load(path, n_ctx=500, sampling={"temperature": 0}) as warm:
        for turn in range(5):
            prompt += [5 + (7 * i + turn) % 250 for i in range(40)]
            reply = warm.generate(prompt, max_tokens=20, ignore_eos=True)
            assert reply.stats.prompt_n <= 41
            with edgert.load(path, n_ctx=500, sampling={"temperature": 0}) as cold:
                assert cold.generate(prompt, max_tokens=20, ignore_eos=True).tokens == reply.tokens
            prompt += reply.tokens


def test_threads_get_what_they_would_get_alone(smollm2: Model) -> None:
    questions = [f"Tell me about the number {i}." for i in range(6)]
    alone = [smollm2.chat(ask(q), temperature=0, max_tokens=16).text for q in questions]
    together: dict[str, str] = {}

    def run(question: str) -> None:
        together[question] = smollm2.chat(ask(question), temperature=0, max_tokens=16).text

    threads = [threading.Thread(target=run, args=(q,)) for q in questions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[q] for q in questions] == alone


def test_cancel_from_another_thread(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = smollm2.backend._walk  # type: ignore[attr-defined]
    unwanted: list[Any] = []
    after = 0

    def counted(*arguments: Any) -> Any:
        nonlocal after
        if unwanted and not after:
            thread = threading.Thread(target=unwanted[0].cancel)
            thread.start()
            thread.join()
        after += bool(unwanted)
        return walk(*arguments)

    monkeypatch.setattr(smollm2.backend, "_walk", counted)
    stream = smollm2.chat(ask("Count to a million."), True, temperature=0, ignore_eos=True)
    next(stream)
    unwanted.append(stream)
    assert stream.reply().finish_reason == "cancelled"
    assert 1 <= after <= 2  # that on its way, and what it was for
