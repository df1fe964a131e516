"""Memory and rates that are predicted: against what backends hold, against counting, and what is said of them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from edgert import backends
from edgert.backends import choice, excerpts, planning, specimen
from edgert.backends.base import Batch
from edgert.backends.clock import Clock
from edgert.backends.cpu import rates
from edgert.backends.cpu.footprint import footprint
from edgert.backends.cpu.rates import Rates, Work
from edgert.backends.llama.footprint import copied_types
from edgert.backends.planning import Request
from edgert.devices import accelerators, gpus, probe
from edgert.devices.notes import Notes
from edgert.errors import BackendUnavailableError, DoesNotFitError, EdgertError
from edgert.generation import schedule
from edgert.quantize.architecture import describe
from edgert.quantize.gguf_file import GGUFFile

MACHINE = Rates(2, "avx2", 100e9, {2048: 50e9}, 40e9, 20e9, {1 << 20: 40e9, 3 << 20: 20e9})


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("edgert.devices.notes.cache_root", lambda: tmp_path / "notes")


def with_memory(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    """A machine with so much memory left, this process counted as nothing."""
    machine = replace(probe.probe(), memory_available=n_bytes)
    monkeypatch.setattr(probe, "probe", lambda *_: machine)
    monkeypatch.setattr(probe, "process_memory", lambda: (0, 0))


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_the_footprint_is_what_the_backend_holds(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(f"{name}_path")
    n_ctx = 256
    with GGUFFile.open(path) as file:
        predicted = footprint(file, describe(file), n_ctx, types=(kind, kind))
    backend = backends.load(path, backend="cpu", n_ctx=n_ctx, cache_type_k=kind, cache_type_v=kind)
    try:
        backend.forward(Batch.of([1] * n_ctx, 0, wanted="none"))
        held = backend.memory()
    finally:
        backend.close()
    assert predicted.weights == pytest.approx(held["weights"], rel=0.01)
    assert predicted.kv_per_token == held["kv_per_token"]
    assert predicted.kv == pytest.approx(held["kv"], rel=0.08)  # refined keys take a page more
    assert predicted.buffers == pytest.approx(held["buffers"], rel=0.25)


@pytest.mark.parametrize("quant", [Type.F32, Type.F16, Type.Q8_0, Type.Q4_0, Type.Q4_K, Type.Q6_K])
def test_weights_of_every_type(tiny_model: Callable[..., Path], quant: Type) -> None:
    path = tiny_model("llama", quant=quant, n_embd=256, n_ff=256, head_dim=64)
    with GGUFFile.open(path) as file:
        predicted = footprint(file, describe(file), 64).weights
    backend = backends.load(path, backend="cpu", n_ctx=64, n_threads=1)
    assert predicted == pytest.approx(backend.memory()["weights"], rel=0.02)
    backend.close()


def test_the_check_at_load_and_the_plan_say_the_same(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model("llama", n_ctx=100_000)
    with GGUFFile.open(path) as file:
        a = describe(file)
        whole = footprint(file, a, 90_000, with_program=False).total
        with_memory(monkeypatch, whole - (10 << 20))
        with pytest.raises(DoesNotFitError) as caught:
            backends.load(path, backend="cpu", n_ctx=90_000, n_threads=1)
        assert "10 MiB are missing" in str(caught.value)
        most = int(str(caught.value).rpartition("-c ")[2].split()[0])
        assert "it fits with -ctk q4_0 -ctv q4_0" in str(caught.value)
        with_memory(monkeypatch, whole - (10 << 20) + footprint(file, a, 16).program)
        place, *_ = planning.places(Request(file, 90_000), None)
    assert place.largest_context == most and not place.fits
    assert f"at most -c {most} fits" in place.remedy
    assert "10 MiB are missing; it fits with -ctk q4_0" in str(place.refusal("It"))
    assert footprint(file, a, most).total <= whole - (10 << 20) + place.memory["program"]


def test_conversations_and_a_draft_take_their_own(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    with GGUFFile.open(tiny_model("llama")) as file, GGUFFile.open(tiny_model("llama", n_layer=1)) as draft:
        one, *_ = planning.places(Request(file, 512), None)
        four, *_ = planning.places(Request(file, 512, 4), None)
        guessed, *_ = planning.places(Request(file, 512, draft=draft), None)
        packed, *_ = planning.places(Request(file, 512, types=("q4_0", "q4_0")), None)
        extra = footprint(draft, describe(draft), 512, with_program=False)
    assert four.memory["kv"] == 4 * one.memory["kv"]
    assert four.memory["weights"] == one.memory["weights"]
    assert guessed.memory["draft"] == extra.total == guessed.memory["total"] - one.memory["total"]
    assert packed.memory["kv"] < 0.6 * one.memory["kv"]
    for place in (one, four, guessed):
        assert place.memory["total"] == sum(size for name, size in place.memory.items() if name != "total")


def test_work_is_counted_as_brute_force_counts(tiny_model: Callable[..., Path]) -> None:
    for family in ("llama", "gemma3"):
        with GGUFFile.open(tiny_model(family)) as file:
            a = describe(file)
            layers = [t for name, t in file.tensors.items() if name.startswith("blk.") and len(t.shape) == 2]
            weights = sum(t.n_rows * t.n_cols for t in layers)
        work = Work.of(a)
        assert work.weights == weights

        def seen(n: int, window: int) -> int:
            return min(n, window or n)

        each = 2 * a.n_head * a.head_dim
        assert work.attention(37) == sum(each * seen(37, layer.window) for layer in a.layers)
        brute = sum(each * seen(i + 1, layer.window) for layer in a.layers for i in range(50))
        assert work.attention_of_prompt(50) == brute


def test_predictions_follow_from_the_rates(tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model("llama")) as file:
        a = describe(file)
        cost = footprint(file, a, 512)
        found = rates.predict(a, cost, 512, cost.kv, 0, MACHINE)
        faster = replace(MACHINE, read={n: 2 * rate for n, rate in MACHINE.read.items()})
        other = rates.predict(a, cost, 512, cost.kv, 0, faster)
    work = Work.of(a)
    assert 1 / found.decode == pytest.approx(cost.weights / 40e9)
    at_end = (cost.weights + cost.kv) / MACHINE.bandwidth(cost.weights + cost.kv) + cost.kv / 20e9
    assert 1 / found.decode_at_end == pytest.approx(at_end)
    prefill = 512 * work.weights / 100e9 + work.attention_of_prompt(512) / 50e9 + 1 / found.decode
    assert 512 / found.prefill == pytest.approx(prefill)
    assert other.decode == pytest.approx(2 * found.decode)


def test_attention_slows_down_with_depth(tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model("llama")) as file:
        work = Work.of(describe(file))
    machine = replace(MACHINE, attention={1024: 50e9, 3072: 25e9})
    first, second = (machine.attention_seconds(work, n) for n in (1024, 4096))
    assert first == pytest.approx(work.attention_of_prompt(1024) / 50e9)
    assert work.attention_of_prompt(4096) / 50e9 < second < work.attention_of_prompt(4096) / 25e9
    last = machine.attention_seconds(work, 4096) - machine.attention_seconds(work, 3584)
    assert last == pytest.approx(512 * work.attention(3840.5) / 25e9)


def test_bandwidth_is_straight_between_what_was_measured() -> None:
    assert MACHINE.bandwidth(1) == MACHINE.bandwidth(1 << 20) == 40e9
    assert MACHINE.bandwidth(2 << 20) == 30e9
    assert MACHINE.bandwidth(1 << 40) == 20e9


def test_steps_that_others_disturbed_give_no_absurd_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps behind many cached tokens that seem to take no longer than those behind none, or even less time."""
    work = Work(16 << 20, 0, {0: 4608})
    backend = SimpleNamespace(architecture=None, fill=lambda *_: None, close=lambda: None)
    monkeypatch.setattr(rates, "_specimen", lambda *_: (backend, 16 << 20, 6528))
    monkeypatch.setattr(rates.Work, "of", lambda _: work)
    monkeypatch.setattr(Clock, "seconds", lambda _self, _backend, depth, n, _budget=0: n / (1000 + depth))
    found = rates._measured(1, "portable", rates.USUAL, (None, None), None, lambda _done, _of: None)
    products = work.weights * 1000
    assert max(found.attention.values()) == pytest.approx(rates.BEYOND * products)
    assert products < found.kv < 100 * products


