"""More than the machine can do at once: queues, refusals, time-outs, memory, users beside each other, faults."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from fake import FakeBackend, fake_model, hashed, quickest
from paged_fake import PagedFake
from test_engine_schedules import by_hand, check, finish, generation, result, watch_quotas

from edgert.errors import DoesNotFitError, QueueFullError, QueueTimeoutError
from edgert.generation import Engine, Generation, Limits
from edgert.model import Model


def text(seed: int, n: int) -> list[int]:
    """Token ids that no other seed begins with."""
    return np.random.default_rng(seed).integers(0, 250, n).tolist()  # type: ignore[no-any-return]


def told(prompt: list[int], n: int) -> list[int]:
    """What the model says after a prompt."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(hashed(tokens))
    return tokens[len(prompt) :]


# The queue


def test_six_hundred_at_once() -> None:
    """Those for whom there is no place hear it at once, with a time to come again; all others are answered."""
    model = fake_model(n_seq_max=4, delay=0.0002)
    engine = model._engine = Engine(model.backend, None, Limits(n_parallel=4, n_queue=100))
    refused: list[float] = []
    answered: list[bool] = []

    def ask(i: int) -> None:
        began = time.perf_counter()
        try:
            stream = model.generate(text(i, 5), True, max_tokens=4)
        except QueueFullError as error:
            assert 100 <= error.n_waiting <= 104 and error.retry_after >= 1
            refused.append(time.perf_counter() - began)
        else:
            answered.append(stream.reply().tokens == told(text(i, 5), 4))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(600)]
    hold = threading.Event()
    backend = model.backend
    assert isinstance(backend, FakeBackend)
    backend.before_forward = lambda batch: hold.wait(30)
    for thread in threads:
        thread.start()
    while len(refused) < 600 - 104:
        time.sleep(0.001)
    hold.set()
    for thread in threads:
        thread.join(30)
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
    model = Model(FakeBackend(n_seq_max=1, delay=0.005), _tokenizer(), limits=Limits(n_parallel=1))
    with model:
        running = model.generate([1], True, max_tokens=100, temperature=0)
        next(running)

        def wait() -> None:
            began = time.perf_counter()
            with pytest.raises(QueueTimeoutError) as caught:
                model.generate([2], max_tokens=5, queue_timeout=0.05)
            assert 0.05 <= caught.value.seconds <= time.perf_counter() - began
            assert caught.value.retry_after >= 1

        assert quickest(wait, 3) < 0.4
        assert len(running.reply().tokens) == 100
        assert model.snapshot().timed_out == 3


def test_time_that_is_used_up_ends_a_reply_with_what_there_is() -> None:
    with Model(FakeBackend(n_ctx=10_000, delay=0.002), _tokenizer()) as model:
        reply = model.generate([1], temperature=0, timeout=0.1)
        assert reply.finish_reason == "timeout"
        assert reply.tokens == told([1], len(reply.tokens)) and 0 < len(reply.tokens) < 60
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
    with Model(FakeBackend(), _tokenizer(), limits=Limits(window=0.5)) as model:

        def ask() -> None:
            streams = [model.generate([i], True, max_tokens=3, temperature=0) for i in range(4)]
            assert [stream.reply().tokens for stream in streams] == [told([i], 3) for i in range(4)]

        assert quickest(ask, 3) < 0.4  # all places are taken: nothing is waited for
        assert isinstance(model.backend, FakeBackend)
        assert [len(batch) for batch in model.backend.batches[:3]] == [4, 4, 4]


# Users


def test_a_crowd_does_not_keep_one_user_waiting() -> None:
    """Fifty long requests of one user; another's short one takes a place from him after a moment."""
    engine = by_hand(PagedFake(n_ctx=400, n_seq_max=8, n_cached=4000), Limits(n_parallel=4, patience=0.0))
    crowd = [generation(text(i, 20), user="crowd", max_tokens=300) for i in range(50)]
    for task in crowd:
        engine.submit(task)
    for _ in range(30):
        engine._turn()
    one = generation(text(99, 20), user="one", max_tokens=10)
    engine.submit(one)
    engine._admission._next_look = 0.0
    turns = 0
    while not one.done:
        engine._turn()
        turns += 1
    engine._outbox.send()
    assert turns < 20
    assert engine.snapshot().preempted == 1
    assert result(one) == (told(text(99, 20), 10), "length")
    finish(engine, crowd, 50_000)
    for i, task in enumerate(crowd):
        assert result(task) == (told(text(i, 20), 300), "length")


