"""A stream and its model: closed, forgotten, copied, forked, read by several threads and by event loops."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import signal
import threading
import time
from typing import Any

import pytest
from fake import PATIENCE, backend_of, fake_model, wait_for

from edgert.errors import EdgertError
from edgert.model import Model


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
    assert backend_of(model).closed


def test_a_reply_that_is_read_keeps_its_model_open() -> None:
    chunks = list(fake_model(n_ctx=64, delay=0.001).generate("\n", True, max_tokens=9))
    assert sum(len(chunk.tokens) for chunk in chunks) == 9
    model = fake_model()
    backend, stream = backend_of(model), model.generate("a", True, max_tokens=3)
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
            thread.join(PATIENCE)
        assert len(n_read) == 4 and sum(n_read) == 20

        def fail(batch: Any) -> None:
            raise MemoryError

        backend_of(model).before_forward = fail
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
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert len(errors) == 1


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
            wait_for(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG))
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
    backend = backend_of(model)
    model.generate("a", max_tokens=1)
    del model
    gc.collect()
    assert backend.closed


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
        n = len(backend_of(model).batches)
        await asyncio.sleep(0.05)
        assert len(backend_of(model).batches) <= n + 1

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


def test_the_replies_of_a_step_wake_their_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call there may cost the engine the interpreter until the loop has done its work."""

    async def main(model: Model) -> tuple[int, int]:
        loop, calls = asyncio.get_running_loop(), 0
        usual = loop.call_soon_threadsafe

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            handle = usual(*arguments, **options)
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.002)  # in which the loop does all that it can
            return handle

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)

        async def read(i: int) -> list[int]:
            stream = model.generate([1 + i], True, max_tokens=50, ignore_eos=True)
            return [token async for chunk in stream for token in chunk.tokens]

        found = await asyncio.gather(*(read(i) for i in range(4)))
        assert [len(tokens) for tokens in found] == [50] * 4
        return calls, len(backend_of(model).batches)

    with fake_model(n_ctx=256, delay=0.002) as model:
        calls, steps = asyncio.run(main(model))
    assert 0 < calls <= steps + 2
