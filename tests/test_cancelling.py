"""Whoever leaves a reply, by whatever way, ends its work within a step."""

from __future__ import annotations

import gc
import signal
import threading
import time

import pytest
from fake import PATIENCE, backend_of, fake_model, held, wait_for

from edgert.reply import Progress


def test_cancel_from_another_thread_ends_within_one_step() -> None:
    with fake_model() as model:
        backend = backend_of(model)
        with held(backend, after=5) as stopped:
            stream = model.generate("long", True)
            assert stopped.wait(PATIENCE)
            thread = threading.Thread(target=stream.cancel)
            thread.start()
            thread.join()
        reply = stream.reply()
        assert reply.finish_reason == "cancelled"
        assert len(backend.batches) == 6  # that on its way was the last
        assert 5 <= len(reply.tokens) <= 6
        assert reply.stats.predicted_n == len(reply.tokens)
        time.sleep(0.05)
        assert len(backend.batches) == 6


def test_cancel_between_the_chunks_of_a_prompt() -> None:
    with fake_model(n_ctx=4000, n_batch=10) as model:
        with held(backend_of(model), after=3) as stopped:
            stream = model.generate("y" * 3000, True)
            assert stopped.wait(PATIENCE)
            stream.cancel()
        reply = stream.reply()
        assert (reply.text, reply.finish_reason) == ("", "cancelled")
        assert reply.stats.prompt_n == 40
        # what was read is not lost
        again = model.generate("y" * 40, max_tokens=1)
        assert again.stats.cache_n > 0


def test_cancelled_in_the_queue_never_runs() -> None:
    with fake_model(n_seq_max=1) as model:
        with held(backend_of(model), after=2):
            first = model.generate("first", True, max_tokens=50)
            next(first)
            queued = [model.generate(f"queued{i}", True, max_tokens=5) for i in range(5)]
            for stream in queued:
                stream.cancel()
        assert {stream.reply().finish_reason for stream in queued} == {"cancelled"}
        assert len(first.reply().tokens) == 50
        assert backend_of(model).n_evaluated == len(model.tokenize("first")) + 49


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


@pytest.mark.parametrize("what", ["generate", "reply", "iterate", "logits", "on_progress"])
def test_an_interruption_of_the_reader_ends_the_request(what: str) -> None:
    """Also where a debugger or an interactive Python keeps the frames that were interrupted."""
    with fake_model(n_ctx=100_000, delay=0.001) as model:
        stream = None if what in ("generate", "logits") else model.generate("a", True)
        if what == "on_progress":

            def fail(progress: Progress) -> None:
                raise KeyboardInterrupt

            stream = model.generate("a", True, on_progress=fail)
        usual = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt) as kept:
                if what != "on_progress":
                    signal.setitimer(signal.ITIMER_REAL, 0.1)
                if stream is None:
                    model.logits([1] * 99_000) if what == "logits" else model.generate("a")
                elif what == "reply":
                    stream.reply()
                else:
                    list(stream)
        finally:
            signal.signal(signal.SIGALRM, usual)
        wait_for(lambda: not model._engine._work.tasks and not len(model._engine._queue))
        assert kept.value and model.generate("b", max_tokens=2).finish_reason == "length"