def test_rates_are_measured_once_for_heads_of_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def measured(n_threads: int, isa: str, heads: Any, types: Any, progress: Any, on_step: Any) -> Rates:
        calls.append(heads)
        return replace(MACHINE, threads=n_threads, busy=heads == (1, 1, 64))

    monkeypatch.setattr(rates, "_measured", measured)
    first = rates.rates(1)
    assert rates.rates(1) == first and len(calls) == 1
    rates.rates(1, (4, 1, 256))
    rates.rates(1, fresh=True)
    assert calls == [rates.USUAL, (4, 1, 256), rates.USUAL]
    for _ in range(2):
        rates.rates(1, (1, 1, 64))
    rates.rates(1, types=("f16", None))
    assert len(calls) == 6 and calls.pop() == rates.USUAL, "caches of another type are read at another rate"
    assert len(calls) == 5, "what was measured beside other programs is not kept"
    notes = Notes("rates")
    notes.path.write_text(json.dumps({key: {"threads": 1} for key in notes.all()}))
    assert rates.rates(1) == first and len(calls) == 6


def test_what_seems_to_be_read_slower_than_more_was_disturbed() -> None:
    assert rates._falling({1: 20.0, 2: 9.0, 3: 14.0, 4: 10.0}) == {1: 20.0, 2: 14.0, 3: 14.0, 4: 10.0}