def test_two_users_get_as_much_however_much_they_ask() -> None:
    engine = by_hand(PagedFake(n_ctx=100, n_seq_max=4, n_cached=1000), Limits(n_parallel=2))
    many = [generation(text(i, 10), user="many", max_tokens=10) for i in range(80)]
    few = [generation(text(100 + i, 10), user="few", max_tokens=10) for i in range(20)]
    for task in (*many, *few):
        engine.submit(task)
    while not all(task.done for task in few):
        engine._turn()
    assert 18 <= sum(task.done for task in many) <= 23
    finish(engine, many)


@pytest.mark.parametrize("mode", ["shared", "user"])
def test_a_flood_costs_a_quiet_user_none_of_his_cache(mode: str) -> None:
    """His share of tokens found in the cache stays within 5 % of what it is when he is alone."""

    def share(flood: bool) -> float:
        backend = PagedFake(n_ctx=512, n_batch=128, n_seq_max=16, n_cached=4096)
        engine = by_hand(backend, Limits(n_parallel=4, prefix_cache=mode))
        watch_quotas(engine)
        found = asked = 0
        noise: list[Generation] = []
        for turn in range(24):
            if flood:
                fresh = [generation(text(1000 + 20 * turn + i, 300), user="noisy", max_tokens=4) for i in range(20)]
                for task in fresh:
                    engine.submit(task)
                finish(engine, fresh[: -(turn % 6)])
                noise += fresh
            quiet = generation([*text(turn % 2, 300), turn], user="quiet", max_tokens=8)
            engine.submit(quiet)
            finish(engine, [quiet])
            assert result(quiet)[0] == told([*text(turn % 2, 300), turn], 8)
            found += quiet.n_reused
            asked += 301
        finish(engine, noise)
        assert not flood or engine.snapshot().prefix_evictions > 400
        return found / asked

    alone, flooded = share(False), share(True)
    assert alone > 0.9
    assert flooded >= 0.95 * alone


def test_users_kept_apart_find_nothing_of_each_other() -> None:
    for mode, expected in (("user", 0), ("shared", 200), ("off", 0)):
        engine = by_hand(PagedFake(n_ctx=512, n_seq_max=8), Limits(prefix_cache=mode))
        secret = text(1, 200)
        for user in ("a", "b", "a"):
            task = generation([*secret, ord(user)], user=user, max_tokens=2)
            engine.submit(task)
            finish(engine, [task])
            assert result(task)[0] == told([*secret, ord(user)], 2)
            if user == "b":
                assert task.n_reused == expected
        assert task.n_reused == (0 if mode == "off" else 200)


def test_a_request_may_do_without_the_cache() -> None:
    with fake_model() as model:
        model.generate("y" * 100, max_tokens=1)
        assert model.generate("y" * 100, max_tokens=1, cache_prompt=False).stats.cache_n == 0
        assert model.generate("y" * 100, max_tokens=1).stats.cache_n == 100


def test_a_beginning_is_read_once_for_all_who_come_together() -> None:
    backend = PagedFake(n_ctx=1000, n_batch=64, n_seq_max=12)
    engine = by_hand(backend, Limits(n_parallel=8))
    system = text(5, 640)
    tasks = [generation([*system, i], max_tokens=20, user=f"u{i}") for i in range(8)]
    for task in tasks:
        engine.submit(task)
    finish(engine, tasks)
    for i, task in enumerate(tasks):
        assert result(task)[0] == told([*system, i], 20)
    assert backend.n_evaluated <= 640 + 8 * (1 + 64 + 20)
    assert [task.n_reused >= 640 - 64 for task in tasks].count(True) == 7
    assert max(len(set(batch.sequences)) for batch in backend.batches) == 8


