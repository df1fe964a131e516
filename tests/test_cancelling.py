"""Whoever leaves a reply, by whatever way, ends its work within a step."""

from __future__ import annotations

import gc
import signal
import threading
import time

import pytest
from fake import backend_of, fake_model, wait_for

from edgert.reply import Progress


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
        n = len(backend_of(model).batches)
        time.sleep(0.05)
        assert len(backend_of(model).batches) == n


def test_cancel_between_the_chunks_of_a_prompt() -> None:
    with fake_model(n_ctx=4000, n_batch=10, delay=0.005) as model:
        stream = model.generate("y" * 3000, True)
        wait_for(lambda: len(backend_of(model).batches) > 2)
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
        wait_for(lambda: not model._engine._work.tasks and not len(model._engine._queue))
        assert kept.value and model.generate("b", max_tokens=2).finish_reason == "length"