def test_random_models_of_several_sizes_are_measured_once_each() -> None:
    """A layer of many heads has as many bytes as all of a small model."""
    for heads in (rates.USUAL, (32, 4, 64), (64, 8, 128)):
        numbers = [size["n_layer"] for size in rates._sizes(heads)]
        assert sorted(set(numbers)) == numbers and numbers[0] >= rates.LEAST_LAYERS
    assert len(rates._sizes(rates.USUAL)) == len(rates.SIZES) and len(numbers) == 1


class Disturbed:
    """An engine whose steps take these seconds by a clock of its own, over and over."""

    n_vocab, n_batch = 300, 512

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.n, self.now = seconds, 0, 0.0

    def step(self, token: int, sequence: int) -> None:
        self.now += self.seconds[self.n % len(self.seconds)]
        self.n += 1

    def truncate(self, sequence: int, length: int) -> None:
        pass


@pytest.mark.parametrize(
    ("seconds", "expected", "busy", "patience"),
    [
        ((0.010, 0.011), 0.010, False, 9),
        ((0.010, 0.010, 0.080), 0.010, False, 9),  # a third of them disturbed
        ((0.001, 0.001, 0.008, 0.008, 0.008), 0.001, True, 9),
        ((0.001,) * 10 + (0.008,) * 24 + (0.001,) * 400, 0.001, False, 9),  # what ran at first has ended
        ((0.5, 0.1), 0.1, False, 0.05),  # late
    ],
)
def test_steps_are_timed_as_an_idle_machine_takes_them(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], expected: float, busy: bool, patience: float
) -> None:
    engine: Any = Disturbed(*seconds)
    monkeypatch.setattr("edgert.backends.clock.time", SimpleNamespace(perf_counter=lambda: engine.now))
    clock = Clock(patience)
    assert clock.seconds(engine, 0, 1) == pytest.approx(expected)
    assert clock.busy == busy
    if patience < 1:
        assert engine.n == 2
        assert clock.seconds(engine, 0, 1) == pytest.approx(0.5) and engine.n == 3


@pytest.mark.slow
def test_this_machine_s_rates_are_of_its_order() -> None:
    """Int8 products are what a step of few tokens does: no slower than a tenth of what prefill reaches, or faster."""
    found = rates.rates(1, fresh=True)
    assert 1e9 < found.int8 < 1e13 and found.int8 / 10 < found.prefill < found.int8 * 30
    assert all(1e8 < rate < 1e12 for rate in found.read.values())
    assert len(found.read) > 1 and list(found.read.values()) == sorted(found.read.values(), reverse=True)
    assert found.kv > 1e8


def test_a_specimen_runs(tmp_path: Path) -> None:
    path = specimen.write(tmp_path / "x.gguf", type="Q8_0", n_layer=1)
    backend = backends.load(path, backend="cpu", n_threads=1)
    logits = backend.forward(Batch.of([1, 5, 9], 0, wanted="all"))
    assert logits.shape == (3, 320) and 0.5 < logits.std() < 8
    backend.close()


