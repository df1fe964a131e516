"""Compact caches of the CPU engine against the float32 reference and llama.cpp's own, on every instruction set."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from reference import Reference, kl_divergence

from edgert import backends
from edgert.backends.base import Backend, Batch
from edgert.backends.cpu import isa
from edgert.errors import RequestError

FORCED = os.environ.get("EDGERT_ISA")
ISAS = [FORCED] if FORCED else isa.available()
# Compiling all of it for every instruction set takes minutes: the fastest one at once, the others in the slow tests.
EACH_ISA = [pytest.param(name, marks=[pytest.mark.slow] if i else []) for i, name in enumerate(ISAS)]
LENGTH = 150
TOKENS = np.random.default_rng(11).integers(0, 384, LENGTH).tolist()
OTHERS = np.random.default_rng(12).integers(0, 384, LENGTH).tolist()
# How far logits may lie from the reference's, in its standard deviations, for float weights: rounding noise of
# 2**-8 and 2**-4 of the largest of a block, through three layers. A wrong scale, offset or dimension gives above 0.5.
BOUNDS = {"f16": 0.003, "q8_0": 0.03, "q4_0": 0.35}
PAIRS = [(k, v) for k in BOUNDS for v in BOUNDS if (k, v) != ("f16", "f16")]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "heads of 32": ("llama", {}),
    "heads of 64 in threes": ("llama", {"n_embd": 576, "n_head": 9, "n_head_kv": 3, "head_dim": 64}),
    "heads of 96": ("llama", {"head_dim": 96}),
    "no groups": ("llama", {"n_head_kv": 4}),
    "heads of 256 with windows": ("gemma3", {"head_dim": 256, "n_head_kv": 1}),
    "small windows": ("gemma3", {"window": 20}),
}

Open = Callable[..., Backend]


@pytest.fixture
def open_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    opened: list[Backend] = []

    def make(path: Path, k: str, v: str, isa: str | None = None, **options: Any) -> Backend:
        if isa:
            monkeypatch.setenv("EDGERT_ISA", isa)
        options = {"n_ctx": 256, "n_threads": 2, "n_seq_max": 3, **options}
        opened.append(backends.load(path, backend="cpu", cache_type_k=k, cache_type_v=v, **options))
        return opened[-1]

    yield make
    for backend in opened:
        backend.close()


def feed(
    backend: Backend, tokens: Sequence[int], chunk: int | None = None, position: int = 0, sequence: int = 0
) -> np.ndarray:
    chunk = chunk or len(tokens)
    steps = []
    for start in range(0, len(tokens), chunk):
        batch = Batch.of(tokens[start : start + chunk], position + start, sequence, "all")
        steps.append(backend.forward(batch).copy())
    return np.concatenate(steps)


def distance(logits: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((logits - expected) ** 2).mean()) / expected.std())


def check(backend: Backend, path: Path, k: str, v: str) -> None:
    """By the kernels for many tokens, for few and for one: near the reference, and nearer to each other."""
    expected = Reference(path).logits(TOKENS)
    logits = feed(backend, TOKENS)
    bound = BOUNDS[k] + BOUNDS[v]
    assert distance(logits, expected) < bound
    assert kl_divergence(expected, logits).mean() < 4 * bound**2
    for sequence, chunk in ((1, 13), (2, 1)):
        assert distance(feed(backend, TOKENS, chunk, sequence=sequence), logits) < bound / 3


@pytest.mark.parametrize("types", PAIRS, ids="-".join)
@pytest.mark.parametrize("name", EACH_ISA)
def test_types(name: str, types: tuple[str, str], tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    path = tiny_model("llama", quant=Type.F32)
    check(open_cpu(path, *types, name), path, *types)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", EACH_ISA)
def test_shapes(name: str, shape: str, kind: str, tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    family, options = SHAPES[shape]
    path = tiny_model(family, quant=Type.F32, **options)
    check(open_cpu(path, kind, kind, name), path, kind, kind)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 63, 64, 100, 128, 140])
def test_forks_and_truncations(length: int, kind: str, tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    """The copy and the original go on independently, and equal what is read anew."""
    backend = open_cpu(tiny_model("gemma3", quant=Type.F32, window=48), kind, kind)
    feed(backend, TOKENS[:140], 1)
    backend.fork(0, 1, length)
    other = feed(backend, OTHERS[:20], 1, position=length, sequence=1)
    own = feed(backend, TOKENS[140:], 1, position=140)
    feed(backend, TOKENS[:length], 1, sequence=2)
    np.testing.assert_array_equal(feed(backend, OTHERS[:20], 1, position=length, sequence=2), other)
    backend.free(2)
    feed(backend, TOKENS[:140], 1, sequence=2)
    np.testing.assert_array_equal(feed(backend, TOKENS[140:], 1, position=140, sequence=2), own)
    backend.truncate(2, length)
    np.testing.assert_array_equal(feed(backend, OTHERS[:20], 1, position=length, sequence=2), other)


def test_threads_do_not_change_the_answer(tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    """Codes of several positions and dimensions share bytes and lines: no thread may undo another's."""
    path = tiny_model("llama", quant=Type.F32)
    one = feed(open_cpu(path, "q4_0", "q4_0", n_threads=1), TOKENS)
    for n_threads in (2, 3, 5):
        np.testing.assert_array_equal(feed(open_cpu(path, "q4_0", "q4_0", n_threads=n_threads), TOKENS), one)


