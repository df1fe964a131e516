"""Rates that are predicted: against counting, and how they are measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgert import backends
from edgert.backends import specimen
from edgert.backends.base import Batch
from edgert.backends.clock import Clock
from edgert.backends.cpu import rates
from edgert.backends.cpu.footprint import footprint
from edgert.backends.cpu.rates import Rates, Work
from edgert.notes import Notes
from edgert.quantize.architecture import describe
from edgert.quantize.gguf_file import GGUFFile

MACHINE = Rates(2, "avx2", 100e9, {2048: 50e9}, 40e9, 20e9, {1 << 20: 40e9, 3 << 20: 20e9})


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