def test_where_windows_are_rounded_otherwise_none_is_torn() -> None:
    """What parts from another's prompt within a window is read from the window's begin, as it is alone."""
    backend = PagedFake(n_ctx=900, n_batch=128, n_seq_max=8)
    backend.n_window, backend.rounds_windows = 64, True
    engine = by_hand(backend)
    base = text(1, 300)
    for prompt, reused in (
        (base, 0),
        ([*base[:150], *text(2, 100)], 128),
        ([*base[:150], 7], 128),  # alone, the window that is not full would be read token by token
        ([*base[:150], 8], 150),  # as it has been now
        (base, 299),
        (base[:256], 192),
    ):
        task = generation(prompt, max_tokens=5)
        engine.submit(task)
        finish(engine, [task])
        assert result(task)[0] == told(prompt, 5)
        assert task.n_reused == reused
    for _ in range(2):
        prompt = [*prompt, *told(prompt, 5)[:4], *text(4, 100)]
        task = generation(prompt, max_tokens=5)
        engine.submit(task)
        finish(engine, [task])
        assert task.n_reused == len(prompt) - 100  # a conversation goes on where it was
        assert result(task)[0] == told(prompt, 5)


def test_a_reader_that_is_cancelled_keeps_nobody_waiting() -> None:
    backend = PagedFake(n_ctx=1000, n_batch=64, n_seq_max=12)
    engine = by_hand(backend, Limits(n_parallel=8))
    system = text(5, 640)
    tasks = [generation([*system, i], max_tokens=5) for i in range(4)]
    for task in tasks:
        engine.submit(task)
    for _ in range(3):
        engine._turn()
    assert len(engine._work.tasks) == 1
    tasks[0].cancelled = True
    finish(engine, tasks)
    assert result(tasks[0])[1] == "cancelled"
    for i, task in enumerate(tasks[1:], 1):
        assert result(task) == (told([*system, i], 5), "length")
    assert tasks[1].n_reused >= 128


def test_more_beginnings_are_kept_than_requests_run() -> None:
    with Model(PagedFake(n_seq_max=10), _tokenizer(), limits=Limits(n_parallel=2)) as model:
        for _ in range(2):
            reused = [model.generate(text(i, 100), max_tokens=1).stats.cache_n for i in range(8)]
        assert reused == [99] * 8
        counts = model.snapshot()
        assert (counts.prefix_lookups, counts.prefix_hits, counts.prefixes) == (16, 8, 8)
        assert counts.prefix_tokens == 8 * 100 and counts.cached_tokens == 8 * 99
        assert counts.kv_bytes > 0 and counts.kv_bytes_total > counts.kv_bytes


# Memory


def test_what_can_never_fit_is_refused_at_once() -> None:
    backend = PagedFake(n_ctx=1000, n_seq_max=2, n_cached=288)
    assert backend.free_positions() == 320
    engine = by_hand(backend)

    def ask() -> None:
        with pytest.raises(DoesNotFitError, match=r"needs 400 .*\(300 of the prompt.* has 320"):
            engine.submit(generation(text(0, 300), max_tokens=100))

    assert quickest(ask) < 0.1
    unlimited = generation(text(0, 300))
    engine.submit(unlimited)
    finish(engine, [unlimited])
    tokens, end = result(unlimited)
    assert end == "length" and tokens == told(text(0, 300), len(tokens)) and len(tokens) == 21


def test_who_would_not_fit_beside_others_waits_before_work() -> None:
    """Planned before: with limits that are kept, nobody begins what the memory cannot hold, and nobody is set aside."""
    backend = PagedFake(n_ctx=400, n_batch=64, n_seq_max=8, n_cached=800)
    engine = by_hand(backend, Limits(n_parallel=8))
    tasks = [generation(text(i, 150), max_tokens=100) for i in range(12)]
    for task in tasks:
        engine.submit(task)
    most = 0
    while not all(task.done for task in tasks):
        engine._turn()
        check(engine, backend)
        most = max(most, len(engine._work.tasks))
    assert most == 3  # of 250 each
    assert engine.snapshot().preempted == 0
    assert [result(task) for task in tasks] == [(told(text(i, 150), 100), "length") for i in range(12)]


