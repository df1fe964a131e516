"""Excerpts of a model, run in a process of their own, tell the rates of the whole."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgert import backends
from edgert.backends import choice, excerpts, planning
from edgert.backends.base import Batch
from edgert.backends.planning import Request
from edgert.errors import BackendUnavailableError, EdgertError
from edgert.generation import schedule
from edgert.quantize.architecture import describe
from edgert.quantize.gguf_file import GGUFFile


class Machine:
    """An engine whose steps take a known time by a clock of its own: besides, for each layer and for attention.

    window:  positions that a layer attends to at most
    """

    n_vocab, n_batch = 300, 512
    window = 1 << 30

    def __init__(self, file: GGUFFile) -> None:
        self.n_layer, self.cached, self.now = describe(file).n_layer, 0, 0.0

    def seconds(self, n: int, depth: int) -> float:
        seen = min(depth, self.window)
        return 0.002 + self.n_layer * (0.001 + n * 1e-4 + seen * (1e-6 + n * 1e-8))

    def forward(self, batch: Batch) -> None:
        self.now += self.seconds(len(batch), self.cached)
        self.cached += len(batch)

    def step(self, token: int, sequence: int) -> None:
        self.forward(Batch.of([token], self.cached))

    def fill(self, sequence: int, length: int) -> None:
        self.now += 0.1 * (length > self.cached)
        self.cached = max(length, self.cached)

    def truncate(self, sequence: int, length: int) -> None:
        self.cached = length

    def close(self) -> None:
        pass


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """The machines that excerpts were run on, by whose clocks time is told."""
    found: list[Machine] = []

    def open_one(name: str, file: GGUFFile, common: Any, options: Any) -> Machine:
        assert (name, options, common["n_ctx"]) == ("llama", {"device": "cpu"}, excerpts.DEEP + 2 * excerpts.CHUNK)
        found.append(Machine(file))
        return found[-1]

    clock = SimpleNamespace(perf_counter=lambda: sum(machine.now for machine in found))
    monkeypatch.setattr(excerpts, "time", clock)
    monkeypatch.setattr("edgert.backends.clock.time", clock)
    monkeypatch.setattr(backends, "open_one", open_one)
    monkeypatch.setattr(excerpts, "LONG", 1)
    return found


@pytest.mark.parametrize("window", [1 << 30, 512])
def test_excerpts_add_up_to_the_whole_model(
    monkeypatch: pytest.MonkeyPatch,
    opened: list[Machine],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    window: int,
) -> None:
    """Exactly, where steps take what the description says; the excerpts are files that differ in their layers alone."""
    monkeypatch.setattr(Machine, "window", window)
    path = tiny_model("llama", n_layer=7)
    rough, found = excerpts._measured(str(path), "llama", {"device": "cpu"}, 1, str(tmp_path))
    assert [machine.n_layer for machine in opened] == [6, 2]
    assert (rough.layers, found.layers) == ((0, 6), (2, 6)) and "broken off" in rough.basis
    assert not found.busy and "broken off" not in found.basis
    whole = Machine.__new__(Machine)
    whole.n_layer = 7
    assert found.depths[:2] == (0, 512) and found.depths[-1] > 512
    for curve, n in ((found.prompt, 512), (found.few, 64), (found.single, 1)):
        assert curve == pytest.approx([whole.seconds(n, depth) for depth in found.depths])
    expected = found.rates(2048)
    assert expected["decode"] == pytest.approx(1 / whole.seconds(1, 0))
    assert expected["decode_at_end"] == pytest.approx(1 / whole.seconds(1, 2048))
    assert expected["prefill"] == pytest.approx(2048 / sum(whole.seconds(512, start) for start in range(0, 2048, 512)))
    assert rough.rates(2048)["decode"] == pytest.approx(expected["decode"], rel=0.1), "the rest counts for each layer"


def test_layers_take_what_a_whole_step_allows() -> None:
    """However much one of the two steps whose difference tells it was disturbed."""
    step, n, layer, head = 0.010, 6, 4.0, 6.0
    assert excerpts._possible(0.0015, step, n, layer, head) == 0.0015
    assert excerpts._possible(0.02, step, n, layer, head) == step / n
    assert excerpts._possible(0.0, step, n, layer, head) == pytest.approx(step / 2 * 4 / 30)


def test_what_is_known_when_time_is_up_counts(monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]) -> None:
    """Of another process, which ends, is silent, speaks of other things, or is broken off within a line."""
    rough = json.dumps({"depths": [0], "prompt": [1], "few": [0.5], "single": [0.1], "layers": [0, 6], "busy": False})
    said: list[bytes] = [f"{rough}\n".encode(), f"{rough}\nAMX is not\n{rough[:30]}".encode()]
    said += [b"", rough.encode()]
    monkeypatch.setattr(excerpts, "_heard", lambda *_: (said.pop(0), b"", None))
    with GGUFFile.open(tiny_model("llama")) as file:
        for left in (3, 2):
            found = excerpts.steps(file, "llama", {}, 1)
            assert (found.single, found.layers) == ((0.1,), (0, 6))
            assert found.rates(4096) == {"prefill": pytest.approx(128), "decode": 10, "decode_at_end": 10}
            assert len(said) == left, "it is not kept"
        while said:
            with pytest.raises(BackendUnavailableError, match="did not run within 12 seconds"):
                excerpts.steps(file, "llama", {}, 1)


@pytest.mark.skipif(os.name == "nt", reason="a shell's commands")
def test_a_process_is_listened_to_until_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    said = excerpts._heard(["sh", "-c", "echo word; echo other >&2; exit 3"], dict(os.environ), waits.append)
    assert said == (b"word\n", b"other\n", 3) and waits[0] < 1
    monkeypatch.setattr(excerpts, "TIMEOUT", 1.0)
    waits.clear()
    began = time.monotonic()
    assert excerpts._heard(["sh", "-c", "echo word; exec sleep 60"], {}, waits.append) == (b"word\n", b"", None)
    assert time.monotonic() - began < 30 and len(waits) > 1 and waits == sorted(waits)


def test_slow_prompts_are_read_in_steps_of_the_scheduler_s_length() -> None:
    assert (excerpts.STEP, excerpts.FEW) == (schedule.LONGEST, schedule.LEAST)
    # 64 tokens in 0.4 s and 5 ms for each further one: 83 or 84 in half a second, and 64 where these take longer.
    found = excerpts.Steps((0,), (0.4 + 448 * 0.005,), (0.4,), (0.3,), (2, 4))
    assert found.rates(840)["prefill"] == pytest.approx(84 / 0.5, rel=0.02)
    found = excerpts.Steps((0,), (0.8 + 448 * 0.01,), (0.8,), (0.3,), (2, 4))
    assert found.rates(640)["prefill"] == pytest.approx(64 / 0.8)


def test_excerpts_are_run_once_and_their_failure_is_told(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    calls: list[Any] = []

    def asked(*arguments: Any) -> excerpts.Steps:
        calls.append(arguments)
        return excerpts.Steps((0, 512), (1.0, 2.0), (0.1, 0.2), (0.01, 0.02), (2, 4), busy=len(calls) == 1)

    monkeypatch.setattr(excerpts, "_asked", asked)
    with GGUFFile.open(tiny_model("llama")) as file:
        for n_calls in (1, 2, 2):  # what was measured beside other programs is not kept
            assert excerpts.steps(file, "llama", {}, 1).prompt == (1.0, 2.0)
            assert len(calls) == n_calls
        excerpts.steps(file, "llama", {"device": "gpu"}, 1)
        assert len(calls) == 3

        def failing(*_: Any) -> None:
            raise BackendUnavailableError("no such device")

        monkeypatch.setattr(excerpts, "_asked", failing)
        found = planning._rates(Request(file, 256, excerpts=True), "onnx", {"device": "cpu"})
    assert found == {"basis": "its rates are not known, for an excerpt does not run: no such device"}


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
@pytest.mark.parametrize(
    ("script", "words"),
    [("kill -SEGV $$", "they ended with status -11"), ("echo no such device >&2; exit 1", "no such device")],
)
def test_a_crash_of_an_excerpt_is_told(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path], tmp_path: Path, script: str, words: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with GGUFFile.open(tiny_model("llama")) as file:
        found = planning._rates(Request(file, 256, excerpts=True), "llama", {"device": "cpu"})
    assert found == {"basis": f"its rates are not known, for an excerpt does not run: {words}"}


@pytest.mark.skipif(not choice.installed("llama"), reason="llama-cpp-python is not installed")
@pytest.mark.slow
def test_an_excerpt_runs_in_a_process_of_its_own(tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model("llama", n_layer=4)) as file:
        found = excerpts.steps(file, "llama", {"device": "cpu", "n_gpu_layers": 0}, 1, fresh=True)
        assert found.layers == (2, 4) and 0 < found.single[0] < found.prompt[0]
        with pytest.raises(EdgertError, match="no GPU 'CUDA7' here"):
            excerpts.steps(file, "llama", {"device": "CUDA7"}, 1, fresh=True)