def test_bytes_of_a_token(tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    """4.5 and 8.5 bits a value, of keys and of values apart."""
    path = tiny_model("llama", quant=Type.F32, n_layer=2, n_head_kv=2, head_dim=64)
    for k, v, bits in (("f16", "f16", 32), ("q8_0", "q8_0", 17), ("q4_0", "q4_0", 9), ("q8_0", "q4_0", 13)):
        backend = open_cpu(path, k, v)
        feed(backend, TOKENS[:128])
        refined = 16 if k == "q4_0" else 0  # the first page is held twice
        assert backend.memory()["kv"] == 2 * 2 * 64 * (128 + refined) * bits // 8
        assert backend.memory()["kv_per_token"] == 2 * 2 * 64 * bits // 8


def test_who_is_warned_of_few_bits(
    tiny_model: Callable[..., Path], open_cpu: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose figures are beyond what `tests/bench/kv_quality.py` recommends."""
    open_cpu(tiny_model("llama", n_head_kv=2), "q4_0", "q4_0")
    open_cpu(tiny_model("llama", n_head_kv=1), "q8_0", "q8_0")
    assert not caplog.messages
    open_cpu(tiny_model("llama", n_head_kv=1), "q8_0", "q4_0")
    assert "one key-value head" in caplog.text and "q8_0 is safe" in caplog.text


def test_the_default(tiny_model: Callable[..., Path]) -> None:
    """8 bits, unless heads cannot be cut in blocks of 32."""
    for head_dim, name in ((32, "q8_0"), (48, "f16")):
        backend = backends.load(tiny_model("llama", head_dim=head_dim), backend="cpu", n_ctx=64, n_threads=1)
        assert (backend.verdict.details["type_k"], backend.verdict.details["type_v"]) == (name, name)
        backend.close()


def test_what_cannot_be_is_refused(tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    with pytest.raises(RequestError, match=r"cache_type_k: is 'q3'; the cpu backend has f16, q8_0, q4_0"):
        open_cpu(tiny_model("llama"), "q3", "f16")
    with pytest.raises(RequestError, match=r"cache_type_v: q4_0 needs heads of a multiple of 32, not 48"):
        open_cpu(tiny_model("llama", head_dim=48), "f16", "q4_0")


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_nearer_to_the_reference_than_llama_cpp(kind: str, tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    """The same bytes; its blocks are rounded to their largest value, and its keys keep their mean."""
    path = tiny_model("llama", quant=Type.F32, n_embd=128, head_dim=64)
    expected = Reference(path).logits(TOKENS)
    ours = feed(open_cpu(path, kind, kind), TOKENS)
    other = backends.load(path, backend="llama", n_ctx=256, n_threads=1, cache_type_k=kind, cache_type_v=kind)
    try:
        theirs = feed(other, TOKENS)
    finally:
        other.close()
    assert kl_divergence(expected, ours).mean() < 1.2 * kl_divergence(expected, theirs).mean()