def test_replies_longer_than_expected_make_way_and_lose_nothing() -> None:
    backend = PagedFake(n_ctx=600, n_batch=64, n_seq_max=8, n_cached=800)
    engine = by_hand(backend, Limits(n_parallel=8))
    tasks = [generation(text(i, 20)) for i in range(8)]
    for task in tasks:
        engine.submit(task)
    finish(engine, tasks, 50_000)
    assert engine.snapshot().preempted > 0
    for i, task in enumerate(tasks):
        tokens, end = result(task)
        assert end == "length" and tokens == told(text(i, 20), len(tokens)) and len(tokens) == 581


# Leaving


def test_who_leaves_gives_everything_back_within_a_step() -> None:
    """At any moment, in the queue, in the prompt, in the reply: 300 times; without the cache no page is left."""
    backend = PagedFake(n_ctx=400, n_batch=16, n_seq_max=3)
    engine = by_hand(backend, Limits(n_parallel=2, prefix_cache="off"))
    rng, where = random.Random(3), Counter[str]()
    for trial in range(100):
        tasks = [generation(text(3 * trial + i, 100), max_tokens=20) for i in range(3)]
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
                text(3 * trial + tasks.index(task), 100), len(tokens)
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
    first = generation(text(0, 100), max_tokens=5)
    engine.submit(first)
    finish(engine, [first])
    running = generation([*text(0, 90), 1], max_tokens=50)
    engine.submit(running)
    engine._turn()
    original, calls = getattr(backend, method), []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise OSError("fault")
        return original(*args)

    monkeypatch.setattr(backend, method, fail)
    bad = generation(text(0, 100)[:80] + [7], max_tokens=5)
    engine.submit(bad)
    finish(engine, [running, bad])
    assert result(running) == (told([*text(0, 90), 1], 50), "length")
    assert result(bad)[1] == ("OSError" if calls else "length")
    check(engine, backend)


@pytest.mark.parametrize("method", ["reachable", "free_positions"])
def test_a_backend_that_fails_before_a_request_begins_leaves_nobody_waiting(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = PagedFake(n_ctx=400, n_seq_max=4)
    engine = by_hand(backend)
    running = generation(text(0, 100), max_tokens=50)
    engine.submit(running)
    for _ in range(5):
        engine._turn()
    monkeypatch.setattr(backend, method, lambda *args: 1 / 0)
    bad = [generation([*text(0, 90), i], max_tokens=5) for i in range(3)]
    for task in bad:
        engine.submit(task)
    finish(engine, [running, *bad])
    assert [result(task)[1] for task in bad] == ["ZeroDivisionError"] * 3
    assert result(running) == (told(text(0, 100), 50), "length")
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


def isolation(n_clients: int, n_requests: int) -> int:
    """Clients with secrets after shared beginnings; the number of replies that differ from those alone."""
    backend = PagedFake(n_ctx=200, n_batch=64, n_seq_max=12, n_cached=1200)
    wrong = []
    with Model(backend, _tokenizer(), limits=Limits(n_parallel=6)) as model:

        def client(number: int) -> None:
            rng = random.Random(number)
            for _ in range(n_requests):
                prompt = [*text(rng.randrange(3), rng.randrange(20, 100)), number, rng.randrange(200)]
                n = rng.randrange(1, 9)
                reply = model.generate(prompt, max_tokens=n, temperature=0, user=f"u{number % 5}")
                if reply.tokens != told(prompt, n):
                    wrong.append(prompt)

        threads = [threading.Thread(target=client, args=(i,)) for i in range(n_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = model.snapshot()
        assert counts.finished == n_clients * n_requests
        assert counts.prefix_hits > counts.prefix_lookups / 2
    return len(wrong)


def test_sixteen_clients_with_secrets() -> None:
    assert isolation(16, 12) == 0


@pytest.mark.slow
def test_sixteen_clients_with_secrets_and_five_hundred_requests_each() -> None:
    assert isolation(16, 500) == 0


def _tokenizer() -> Any:
    from fake import FakeTokenizer

    return FakeTokenizer()
