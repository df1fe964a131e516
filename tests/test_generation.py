"""The engine's loop on a scripted backend: stopping, limits, prefix reuse, sharing, cancelling, failing."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import os
import pickle
import random
import signal
import threading
import time
from typing import Any

import pytest
from fake import BOS, END_OF_TURN, EOS, FakeBackend, fake_model, hashed, says
from hypothesis import given, settings
from hypothesis import strategies as st

from edgert.errors import ContextFullError, DoesNotFitError, EdgertError, RequestError
from edgert.model import Model
from edgert.options import SamplingParams
from edgert.reply import Progress
from edgert.stopping import StopStrings


def fake(model: Model) -> FakeBackend:
    assert isinstance(model.backend, FakeBackend)
    return model.backend


def wait_for(condition: Any, seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.001)


# Stop strings


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_what_is_shown_does_not_depend_on_the_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    ends = [(i + len(s), i) for s in stops for i in range(len(text)) if text.startswith(s, i)]
    expected = text[: min(ends)[1]] if ends else text
    borders = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    rule, shown, stopped = StopStrings(stops), "", False
    for a, b in itertools.pairwise(borders):
        piece, stopped = rule.push(text[a:b])
        shown += piece
        assert expected.startswith(shown)
        if stopped:
            break
    assert stopped == bool(ends)
    assert shown + rule.flush() == expected


def test_only_what_may_become_a_stop_is_held_back() -> None:
    rule = StopStrings(["x" * 200, "END"])
    assert rule.push("Hello E") == ("Hello ", False)
    assert rule.push("N") == ("", False)
    assert rule.push("Tx") == ("ENT", False)
    assert rule.push("y") == ("xy", False)


def test_stop_string_over_several_tokens_is_never_sent() -> None:
    with fake_model(says("one two three four")) as model:
        chunks = list(model.generate("\n", True, stop="two three"))
        assert "".join(c.text for c in chunks) == "one "
        assert [c.text for c in chunks if "t" in c.text] == []
        assert chunks[-1].finish_reason == "stop"
        assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_a_long_stop_that_never_comes_delays_nothing() -> None:
    with fake_model(says("one two three four")) as model:
        stop = "one two three five" + "x" * 200
        texts = [c.text for c in model.generate("\n", True, stop=stop)]
        assert texts == ["one two three f", "ou", "r", ""]
        texts = [c.text for c in model.generate("\n", True, stop="y" * 200)]
        assert texts == [*"one two three four", ""]


def test_a_stop_cut_short_by_the_end_is_shown() -> None:
    with fake_model(says("one tw")) as model:
        reply = model.generate("\n", stop=["two"])
        assert (reply.text, reply.finish_reason) == ("one tw", "stop")
        reply = model.generate("\n", stop=["two"], max_tokens=5)
        assert (reply.text, reply.finish_reason) == ("one t", "length")


@pytest.mark.parametrize("stop", ["", [], ["", ""], [""]])
def test_empty_stops_are_ignored(stop: Any) -> None:
    with fake_model(says("text", END_OF_TURN)) as model:
        reply = model.generate("\n", stop=stop)
        assert (reply.text, reply.finish_reason) == ("text", "stop")


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


@settings(max_examples=60, deadline=None)
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
        assert max(len(set(batch.sequences)) for batch in fake(model).batches) == 4


def test_ten_requests_in_a_tiny_context_without_an_end_do_end() -> None:
    with fake_model(says("a"), n_ctx=48, n_seq_max=3) as model:
        streams = [model.generate("x" * 20 + "\n", True, ignore_eos=True) for _ in range(10)]
        assert {stream.reply().finish_reason for stream in streams} == {"length"}


def test_a_long_prompt_does_not_stop_a_running_reply() -> None:
    """How much of it a step reads is tested in test_schedule.py, and measured by tests/bench/stall.py."""
    with fake_model(n_ctx=4000, n_batch=512) as model:
        fake(model).before_forward = lambda batch: time.sleep(0.002 + 0.0002 * len(batch))
        running = model.generate("run", True, max_tokens=300)
        next(running)
        next(running)
        model.generate("y" * 2000, max_tokens=1)
        mixed = [b for b in fake(model).batches if len(set(b.sequences)) == 2]
        assert len(mixed) > 2000 // 512 + 1
        assert all(b.wanted[0] for b in mixed)
        assert len(running.reply().tokens) == 300


# Cancelling


def test_cancel_from_another_thread_ends_within_one_step() -> None:
    with fake_model(delay=0.01) as model:
        stream = model.generate("long", True)
        next(stream)
        timer = threading.Timer(0.05, stream.cancel)
        timer.start()
        reply = stream.reply()
        timer.join()
        assert reply.finish_reason == "cancelled"
        assert 0 < len(reply.tokens) < 12
        assert reply.stats.predicted_n == len(reply.tokens)
        n = len(fake(model).batches)
        time.sleep(0.05)
        assert len(fake(model).batches) == n


def test_cancel_between_the_chunks_of_a_prompt() -> None:
    with fake_model(n_ctx=4000, n_batch=10, delay=0.005) as model:
        stream = model.generate("y" * 3000, True)
        wait_for(lambda: len(fake(model).batches) > 2)
        stream.cancel()
        reply = stream.reply()
        assert (reply.text, reply.finish_reason) == ("", "cancelled")
        assert 0 < reply.stats.prompt_n < 200
        # what was read is not lost
        again = model.generate("y" * 40, max_tokens=1)
        assert again.stats.cache_n > 0


def test_cancelled_in_the_queue_never_runs() -> None:
    with fake_model(n_seq_max=1, delay=0.002) as model:
        first = model.generate("first", True, max_tokens=50)
        next(first)
        queued = [model.generate(f"queued{i}", True, max_tokens=5) for i in range(5)]
        for stream in queued:
            stream.cancel()
        assert {stream.reply().finish_reason for stream in queued} == {"cancelled"}
        assert len(first.reply().tokens) == 50
        assert fake(model).n_evaluated == len(model.tokenize("first")) + 49


def test_a_dropped_or_closed_stream_frees_its_place() -> None:
    with fake_model(n_seq_max=1, n_ctx=10_000, delay=0.001) as model:
        for chunk in model.generate("dropped", True):
            assert chunk.text
            break
        gc.collect()
        assert model.generate("next", max_tokens=3).finish_reason == "length"
        with model.generate("closed", True) as stream:
            next(stream)
        assert list(stream) == []
        with pytest.raises(ValueError, match="closed"):
            stream.reply()
        assert model.generate("next", max_tokens=3).finish_reason == "length"


def test_closing_the_model_ends_what_runs() -> None:
    model = fake_model(n_seq_max=1, delay=0.001, n_ctx=10_000)
    running, queued = (model.generate(text, True) for text in ("a", "b"))
    next(running)
    model.close()
    model.close()
    for stream in (running, queued):
        with pytest.raises(EdgertError, match="closed"):
            stream.reply()
    with pytest.raises(EdgertError, match="closed"):
        model.generate("c")
    assert fake(model).closed


def test_a_reply_that_is_read_keeps_its_model_open() -> None:
    chunks = list(fake_model(n_ctx=64, delay=0.001).generate("\n", True, max_tokens=9))
    assert sum(len(chunk.tokens) for chunk in chunks) == 9
    model = fake_model()
    backend, stream = fake(model), model.generate("a", True, max_tokens=3)
    del model
    gc.collect()
    assert len(stream.reply().tokens) == 3
    gc.collect()  # the stream is still here, and has let go of its model
    assert backend.closed


def test_all_threads_that_read_a_stream_come_to_its_end() -> None:
    with fake_model(delay=0.001) as model:
        stream, n_read = model.generate("a", True, max_tokens=20), []
        threads = [
            threading.Thread(target=lambda: n_read.append(sum(len(chunk.tokens) for chunk in stream)), daemon=True)
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(n_read) == 4 and sum(n_read) == 20

        def fail(batch: Any) -> None:
            raise MemoryError

        fake(model).before_forward = fail
        failing, errors = model.generate("b", True), []

        def read() -> None:
            try:
                list(failing)
            except MemoryError as error:
                errors.append(error)

        threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert len(errors) == 1


@pytest.mark.parametrize("what", ["generate", "reply", "iterate", "logits", "on_progress"])
def test_an_interruption_of_the_reader_ends_the_request(what: str) -> None:
    """Also where a debugger or an interactive Python keeps the frames that were interrupted."""
    with fake_model(n_ctx=100_000, delay=0.001) as model:
        stream = None if what in ("generate", "logits") else model.generate("a", True)
        if what == "on_progress":

            def fail(progress: Progress) -> None:
                raise KeyboardInterrupt

            stream = model.generate("a", True, on_progress=fail)
        else:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt) as kept:
            if stream is None:
                model.logits([1] * 99_000) if what == "logits" else model.generate("a")
            elif what == "reply":
                stream.reply()
            else:
                list(stream)
        wait_for(lambda: not model._engine._running and not len(model._engine._queue))
        assert kept.value and model.generate("b", max_tokens=2).finish_reason == "length"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_to_load_the_model_itself() -> None:
    with fake_model(n_ctx=100_000, delay=0.001) as model:
        running = model.generate("a", True)
        next(running)

        def child() -> None:
            for call in (running.reply, lambda: model.generate("b"), lambda: model.logits("b")):
                with pytest.raises(EdgertError, match="loaded before this process was forked"):
                    call()
            model.close()

        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child()
                code = 0
            finally:
                os._exit(code)
        try:
            wait_for(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG), 20)
        finally:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert next(running).finish_reason is None
        assert model.generate("b", max_tokens=3).finish_reason == "length"


def test_models_and_streams_cannot_be_copied() -> None:
    """A copy would cancel or close what the original works with."""
    with fake_model() as model:
        stream = model.generate("a", True, max_tokens=3)
        for original in (model, stream):
            for copied in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="cannot be copied or pickled"):
                    copied(original)
        gc.collect()
        reply = stream.reply()
        assert len(reply.tokens) == 3 and pickle.loads(pickle.dumps(reply)) == reply


def test_a_forgotten_model_is_closed() -> None:
    model = fake_model()
    backend = fake(model)
    model.generate("a", max_tokens=1)
    del model
    gc.collect()
    assert backend.closed


# Failing


def test_a_failure_during_a_stream_is_not_taken_for_an_end() -> None:
    with fake_model() as model:

        def fail(batch: Any) -> None:
            if len(fake(model).batches) == 5:
                fake(model).batches.append(batch)
                raise OSError("the disk is gone")

        fake(model).before_forward = fail
        stream = model.generate("x", True, max_tokens=20)
        chunks = []
        with pytest.raises(OSError, match="disk"):
            for chunk in stream:
                chunks.append(chunk)
        assert len(chunks) == 5
        assert {chunk.finish_reason for chunk in chunks} == {None}
        assert list(stream) == []
        assert len(fake(model).batches) == 6
        assert len(model.generate("x", max_tokens=20).tokens) == 20


def test_an_engine_that_breaks_says_so_to_all_and_takes_no_more_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_model(n_seq_max=1, delay=0.002) as model:
        running, queued = (model.generate(text, True, max_tokens=30) for text in ("a", "b"))
        next(running)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        monkeypatch.setattr(fake(model), "length", lambda _: 1 / 0)
        assert running.reply().finish_reason == "length"
        with pytest.raises(EdgertError, match="closed"):
            queued.reply()
        with pytest.raises(EdgertError, match="closed"):
            model.generate("c")
    assert fake(model).closed


def test_logits_that_are_no_numbers_end_one_request_only() -> None:
    with fake_model(delay=0.001) as model:
        good = model.generate("good", True, max_tokens=100)
        next(good)

        def poison(logits: Any) -> None:
            if threading.current_thread().name == "edgert-engine" and bad_runs.is_set():
                logits[3] = float("nan")
                bad_runs.clear()

        bad_runs = threading.Event()
        fake(model).bend = poison
        backend = fake(model)
        original = backend._logits

        def logits(cells: list[int]) -> Any:
            if bytes(cells[1:4]) == b"bad":
                bad_runs.set()
            return original(cells)

        backend._logits = logits  # type: ignore[method-assign]
        with pytest.raises(EdgertError, match="not a finite number"):
            model.generate("bad", max_tokens=10)
        assert len(good.reply().tokens) == 100


def bound(model: Model, n_cells: int) -> FakeBackend:
    """Lets all sequences together have so many positions."""
    backend = fake(model)

    def check(batch: Any) -> None:
        if backend.memory()["kv"] + len(batch) > n_cells:
            raise DoesNotFitError("the cache is full")

    backend.before_forward = check
    return backend


def test_a_full_cache_costs_idle_prefixes_first() -> None:
    with fake_model(n_seq_max=3, n_ctx=300, n_batch=300) as model:
        bound(model, 200)
        for text in ("a" * 90, "b" * 90):
            model.generate(text, max_tokens=1)
        assert model.generate("c" * 150, max_tokens=1).tokens
        with pytest.raises(DoesNotFitError):
            model.generate("d" * 250, max_tokens=1)
        assert model.generate("c" * 150, max_tokens=1).stats.cache_n == 1  # d's begin token
        assert model.generate("c" * 150, max_tokens=1).stats.prompt_n == 1


def test_who_lacks_room_in_the_cache_waits_and_loses_nothing() -> None:
    with fake_model(n_seq_max=4, n_ctx=200, n_batch=30, delay=0.0003) as model:
        alone = {f"{i}" * 60: model.generate(f"{i}" * 60, max_tokens=90) for i in range(5)}
        bound(model, 200)
        streams = {prompt: model.generate(prompt, True, max_tokens=90) for prompt in alone}
        for prompt, stream in streams.items():
            reply = stream.reply()
            assert (reply.text, reply.finish_reason) == (alone[prompt].text, "length")
            assert reply.stats.prompt_n + reply.stats.cache_n == 61
            assert reply.stats.predicted_n == 90
        assert any(len(set(batch.sequences)) > 1 for batch in fake(model).batches)


def test_four_requests_of_a_whole_context_each() -> None:
    with fake_model(n_seq_max=4, n_ctx=128, n_batch=30) as model:
        alone = [model.generate(f"{i}", ignore_eos=True).text for i in range(4)]
        bound(model, 128)
        streams = [model.generate(f"{i}", True, ignore_eos=True) for i in range(4)]
        replies = [stream.reply() for stream in streams]
        assert [reply.text for reply in replies] == alone
        assert {reply.finish_reason for reply in replies} == {"length"}


def test_a_crowd_that_asks_cancels_and_fails_at_random() -> None:
    rng = random.Random(0)
    with fake_model(n_seq_max=3, n_ctx=120, n_batch=16) as model:
        backend = bound(model, 200)
        check = backend.before_forward
        faults = iter(rng.random() < 0.002 for _ in iter(int, 1))

        def sometimes_fail(batch: Any) -> None:
            if next(faults):
                raise OSError("fault")
            assert check
            check(batch)

        backend.before_forward = sometimes_fail
        wrong: list[str] = []
        n_done = [0, 0, 0]

        def client(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(40):
                prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 90))]
                stream = model.generate(prompt, True, max_tokens=rng.randrange(1, 40))
                patience = rng.choice([None, None, rng.randrange(1, 10)])
                tokens: list[int] = []
                try:
                    for n, chunk in enumerate(stream):
                        tokens += chunk.tokens
                        if n == patience:
                            stream.cancel()
                    n_done[chunk.finish_reason == "cancelled"] += 1
                except OSError:
                    n_done[2] += 1
                for i, token in enumerate(tokens):
                    if token != hashed(prompt + tokens[:i]):
                        wrong.append(f"{prompt} {tokens}")

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        assert sum(n_done) == 8 * 40
        assert min(n_done) > 0
        assert all(slot.task is None for slot in model._engine._slots._slots)
        assert [slot.n_cached for slot in model._engine._slots._slots] == [len(c) for c in backend.cells.values()]


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
        stats = model.generate("abc", max_tokens=10).stats
        assert (stats.cache_n, stats.prompt_n, stats.predicted_n) == (0, 4, 10)
        assert 2 <= stats.prompt_ms < 200
        assert 18 <= stats.predicted_ms < 400
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


# Event loops


def test_async_streams_replies_and_cancellation() -> None:
    async def main(model: Model) -> None:
        texts = [chunk.text async for chunk in model.generate("x", True, max_tokens=9)]
        assert "".join(texts) == model.generate("x", max_tokens=9).text
        replies = await asyncio.gather(*(model.agenerate(f"q{i}", max_tokens=20) for i in range(6)))
        for i, reply in enumerate(replies):
            assert reply.tokens == model.generate(f"q{i}", max_tokens=20).tokens
        chat = await model.achat([{"role": "user", "content": "x"}], max_tokens=2)
        assert chat.finish_reason == "length"

        ticks = 0
        endless = asyncio.create_task(_reply(model.generate("endless", True)))
        while ticks < 20:
            await asyncio.sleep(0.001)
            ticks += 1
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        n = len(fake(model).batches)
        await asyncio.sleep(0.05)
        assert len(fake(model).batches) <= n + 1

    async def _reply(stream: Any) -> Any:
        return await stream

    with fake_model(n_ctx=100_000, delay=0.001) as model:
        asyncio.run(main(model))
        assert len(model.generate("x", max_tokens=3).tokens) == 3


def test_an_event_loop_that_is_gone_ends_its_request() -> None:
    with fake_model(n_ctx=100_000, delay=0.001) as model:

        async def start() -> Any:
            stream = model.generate("x", True)
            await anext(stream)
            return stream

        stream = asyncio.run(start())
        wait_for(lambda: stream._task.done)


def test_a_second_event_loop_reads_on() -> None:
    with fake_model(n_ctx=100_000, delay=0.001) as model:
        stream = model.generate("x", True)

        async def some() -> str:
            return (await anext(stream)).text

        assert asyncio.run(some()) and asyncio.run(some())
        assert list(stream)[-1].finish_reason == "cancelled"  # the first loop was gone
