"""More than the machine can do at once: queues, refusals, time-outs, memory, faults."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest
from fake import PATIENCE, FakeBackend, FakeTokenizer, fake_model, prompt_of, told
from paged_fake import PagedFake
from test_engine_schedules import by_hand, check, finish, generation, result

from edgert.backends.base import Batch
from edgert.errors import DoesNotFitError, QueueFullError, QueueTimeoutError, RequestError
from edgert.generation import Engine, Limits
from edgert.model import Model

# The queue


@pytest.mark.parametrize("n_parallel", [0, -1, 1.5, 10**9])
def test_odd_numbers_of_requests_at_once_are_refused(n_parallel: float) -> None:
    with pytest.raises(RequestError, match="n_parallel"):
        Limits(n_parallel=n_parallel)  # type: ignore[arg-type]


def test_six_hundred_at_once() -> None:
    """Those for whom there is no place hear it at once, with a time to come again; all others are answered."""
    model = fake_model(n_seq_max=4, delay=0.0002)
    engine = model._engine = Engine(model.backend, None, Limits(n_parallel=4, n_queue=100))
    refused: list[float] = []
    answered: list[bool] = []

    def ask(i: int) -> None:
        began = time.thread_time()
        try:
            stream = model.generate(prompt_of(i, 5), True, max_tokens=4)
        except QueueFullError as error:
            assert 100 <= error.n_waiting <= 104 and error.retry_after >= 1
            refused.append(time.thread_time() - began)
        else:
            answered.append(stream.reply().tokens == told(prompt_of(i, 5), 4))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(600)]
    hold = threading.Event()
    backend = model.backend
    assert isinstance(backend, FakeBackend)
    backend.before_forward = lambda batch: hold.wait(PATIENCE)
    for thread in threads:
        thread.start()
    while len(refused) < 600 - 104:  # before anything is computed
        time.sleep(0.001)
    hold.set()
    for thread in threads:
        thread.join()
    assert len(refused) == 496
    assert all(answered) and len(answered) == 104
    assert sorted(refused)[len(refused) // 2] < 0.1
    assert engine.snapshot().refused == len(refused)
    model.close()
    engine.close()


def test_without_a_queue_free_places_are_taken_and_no_more() -> None:
    engine = by_hand(PagedFake(), Limits(n_parallel=2, n_queue=0))
    tasks = [generation([i], max_tokens=3) for i in range(3)]
    for task in tasks[:2]:
        engine.submit(task)
    for _ in range(2):
        with pytest.raises(QueueFullError):
            engine.submit(tasks[2])
        engine._turn()
    finish(engine, tasks[:2])
    engine.submit(tasks[2])
    finish(engine, tasks)
    assert [result(task)[0] for task in tasks] == [told([i], 3) for i in range(3)]


def test_who_waits_too_long_is_told_so() -> None:
    model = Model(FakeBackend(n_seq_max=1, n_ctx=100_000, delay=0.005), FakeTokenizer(), limits=Limits(n_parallel=1))
    with model:
        running = model.generate([1], True, temperature=0)
        next(running)
        for _ in range(3):  # while the other runs, which would not end by itself
            began = time.perf_counter()
            with pytest.raises(QueueTimeoutError) as caught:
                model.generate([2], max_tokens=5, queue_timeout=0.05)
            assert 0.05 <= caught.value.seconds <= time.perf_counter() - began
            assert caught.value.retry_after >= 1
        assert model.snapshot().timed_out == 3
        running.cancel()
        reply = running.reply()
        assert reply.finish_reason == "cancelled" and reply.tokens == told([1], len(reply.tokens))


def test_time_that_is_used_up_ends_a_reply_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    def step(batch: Batch) -> None:
        nonlocal clock
        clock += 0.002

    monkeypatch.setattr("edgert.generation.engine.perf_counter", lambda: clock)
    with Model(backend := FakeBackend(n_ctx=10_000), FakeTokenizer()) as model:
        backend.before_forward = step
        reply = model.generate([1], temperature=0, timeout=0.1)
        assert reply.finish_reason == "timeout"
        assert reply.tokens == told([1], len(reply.tokens)) and 49 <= len(reply.tokens) <= 51
        assert model.generate([1], temperature=0, timeout=10, max_tokens=3).finish_reason == "length"
        counts = model.snapshot()
        assert (counts.timed_out, counts.finished) == (1, 1)


def test_one_that_was_set_aside_runs_out_of_time_too() -> None:
    engine = by_hand(PagedFake(n_seq_max=2), Limits(n_parallel=1))
    task = generation([1, 2], max_tokens=50)
    engine.submit(task)
    for _ in range(5):
        engine._turn()
    engine._admission.set_aside(task)
    other = generation([3], max_tokens=100, priority=5)
    engine.submit(other)
    task.end = 0.0
    engine._queue._timed.insert(0, (0.0, task.order, task))
    engine._turn()
    tokens, end = result(task)
    assert end == "timeout" and tokens == told([1, 2], len(tokens)) and tokens
    finish(engine, [other])


def test_a_window_gathers_requests() -> None:
    with Model(FakeBackend(), FakeTokenizer(), limits=Limits(window=10.0)) as model:
        began = time.monotonic()
        for _ in range(3):
            streams = [model.generate([i], True, max_tokens=3, temperature=0) for i in range(4)]
            assert [stream.reply().tokens for stream in streams] == [told([i], 3) for i in range(4)]
        assert time.monotonic() - began < 3 * 10  # all places are taken: nothing is waited for
        assert isinstance(model.backend, FakeBackend)
        assert [len(batch) for batch in model.backend.batches[:3]] == [4, 4, 4]


# Memory


def test_what_can_never_fit_is_refused_at_once() -> None:
    backend = PagedFake(n_ctx=1000, n_seq_max=2, n_cached=288)
    assert backend.free_positions() == 320
    engine = by_hand(backend)

    with pytest.raises(DoesNotFitError, match=r"needs 400 .*\(300 of the prompt.* has 320"):
        engine.submit(generation(prompt_of(0, 300), max_tokens=100))
    assert not backend.batches
    unlimited = generation(prompt_of(0, 300))
    engine.submit(unlimited)
    finish(engine, [unlimited])
    tokens, end = result(unlimited)
    assert end == "length" and tokens == told(prompt_of(0, 300), len(tokens)) and len(tokens) == 21


def test_who_would_not_fit_beside_others_waits_before_work() -> None:
    """Planned before: with limits that are kept, nobody begins what the memory cannot hold, and nobody is set aside."""
    backend = PagedFake(n_ctx=400, n_batch=64, n_seq_max=8, n_cached=800)
    engine = by_hand(backend, Limits(n_parallel=8))
    tasks = [generation(prompt_of(i, 150), max_tokens=100) for i in range(12)]
    for task in tasks:
        engine.submit(task)
    most = 0
    while not all(task.done for task in tasks):
        engine._turn()
        check(engine, backend)
        most = max(most, len(engine._work.tasks))
    assert most == 3  # of 250 each
    assert engine.snapshot().preempted == 0
    assert [result(task) for task in tasks] == [(told(prompt_of(i, 150), 100), "length") for i in range(12)]


def test_replies_longer_than_expected_make_way_and_lose_nothing() -> None:
    backend = PagedFake(n_ctx=600, n_batch=64, n_seq_max=8, n_cached=800)
    engine = by_hand(backend, Limits(n_parallel=8))
    tasks = [generation(prompt_of(i, 20)) for i in range(8)]
    for task in tasks:
        engine.submit(task)
    finish(engine, tasks, 50_000)
    assert engine.snapshot().preempted > 0
    for i, task in enumerate(tasks):
        tokens, end = result(task)
        assert end == "length" and tokens == told(prompt_of(i, 20), len(tokens)) and len(tokens) == 581


# Leaving


def test_who_leaves_gives_everything_back_within_a_step() -> None:
    """At any moment, in the queue, in the prompt, in the reply: 300 times; without the cache no page is left."""
    backend = PagedFake(n_ctx=400, n_batch=16, n_seq_max=3)
    engine = by_hand(backend, Limits(n_parallel=2, prefix_cache="off"))
    rng, where = random.Random(3), Counter[str]()
    for trial in range(100):
        tasks = [generation(prompt_of(3 * trial + i, 100), max_tokens=20) for i in range(3)]
        for task in tasks:
            engine.submit(task)
        for _ in range(rng.randrange(30)):
            engine._turn()
        for task in rng.sample(tasks, 3):
            if not task.done:
                where["queue" if task.waiting else "reply" if task.n_predicted else "prompt"] += 1
            task.cancelled = True
            engine._turn()
            assert task.done
        assert backend.n_pages == 0 and not engine._work.tasks and not len(engine._queue)
        for task in tasks:
            tokens, end = result(task)
            assert end in ("cancelled", "length") and tokens == told(
                prompt_of(3 * trial + tasks.index(task), 100), len(tokens)
            )
    assert min(where["queue"], where["prompt"], where["reply"]) > 20


# Faults


def test_a_caller_that_raises_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    engine = by_hand(PagedFake())
    bad, good = generation([1], max_tokens=30), generation([2], max_tokens=30)
    bad.wake = lambda: 1 / 0  # type: ignore[assignment]
    for task in (bad, good):
        engine.submit(task)
    with caplog.at_level(logging.CRITICAL, "edgert"):
        finish(engine, [bad, good])
    assert result(bad)[1] == "cancelled"
    assert result(good) == (told([2], 30), "length")


@pytest.mark.parametrize("method", ["fork", "truncate", "free"])
def test_a_backend_that_cannot_place_a_request_fails_that_one(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = PagedFake(n_ctx=400, n_seq_max=4)
    engine = by_hand(backend)
    first = generation(prompt_of(0, 100), max_tokens=5)
    engine.submit(first)
    finish(engine, [first])
    running = generation([*prompt_of(0, 90), 1], max_tokens=50)
    engine.submit(running)
    engine._turn()
    original, calls = getattr(backend, method), []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise OSError("fault")
        return original(*args)

    monkeypatch.setattr(backend, method, fail)
    bad = generation(prompt_of(0, 100)[:80] + [7], max_tokens=5)
    engine.submit(bad)
    finish(engine, [running, bad])
    assert result(running) == (told([*prompt_of(0, 90), 1], 50), "length")
    assert result(bad)[1] == ("OSError" if calls else "length")
    check(engine, backend)


@pytest.mark.parametrize("method", ["reachable", "free_positions"])
def test_a_backend_that_fails_before_a_request_begins_leaves_nobody_waiting(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = PagedFake(n_ctx=400, n_seq_max=4)
    engine = by_hand(backend)
    running = generation(prompt_of(0, 100), max_tokens=50)
    engine.submit(running)
    for _ in range(5):
        engine._turn()
    monkeypatch.setattr(backend, method, lambda *args: 1 / 0)
    bad = [generation([*prompt_of(0, 90), i], max_tokens=5) for i in range(3)]
    for task in bad:
        engine.submit(task)
    finish(engine, [running, *bad])
    assert [result(task)[1] for task in bad] == ["ZeroDivisionError"] * 3
    assert result(running) == (told(prompt_of(0, 100), 50), "length")
    assert not engine._queue._active and len(engine._queue) == 0


def test_failures_tell_nothing_of_what_was_asked(caplog: pytest.LogCaptureFixture) -> None:
    """Neither logs nor counters hold a prompt or a reply."""
    caplog.set_level(logging.DEBUG)
    with fake_model() as model:
        backend = model.backend
        assert isinstance(backend, FakeBackend)

        def fail(batch: Any) -> None:
            raise OSError("fault")

        model.generate("canary one", max_tokens=5, user="canary user")
        backend.before_forward = fail
        with pytest.raises(OSError, match="fault"):
            model.generate("canary two", max_tokens=5, user="canary user")
        shown = caplog.text + repr(model.snapshot())
    assert "a step failed" in shown
    for secret in ("canary", str(list(b"canary"))[1:-1]):
        assert secret not in shown