# Devices of other backends


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that the driver tells of, and no llama.cpp."""
    from edgert.backends.llama import library

    monkeypatch.setattr(accelerators, "present", lambda *_: frozenset({"gpu"}))
    monkeypatch.setattr(gpus, "gpus", lambda *_: [gpus.Gpu("NVIDIA Test", "nvidia", 2 << 30, 1 << 30, "580", 3)])
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.delitem(sys.modules, "llama_cpp.llama_cpp", raising=False)


def test_a_gpu_without_llama_is_planned_for_and_named_unusable(gpu: None, tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model("llama")) as file:
        _, place, *_ = planning.places(Request(file, 256), None)
        a = describe(file)
    assert (place.backend, place.device) == ("llama", "NVIDIA Test")
    assert "not installed" in place.obstacle and "pip install" in place.remedy
    assert place.layers == (a.n_layer + 1, a.n_layer + 1)
    assert place.memory["kv"] == 256 * 2 * a.n_layer * a.n_head_kv * a.head_dim * 2
    assert place.available == 1 << 30 and place.fits
    assert place.decode is None and "edgert bench --backend llama" in place.basis


def test_a_model_too_large_for_a_gpu(gpu: None, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GGUFFile.open(smollm2_path) as file:
        whole = planning.places(Request(file, 8192), None)[1].memory["total"]
        free = whole - (120 << 20)
        monkeypatch.setattr(gpus, "gpus", lambda *_: [gpus.Gpu("NVIDIA Test", "nvidia", 2 << 30, free, "580", 3)])
        place = planning.places(Request(file, 8192), None)[1]
    assert place.missing == 120 << 20
    assert place.layers is not None and 0 < place.layers[0] < place.layers[1] == 31
    assert 0 < place.largest_context < 8192


def test_measured_rates_of_a_choice_are_the_plan_s(gpu: None, tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model("llama")) as file:
        trial = {"backend": "llama", "device": "CUDA0", "prefill": 9000.0, "decode": 300.0}
        Notes("choices").put("key", {"file": str(file.path), "backend": "llama", "options": {}, "trials": [trial]})
        place = planning.places(Request(file, 256), None)[1]
    assert (place.prefill, place.decode, place.basis) == (9000.0, 300.0, "measured when auto tried it")


# Excerpts


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


# llama.cpp on the processor

needs_llama = pytest.mark.skipif(not choice.installed("llama"), reason="llama-cpp-python is not installed")


def on_llama(path: Path, n_ctx: int, **request: Any) -> planning.Place:
    with GGUFFile.open(path) as file:
        found = planning.places(Request(file, n_ctx, **request), None)
    return next(place for place in found if (place.backend, place.device) == ("llama", "cpu"))


HELD = """
import sys
from edgert import backends
from edgert.backends import planning
from edgert.quantize.gguf_file import GGUFFile
for path in sys.argv[1:]:
    backend = backends.load(path, backend="llama", device="cpu", n_ctx=512, n_threads=1)
    weights = sum(float(size) for _, what, size in backend._buffers if what == "model") * 2**20
    held = backend.memory()
    backend.close()
    with GGUFFile.open(path) as file:  # afterwards, since a first load finds out about AMX
        places = planning.places(planning.Request(file, 512), None)
    place = next(place for place in places if (place.backend, place.device) == ("llama", "cpu"))
    print(weights, place.memory["weights"], held["kv"], place.memory["kv"])
