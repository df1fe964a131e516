"""Users beside each other: equal parts, quotas of the cache, beginnings that are read once for all."""

from __future__ import annotations

import random
import threading

import pytest
from fake import FakeTokenizer, fake_model, prompt_of, told
from paged_fake import PagedFake
from test_engine_schedules import by_hand, finish, generation, result, watch_quotas

from edgert.generation import Generation, Limits
from edgert.model import Model


def test_a_crowd_does_not_keep_one_user_waiting() -> None:
    """Fifty long requests of one user; another's short one takes a place from him after a moment."""
    engine = by_hand(PagedFake(n_ctx=400, n_seq_max=8, n_cached=4000), Limits(n_parallel=4, patience=0.0))
    crowd = [generation(prompt_of(i, 20), user="crowd", max_tokens=300) for i in range(50)]
    for task in crowd:
        engine.submit(task)
    for _ in range(30):
        engine._turn()
    one = generation(prompt_of(99, 20), user="one", max_tokens=10)
    engine.submit(one)
    engine._admission._next_look = 0.0
    turns = 0
    while not one.done:
        engine._turn()
        turns += 1
    engine._outbox.send()
    assert turns < 20
    assert engine.snapshot().preempted == 1
    assert result(one) == (told(prompt_of(99, 20), 10), "length")
    finish(engine, crowd, 50_000)
    for i, task in enumerate(crowd):
        assert result(task) == (told(prompt_of(i, 20), 300), "length")


def test_two_users_get_as_much_however_much_they_ask() -> None:
    engine = by_hand(PagedFake(n_ctx=100, n_seq_max=4, n_cached=1000), Limits(n_parallel=2))
    many = [generation(prompt_of(i, 10), user="many", max_tokens=10) for i in range(80)]
    few = [generation(prompt_of(100 + i, 10), user="few", max_tokens=10) for i in range(20)]
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
                fresh = [
                    generation(prompt_of(1000 + 20 * turn + i, 300), user="noisy", max_tokens=4) for i in range(20)
                ]
                for task in fresh:
                    engine.submit(task)
                finish(engine, fresh[: -(turn % 6)])
                noise += fresh
            quiet = generation([*prompt_of(turn % 2, 300), turn], user="quiet", max_tokens=8)
            engine.submit(quiet)
            finish(engine, [quiet])
            assert result(quiet)[0] == told([*prompt_of(turn % 2, 300), turn], 8)
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
        secret = prompt_of(1, 200)
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
    system = prompt_of(5, 640)
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
    base = prompt_of(1, 300)
    for prompt, reused in (
        (base, 0),
        ([*base[:150], *prompt_of(2, 100)], 128),
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
        prompt = [*prompt, *told(prompt, 5)[:4], *prompt_of(4, 100)]
        task = generation(prompt, max_tokens=5)
        engine.submit(task)
        finish(engine, [task])
        assert task.n_reused == len(prompt) - 100  # a conversation goes on where it was
        assert result(task)[0] == told(prompt, 5)


def test_a_reader_that_is_cancelled_keeps_nobody_waiting() -> None:
    backend = PagedFake(n_ctx=1000, n_batch=64, n_seq_max=12)
    engine = by_hand(backend, Limits(n_parallel=8))
    system = prompt_of(5, 640)
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
    with Model(PagedFake(n_seq_max=10), FakeTokenizer(), limits=Limits(n_parallel=2)) as model:
        for _ in range(2):
            reused = [model.generate(prompt_of(i, 100), max_tokens=1).stats.cache_n for i in range(8)]
        assert reused == [99] * 8
        counts = model.snapshot()
        assert (counts.prefix_lookups, counts.prefix_hits, counts.prefixes) == (16, 8, 8)
        assert counts.prefix_tokens == 8 * 100 and counts.cached_tokens == 8 * 99
        assert counts.kv_bytes > 0 and counts.kv_bytes_total > counts.kv_bytes


def isolation(n_clients: int, n_requests: int) -> int:
    """Clients with secrets after shared beginnings; the number of replies that differ from those alone."""
    backend = PagedFake(n_ctx=200, n_batch=64, n_seq_max=12, n_cached=1200)
    wrong = []
    with Model(backend, FakeTokenizer(), limits=Limits(n_parallel=6)) as model:

        def client(number: int) -> None:
            rng = random.Random(number)
            for _ in range(n_requests):
                prompt = [*prompt_of(rng.randrange(3), rng.randrange(20, 100)), number, rng.randrange(200)]
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
