"""What fails in a step, a request or the cache harms nobody whom it does not concern."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from fake import FakeBackend, backend_of, fake_model, hashed, held

from edgert.errors import DoesNotFitError, EdgertError
from edgert.model import Model


def test_a_failure_during_a_stream_is_not_taken_for_an_end() -> None:
    with fake_model() as model:

        def fail(batch: Any) -> None:
            if len(backend_of(model).batches) == 5:
                backend_of(model).batches.append(batch)
                raise OSError("the disk is gone")

        backend_of(model).before_forward = fail
        stream = model.generate("x", True, max_tokens=20)
        chunks = []
        with pytest.raises(OSError, match="disk"):
            for chunk in stream:
                chunks.append(chunk)
        assert len(chunks) == 5
        assert {chunk.finish_reason for chunk in chunks} == {None}
        assert list(stream) == []
        assert len(backend_of(model).batches) == 6
        assert len(model.generate("x", max_tokens=20).tokens) == 20


def test_an_engine_that_breaks_says_so_to_all_and_takes_no_more_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_model(n_seq_max=1) as model:
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        with held(backend_of(model), after=2):
            running, queued = (model.generate(text, True, max_tokens=30) for text in ("a", "b"))
            next(running)
            monkeypatch.setattr(backend_of(model), "length", lambda _: 1 / 0)
        assert running.reply().finish_reason == "length"
        with pytest.raises(EdgertError, match="closed"):
            queued.reply()
        with pytest.raises(EdgertError, match="closed"):
            model.generate("c")
    assert backend_of(model).closed


def test_logits_that_are_no_numbers_end_one_request_only() -> None:
    with fake_model(delay=0.001) as model:
        good = model.generate("good", True, max_tokens=100)
        next(good)

        def poison(logits: Any) -> None:
            if threading.current_thread().name == "edgert-engine" and bad_runs.is_set():
                logits[3] = float("nan")
                bad_runs.clear()

        bad_runs = threading.Event()
        backend_of(model).bend = poison
        backend = backend_of(model)
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
    backend = backend_of(model)

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
        with held(bound(model, 200)):
            streams = {prompt: model.generate(prompt, True, max_tokens=90) for prompt in alone}
        for prompt, stream in streams.items():
            reply = stream.reply()
            assert (reply.text, reply.finish_reason) == (alone[prompt].text, "length")
            assert reply.stats.prompt_n + reply.stats.cache_n == 61
            assert reply.stats.predicted_n == 90
        assert any(len(set(batch.sequences)) > 1 for batch in backend_of(model).batches)


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
            thread.join()
        assert wrong == []
        assert sum(n_done) == 8 * 40
        assert min(n_done) > 0
        assert all(slot.task is None for slot in model._engine._slots._slots)
        assert [slot.n_cached for slot in model._engine._slots._slots] == [len(c) for c in backend.cells.values()]
