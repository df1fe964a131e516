"""A server that is told to stop while it loads ends, whether the load does or not, and says so to who waits for it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake import PATIENCE, backend_of, fake_model, wait_for
from harness import Server, serving
from program import program

from edgert import ending
from edgert.model import Model
from edgert.server.registry import Spec

ASK = "/v1/completions"
LISTENS, COMPILES = "listening on ", "compiling kernels"


class Slow:
    """Loads fake models; those that are held, when they are released."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()
        self.held: set[str] = set()
        self.models: list[Model] = []

    def __call__(self, source: str | Path, **options: Any) -> Model:
        if str(source) in self.held:
            self.begun.set()
            assert self.released.wait(2 * PATIENCE)
        self.models.append(fake_model(n_ctx=10_000, delay=options.get("delay", 0)))
        return self.models[-1]


@pytest.fixture
def slow() -> Iterator[Slow]:
    load = Slow()
    yield load
    load.released.set()


@contextlib.contextmanager
def asking(server: Server, path: str, **body: Any) -> Iterator[list[Any]]:
    """A request in a thread: its answer."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.post(path, body)))
    thread.start()
    try:
        yield answers
    finally:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def told(answers: list[Any]) -> None:
    """The answer is that the server ends."""
    [(status, answer)] = answers
    assert status == 503
    assert answer["error"]["message"] == "The server is shutting down: try again later."


def test_who_waits_for_a_model_is_told_and_the_server_ends(slow: Slow) -> None:
    slow.held.add("b")
    with contextlib.ExitStack() as asked, serving([Spec("a", "a"), Spec("b", "b")], slow) as server:
        first = asked.enter_context(asking(server, ASK, prompt="x", max_tokens=9000, model="b"))
        assert slow.begun.wait(PATIENCE)
        second = asked.enter_context(asking(server, ASK, prompt="x", max_tokens=9000, model="b"))
        wait_for(lambda: server.service.admission.inside == 2)
    # The server's thread has ended.
    told(first)
    told(second)
    assert backend_of(slow.models[0]).closed
    slow.released.set()  # what comes in the end is closed by its own thread
    wait_for(lambda: len(slow.models) == 2 and backend_of(slow.models[1]).closed)


def test_an_exchange_that_loads(slow: Slow) -> None:
    with contextlib.ExitStack() as asked, serving([Spec("a", "a")], slow) as server:
        slow.held.add("a")
        answers = asked.enter_context(asking(server, "/v1/models/a/reload"))
        assert slow.begun.wait(PATIENCE)
    told(answers)


def test_who_waits_for_room(slow: Slow) -> None:
    with contextlib.ExitStack() as asked:
        specs = [Spec("a", "a", {"delay": 0.01}), Spec("b", "b")]
        with serving(specs, slow, models_max=1) as server:
            running = asked.enter_context(asking(server, ASK, prompt="x", max_tokens=9000, model="a"))
            wait_for(lambda: backend_of(server.model("a")).n_evaluated > 5)
            waiting = asked.enter_context(asking(server, ASK, prompt="x", max_tokens=9000, model="b"))
            wait_for(lambda: server.service.admission.inside == 2)
    told(waiting)
    assert running[0][0] == 503  # when its time was over


def test_a_load_that_looks_ends_with_the_server() -> None:
    begun, ended = threading.Event(), threading.Event()

    def load(source: str | Path, **_: Any) -> Model:
        if source == "a":
            return fake_model()
        begun.set()
        try:
            while True:
                ending.check()
                threading.Event().wait(0.001)
        finally:
            ended.set()

    with contextlib.ExitStack() as asked:
        with serving([Spec("a", "a"), Spec("b", "b")], load) as server:
            answers = asked.enter_context(asking(server, ASK, prompt="x", max_tokens=9000, model="b"))
            assert begun.wait(PATIENCE)
        assert ended.is_set()
    told(answers)


# As programs

HELD = """
import sys, threading, edgert
from edgert import cli
def load(*_, **__):
    print("loads", file=sys.stderr, flush=True)
    threading.Event().wait()
edgert.load = load
cli.main()
"""


STOPS = [
    ([signal.SIGTERM], -signal.SIGTERM),
    ([signal.SIGINT], 130),
    ([signal.SIGINT, signal.SIGINT], 130),
    ([signal.SIGTERM, signal.SIGINT], -signal.SIGTERM),
]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("signals, code", STOPS, ids=["TERM", "INT", "INT-INT", "TERM-INT"])
def test_a_load_without_an_end(
    signals: list[signal.Signals], code: int, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    command = ["serve", "-m", str(tiny_model("llama", n_ctx=512)), "--port", "0"]
    with program("-c", HELD, *command, until="loads", EDGERT_CACHE=str(tmp_path)) as (process, lines):
        for number in signals:
            process.send_signal(number)
            threading.Event().wait(0.15)
    assert process.returncode == code
    assert [line for line in lines if line.strip()][2:] == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("group", [False, True], ids=["server", "terminal"])
def test_kernels_are_compiled(
    number: signal.Signals, group: bool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Compilers end with the server, and nothing half written is left; a terminal's Ctrl+C goes to all of a group."""
    command = ["-m", "edgert", "serve", "-m", str(tiny_model("llama", n_ctx=512)), "--port", "0"]
    with program(*command, until=COMPILES, EDGERT_CACHE=str(tmp_path)) as (process, lines):
        server = psutil.Process(process.pid)
        wait_for(server.children)
        compilers, said = server.children(), len(lines)
        os.killpg(process.pid, number) if group else process.send_signal(number)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert [line for line in lines if line.strip()][said:] == []
    wait_for(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in compilers))
    left = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert left <= {".lock", ".o", ".json"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_at_any_moment_of_a_load(number: signal.Signals, smollm2_path: Path) -> None:
    for tenths in range(0, 30, 5):
        command = ["-m", "edgert", "serve", "-m", str(smollm2_path), "--port", "0"]
        with program(*command, until=LISTENS) as (process, lines):
            time.sleep(tenths / 10)
            process.send_signal(number)
        assert process.returncode == (130 if number == signal.SIGINT else -number)
        said = "".join(lines)
        assert "Traceback" not in said
        assert "rror" not in said
