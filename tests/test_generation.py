"""The engine's loop on a scripted backend: limits, prefix reuse, sharing, statistics."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
from fake import BOS, END_OF_TURN, EOS, backend_of, fake_model, hashed, held, says
from hypothesis import given, settings
from hypothesis import strategies as st

from edgert.errors import ContextFullError, RequestError
from edgert.options import SamplingParams
from edgert.reply import Progress

# Limits


def test_every_end_token_ends_and_none_is_shown() -> None:
    for end in (EOS, END_OF_TURN):
        with fake_model(says("Hi", end)) as model:
            reply = model.chat([{"role": "user", "content": "Hello"}])
            assert (reply.text, reply.finish_reason) == ("Hi", "stop")
            assert reply.tokens == list(b"Hi")
            assert reply.stats.predicted_n == 3


@pytest.mark.parametrize("limit", [-1, None])
def test_without_a_limit_the_model_ends_its_turn(limit: int | None) -> None:
    with fake_model(says("x" * 100)) as model:
        reply = model.generate("\n", max_tokens=limit)
        assert (len(reply.text), reply.finish_reason) == (100, "stop")


@pytest.mark.parametrize("limit", range(6))
def test_a_limit_inside_a_character(limit: int) -> None:
    with fake_model(says("é🙂")) as model:
        reply = model.generate("\n", max_tokens=limit)
        assert reply.finish_reason == "length"
        assert reply.text == "é🙂".encode()[:limit].decode("utf-8", "replace")
        assert len(reply.tokens) == reply.stats.predicted_n == limit
        chunks = list(model.generate("\n", True, max_tokens=limit))
        assert "".join(c.text for c in chunks) == reply.text


def test_ignore_eos_runs_until_the_context_is_full() -> None:
    with fake_model(says("ab"), n_ctx=64) as model:
        reply = model.generate("\n", ignore_eos=True)
        assert reply.finish_reason == "length"
        assert len(reply.tokens) == 64 - 2 + 1  # the last one need not be evaluated


@pytest.mark.parametrize("n_ctx, n_batch", [(64, 16), (64, 64), (64, 100), (40, 7)])
def test_every_length_near_the_sizes(n_ctx: int, n_batch: int) -> None:
    with fake_model(n_ctx=n_ctx, n_batch=n_batch) as model:
        lengths = {n + d for n in (n_ctx, n_batch, 2 * n_batch) for d in range(-5, 6)} | {1, 2}
        for length in sorted(lengths - set(range(-5, 1))):
            prompt = [(7 * i + length) % 200 for i in range(length)]
            if length > n_ctx:
                with pytest.raises(ContextFullError) as caught:
                    model.generate(prompt)
                assert (caught.value.n_tokens, caught.value.n_ctx) == (length, n_ctx)
                assert str(length) in str(caught.value) and str(n_ctx) in str(caught.value)
                continue
            reply = model.generate(prompt, max_tokens=8)
            room = n_ctx - length + 1
            assert len(reply.tokens) == min(8, room)
            assert reply.finish_reason == "length"
            told = list(prompt)
            for token in reply.tokens:
                assert token == hashed(told)
                told.append(token)


def test_the_empty_prompt() -> None:
    with fake_model() as model:
        assert model.generate("", max_tokens=1).tokens == [hashed([BOS])]
        assert model.generate([], max_tokens=1).tokens == [hashed([BOS])]
        model.tokenizer.bos_id = None  # type: ignore[misc]
        with pytest.raises(RequestError, match="prompt"):
            model.generate([])


@pytest.mark.parametrize("prompt", [[-1], [10**6], [1 << 70], [1.5], ["a"], [[1], [2]], [[1], [2, 3]], [True]])
def test_wrong_prompts(prompt: Any) -> None:
    with fake_model() as model:
        with pytest.raises(RequestError, match="prompt"):
            model.generate(prompt)
        assert model.generate([1], max_tokens=1).tokens


# Prefix reuse


def test_a_turn_reads_only_what_is_new() -> None:
    with fake_model(says("fine")) as model:
        messages = [{"role": "user", "content": "how are you"}]
        first = model.chat(messages)
        assert first.stats.cache_n == 0
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "good"}]
        second = model.chat(messages)
        before, after = len(model.render(messages[:1])), len(model.render(messages))
        assert (second.stats.cache_n, second.stats.prompt_n) == (before, after - before)
        again = model.chat(messages)
        assert (again.stats.cache_n, again.stats.prompt_n) == (after - 1, 1)
        assert again.text == second.text == first.text


def test_the_same_prompt_three_times() -> None:
    with fake_model() as model:
        assert len({model.generate("same", max_tokens=20).text for _ in range(3)}) == 1


@settings(max_examples=60)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=12),
    n_seq_max=st.integers(1, 3),
)
def test_warm_equals_cold(prompts: list[list[int]], n_seq_max: int) -> None:
    with fake_model(n_ctx=48, n_batch=8, n_seq_max=n_seq_max) as model:
        for prompt in prompts:
            told = list(prompt)
            for token in model.generate(prompt, max_tokens=5).tokens:
                assert token == hashed(told)
                told.append(token)


def test_a_short_common_beginning_does_not_cost_another_chat_its_cache() -> None:
    with fake_model(n_seq_max=3) as model:
        system = "system"
        one, two = system + "A" * 60, system + "B" * 60
        for prompt in (one, two):
            model.generate(prompt, max_tokens=1)
        assert model.generate(one, max_tokens=1).stats.prompt_n == 1
        assert model.generate(two, max_tokens=1).stats.prompt_n == 1
        assert model.generate(system + "C", max_tokens=1).stats.cache_n == 1 + len(system)


# Many at once


def test_requests_share_steps_and_do_not_mix() -> None:
    with fake_model(n_seq_max=4, n_ctx=128, delay=0.0005) as model:
        alone = {f"p{i}": model.generate(f"p{i}", max_tokens=40).text for i in range(8)}
    with fake_model(n_seq_max=4, n_ctx=128, delay=0.0005) as model:
        wrong: list[str] = []

        def ask(name: str) -> None:
            for _ in range(3):
                if model.generate(name, max_tokens=40).text != alone[name]:
                    wrong.append(name)

        threads = [threading.Thread(target=ask, args=(name,)) for name in alone]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert wrong == []
        assert max(len(set(batch.sequences)) for batch in backend_of(model).batches) == 4


def test_ten_requests_in_a_tiny_context_without_an_end_do_end() -> None:
    with fake_model(says("a"), n_ctx=48, n_seq_max=3) as model:
        streams = [model.generate("x" * 20 + "\n", True, ignore_eos=True) for _ in range(10)]
        assert {stream.reply().finish_reason for stream in streams} == {"length"}


def test_a_long_prompt_does_not_stop_a_running_reply() -> None:
    """How much of it a step reads is tested in test_schedule.py, and measured by tests/bench/together.py."""
    with fake_model(n_ctx=4000, n_batch=512) as model:
        backend_of(model).before_forward = lambda batch: time.sleep(0.002 + 0.0002 * len(batch))
        with held(backend_of(model), after=3):
            running = model.generate("run", True, max_tokens=300)
            next(running)
            next(running)
            long = model.generate("y" * 2000, True, max_tokens=1)
        long.reply()
        mixed = [b for b in backend_of(model).batches if len(set(b.sequences)) == 2]
        assert len(mixed) > 2000 // 512 + 1
        assert all(b.wanted[0] for b in mixed)
        assert len(running.reply().tokens) == 300


# Progress, statistics, log probabilities


def test_progress_of_a_long_prompt() -> None:
    with fake_model(n_ctx=500, n_batch=50) as model:
        model.generate("y" * 99, max_tokens=1)
        seen: list[Progress] = []
        model.generate("y" * 400, on_progress=seen.append, max_tokens=1)
        assert [p.processed for p in seen] == [100, 150, 200, 250, 300, 350, 400, 401]
        assert {(p.total, p.cache) for p in seen} == {(401, 100)}
        assert all(a.time_ms <= b.time_ms for a, b in itertools.pairwise(seen))


def test_statistics_count_and_agree() -> None:
    with fake_model(delay=0.002) as model:
        began = time.perf_counter()
        stats = model.generate("abc", max_tokens=10).stats
        spent = 1e3 * (time.perf_counter() - began)
        assert (stats.cache_n, stats.prompt_n, stats.predicted_n) == (0, 4, 10)
        assert stats.prompt_ms >= 2 and stats.predicted_ms >= 18  # the steps of each took as long
        assert stats.prompt_ms + stats.predicted_ms <= spent
        assert stats.predicted_per_second == pytest.approx(9e3 / stats.predicted_ms)
        assert stats.prompt_per_second == pytest.approx(4e3 / stats.prompt_ms)
        assert set(stats.as_dict()) == {
            *("cache_n", "prompt_n", "prompt_ms", "prompt_per_second"),
            *("predicted_n", "predicted_ms", "predicted_per_second"),
            *("draft_n", "draft_n_accepted", "draft_positions"),
        }


def test_logprobs_come_with_the_tokens() -> None:
    with fake_model(says("héy")) as model:
        reply = model.generate("\n", top_logprobs=3)
        assert [s.token for s in reply.logprobs] == reply.tokens
        for score in reply.logprobs:
            assert score.top[0] == (score.token, score.logprob)
            assert len(score.top) == 3
        assert model.generate("\n").logprobs == []


def test_the_seed_is_told_and_repeats_the_text() -> None:
    hot = SamplingParams(temperature=50, top_k=0, top_p=1, min_p=0)
    with fake_model(defaults=hot) as model:
        first = model.generate("x", max_tokens=30)
        assert model.generate("x", max_tokens=30, seed=first.seed).tokens == first.tokens
        assert len({tuple(model.generate("x", max_tokens=30).tokens) for _ in range(10)}) == 10