"""


@needs_llama
@pytest.mark.slow
def test_an_excerpt_runs_in_a_process_of_its_own(tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model("llama", n_layer=4)) as file:
        found = excerpts.steps(file, "llama", {"device": "cpu", "n_gpu_layers": 0}, 1, fresh=True)
        assert found.layers == (2, 4) and 0 < found.single[0] < found.prompt[0]
        with pytest.raises(EdgertError, match="no GPU 'CUDA7' here"):
            excerpts.steps(file, "llama", {"device": "CUDA7"}, 1, fresh=True)


@needs_llama
def test_llama_s_weights_and_cache_are_what_it_reports(tiny_model: Callable[..., Path]) -> None:
    """Copies in layouts of its own included, as this build and processor make them.

    In a process of its own: where edgert's kernels have used AMX, llama.cpp's that fail can only be avoided without
    such layouts.
    """
    shape = {"n_embd": 512, "n_ff": 512, "head_dim": 64, "n_vocab": 2048}
    paths = [tiny_model("llama", quant=quant, **shape) for quant in (Type.Q4_0, Type.Q4_1, Type.Q4_K, Type.Q8_0)]
    done = subprocess.run([sys.executable, "-c", HELD, *paths], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        weights, planned, kv, planned_kv = map(float, line.split())
        assert planned == pytest.approx(weights, rel=0.03)
        assert planned_kv == kv
    assert len(done.stdout.splitlines()) == len(paths)


@needs_llama
def test_llama_on_the_processor_has_conversations_types_and_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model("llama", n_ctx=100_000)
    one, four = on_llama(path, 4096), on_llama(path, 4096, n_parallel=4)
    assert four.memory["kv"] == 4 * one.memory["kv"] and four.memory["weights"] == one.memory["weights"]
    assert on_llama(path, 4096, types=("q8_0", "q8_0")).memory["kv"] == one.memory["kv"] * 8.5 / 16
    with_memory(monkeypatch, one.memory["total"] - (10 << 20))
    place = on_llama(path, 4096)
    assert not place.fits and place.missing == 10 << 20
    assert f"at most -c {place.largest_context} fits" in place.remedy and 0 < place.largest_context < 4096
    assert on_llama(path, place.largest_context).fits


@needs_llama
def test_a_llama_that_does_not_load_is_named_unusable(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    def broken(*_: Any) -> Any:
        raise BackendUnavailableError("its library does not load (x): build it again")

    monkeypatch.setattr("edgert.backends.llama.library.system_info", broken)
    place = on_llama(tiny_model("llama"), 256)
    assert (place.obstacle, place.remedy) == ("its library does not load (x)", "build it again")


def test_types_that_llama_copies_follow_its_own_words() -> None:
    x86 = "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 1 | AMX_INT8 = 1 | REPACK = 1"
    assert copied_types("CPU : AVX2 = 1 | REPACK = 1") == {"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"}
    assert "Q4_1" in copied_types(x86) and "Q4_1" not in copied_types(x86, ("AMX_INT8",))
    assert "Q2_K" in copied_types(x86, ("AMX_INT8",))
    assert "Q8_0" in copied_types("CPU : NEON = 1 | DOTPROD = 1 | REPACK = 1")
    assert not copied_types("CPU : AVX2 = 1")


PEAK = """
import sys
import edgert
from edgert.backends import planning
from edgert.devices import probe
from edgert.quantize.gguf_file import GGUFFile
path, n_ctx = sys.argv[1], int(sys.argv[2])
with edgert.load(path, backend=sys.argv[3], device="cpu", n_ctx=n_ctx, n_threads=1) as model:
    model.generate(list(range(100, 100 + int(sys.argv[4]))), max_tokens=2, temperature=0, ignore_eos=True)
    peak = probe.process_memory()[1]
with GGUFFile.open(path) as file:
    places = planning.places(planning.Request(file, n_ctx), None)
place = next(place for place in places if (place.backend, place.device) == (sys.argv[3], "cpu"))
print(peak, place.memory["total"])
"""


def peak_and_plan(path: Path, *arguments: object) -> tuple[int, int]:
    command = [sys.executable, "-c", PEAK, str(path), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, planned = map(int, done.stdout.split()[-2:])
    return peak, planned


@needs_llama
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize("n_ctx", [2048, 8192])
def test_llama_s_peak_is_foretold(name: str, n_ctx: int, request: pytest.FixtureRequest) -> None:
    """The cache is taken whole at load, so that a prompt of a whole pass shows the peak."""
    peak, planned = peak_and_plan(request.getfixturevalue(f"{name}_path"), n_ctx, "llama", 512)
    assert planned == pytest.approx(peak, rel=0.15)


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime")), reason="ONNX Runtime is not installed"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_onnx_runtime_s_peak_is_foretold(name: str, request: pytest.FixtureRequest) -> None:
    """When its weights are converted as well, and when they are there already."""
    path = request.getfixturevalue(f"{name}_path")
    for _ in range(2):
        peak, planned = peak_and_plan(path, 2048, "onnx", 2040)
        assert planned == pytest.approx(peak, rel=0.15)
