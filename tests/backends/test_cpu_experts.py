"""Mixtures of experts on the cpu backend: against the NumPy reference, llama.cpp, and themselves in other batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from llama_oracle import llama_cpp_logits
from mixtures import MIXTURES, N_EXPERT, N_USED, OTHERS, write_mixture
from reference import Reference, kl_divergence

from edgert import backends
from edgert.backends.base import Backend, Batch
from edgert.backends.cpu.isa import available
from edgert.quantize.engine import Expert

LENGTH = 150  # two whole windows of the engine's wide kernels, and a rest
TOKENS = np.random.default_rng(3).integers(0, 384, LENGTH).tolist()
# Mean divergence. A token near the border between two experts may take the other one: that is most of it.
BOUNDS = {Type.F32: 1e-3, Type.BF16: 5e-3, Type.Q4_0: 0.03}

Open = Callable[..., Backend]


@pytest.fixture
def open_cpu() -> Iterator[Open]:
    opened: list[Backend] = []

    def make(path: Path, **options: Any) -> Backend:
        given = {"n_ctx": 256, "n_threads": 2, "cache_type_k": "f16", "cache_type_v": "f16", **options}
        opened.append(backends.load(path, backend="cpu", **given))
        return opened[-1]

    yield make
    for backend in opened:
        backend.close()


def logits_of(backend: Backend, tokens: list[int] = TOKENS) -> np.ndarray:
    backend.free(0)
    return backend.forward(Batch.of(tokens, 0, wanted="all")).copy()


@pytest.mark.parametrize(
    "family, quant",
    [*((family, Type.F32) for family in MIXTURES), ("qwen2moe", Type.BF16), ("qwen2moe", Type.Q4_0)],
    ids=str,
)
def test_logits_are_those_of_the_reference(family: str, quant: Type, tmp_path: Path, open_cpu: Open) -> None:
    path = write_mixture(tmp_path / "m.gguf", family, quant=quant)
    expected = Reference(path).logits(TOKENS)
    found = logits_of(open_cpu(path))
    assert kl_divergence(expected, found).mean() < BOUNDS[quant]
    assert np.median(kl_divergence(expected, found)) < BOUNDS[quant] / 10


@pytest.mark.parametrize("family", MIXTURES)
def test_llama_cpp_computes_the_same(family: str, tmp_path: Path, open_cpu: Open) -> None:
    path = write_mixture(tmp_path / "m.gguf", family, quant=Type.F32)
    found, expected = logits_of(open_cpu(path)), llama_cpp_logits(path, TOKENS)
    assert kl_divergence(expected, found).mean() < 1e-3
    assert (found.argmax(1) == expected.argmax(1)).mean() > 0.98


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_those_of_llama_cpp(family: str, tmp_path: Path, open_cpu: Open) -> None:
    """Dense layers before the mixtures, shared experts, gates that differ, scaled shares."""
    path = write_mixture(tmp_path / "m.gguf", family, n_layer=3, quant=Type.F32)
    found, expected = logits_of(open_cpu(path)), Reference(path).logits(TOKENS)
    assert kl_divergence(expected, found).mean() < 1e-3
    assert kl_divergence(expected, llama_cpp_logits(path, TOKENS)).mean() < 1e-3


@pytest.mark.parametrize("isa", [None, "avx2", "portable"])
def test_a_token_does_not_see_what_else_is_in_the_batch(isa: str | None, tmp_path: Path, open_cpu: Open) -> None:
    """Bit for bit: two sequences, wide and narrow rows, together and alone."""
    path = write_mixture(tmp_path / "m.gguf", "qwen2moe", quant=Type.Q4_0)
    if isa and isa not in available():
        pytest.skip(f"this processor has no {isa}")
    backend = open_cpu(path, n_seq_max=2, isa=isa)
    alone = logits_of(backend, TOKENS[:70])
    backend.free(0)
    first, second = Batch.of(TOKENS[:70], 0, 0, "all"), Batch.of(TOKENS[70:73], 0, 1, "all")
    both = Batch(*(np.concatenate(pair) for pair in zip(parts(first), parts(second), strict=True)))
    np.testing.assert_array_equal(backend.forward(both)[:70], alone)


def parts(batch: Batch) -> tuple[np.ndarray, ...]:
    return batch.tokens, batch.sequences, batch.positions, batch.wanted


@pytest.mark.parametrize("quant", [Type.F32, Type.Q4_0])
def test_gates_and_ups_in_one_tensor_are_the_same(quant: Type, tmp_path: Path, open_cpu: Open) -> None:
    path = write_mixture(tmp_path / "m.gguf", "qwen3moe", quant=quant, fused=True)
    assert kl_divergence(Reference(path).logits(TOKENS), logits_of(open_cpu(path))).mean() < BOUNDS[quant]


def test_gates_and_ups_of_different_types(tmp_path: Path, open_cpu: Open) -> None:
    types = {"*ffn_gate_exps*": Type.Q8_0, "*ffn_up_exps*": Type.Q4_0, "*": Type.Q8_0}
    path = write_mixture(tmp_path / "m.gguf", "llama", quant=types)
    assert kl_divergence(Reference(path).logits(TOKENS), logits_of(open_cpu(path))).mean() < BOUNDS[Type.Q4_0]


def test_what_experts_read(tmp_path: Path, open_cpu: Open) -> None:
    """Each token once for each of its experts; gate and up share it, down has its own; the router reads all."""
    path = write_mixture(tmp_path / "m.gguf", "qwen2moe", quant=Type.BF16)
    seen: dict[str, dict[Expert | None, list[np.ndarray]]] = {}

    def on_input(names: tuple[str, ...], inputs: np.ndarray, expert: Expert | None = None) -> None:
        for name in names:
            seen.setdefault(name, {}).setdefault(expert, []).append(inputs.copy())

    backend = open_cpu(path)
    backend.observe(Batch.of(TOKENS, 0, wanted="all"), on_input)
    counts = {}
    for part in ("gate", "up", "down"):
        found = seen[f"blk.1.ffn_{part}_exps.weight"]
        assert {expert.of for expert in found if expert} == {N_EXPERT}
        counts[part] = {expert: sum(map(len, rows)) for expert, rows in found.items()}
        assert sum(counts[part].values()) == N_USED * LENGTH
        shared = seen[f"blk.1.ffn_{part}_shexp.weight"]
        assert list(shared) == [None] and sum(map(len, shared[None])) == LENGTH
    assert counts["gate"] == counts["up"] == counts["down"]
    rows = np.concatenate(seen["blk.1.ffn_gate_inp.weight"][None])
    everything = np.concatenate([x for found in seen["blk.1.ffn_up_exps.weight"].values() for x in found])
    np.testing.assert_allclose(
        np.sort((everything**2).sum(1)), np.sort(np.repeat((rows**2).sum(1), N_USED)), rtol=0.02
    )  # bf16 tiles


def test_an_expert_takes_other_values(tmp_path: Path, open_cpu: Open) -> None:
    path = write_mixture(tmp_path / "m.gguf", "llama", quant=Type.BF16)
    backend = open_cpu(path)
    before = logits_of(backend)
    name = "blk.0.ffn_up_exps.weight"
    values = Reference(path).weight(name)
    backend.replace(name, np.zeros_like(values))
    assert np.abs(logits_of(backend) - before).max() > 0.1
    backend.replace(name, values)
    np.testing.assert_array_equal(logits_of(backend), before)
