"""The CPU engine against the float32 reference: every family, format and instruction set, any batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from reference import Reference, kl_divergence
from tiny import FAMILIES

from edgert import backends
from edgert.backends.base import Backend, Batch
from edgert.backends.cpu import isa
from edgert.errors import ModelFileError, UnsupportedFormatError

# How far logits may lie from the reference's, by weights: the cache is rounded to 16 bits; beside bf16 weights
# activations may be, too; beside quantized ones they are rounded to 8 bits.
BOUNDS = {Type.F32: 0.003, Type.F16: 0.01, Type.BF16: 0.02}
FLOAT_CACHE = {"cache_type_k": "f16", "cache_type_v": "f16"}  # what is compared here is all but the cache
K_QUANTS = (Type.Q4_K, Type.Q5_K, Type.Q6_K)
FORMATS = (*BOUNDS, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, *K_QUANTS, Type.IQ4_NL)
EACH_ISA = (*BOUNDS, Type.Q4_0, Type.Q4_K)
FORCED = os.environ.get("EDGERT_ISA")
ISAS = [FORCED] if FORCED else isa.available()[1:] or isa.available()  # the best one runs everything else
BLOCKS_OF_256 = {"n_embd": 256, "n_head": 4, "head_dim": 64, "n_ff": 512}
LENGTH = 150  # two whole windows of the engine's wide kernels, and a rest
TOKENS = np.random.default_rng(11).integers(0, 384, LENGTH).tolist()
OTHERS = np.random.default_rng(12).integers(0, 384, (3, LENGTH)).tolist()

Open = Callable[..., Backend]


@pytest.fixture
def open_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """open_cpu(path, isa=None, **options) -> a CPU backend that is closed after the test."""
    opened: list[Backend] = []

    def make(path: Path, isa: str | None = None, **options: Any) -> Backend:
        if isa:
            monkeypatch.setenv("EDGERT_ISA", isa)
        options = {"n_ctx": 256, "n_threads": 2, **FLOAT_CACHE, **options}
        opened.append(backends.load(path, backend="cpu", **options))
        return opened[-1]

    yield make
    for backend in opened:
        backend.close()


def feed(
    backend: Backend, tokens: Sequence[int], chunk: int | None = None, position: int = 0, sequence: int = 0
) -> np.ndarray:
    """Logits (n, n_vocab) after each token, computed in steps of `chunk` tokens."""
    chunk = chunk or len(tokens)
    steps = []
    for start in range(0, len(tokens), chunk):
        batch = Batch.of(tokens[start : start + chunk], position + start, sequence, "all")
        steps.append(backend.forward(batch).copy())
    return np.concatenate(steps)


def distance(logits: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference, in standard deviations of the expected logits."""
    assert logits.shape == expected.shape
    assert logits.dtype == np.float32
    return float(np.sqrt(((logits - expected) ** 2).mean()) / expected.std())


def tiny_of(tiny_model: Callable[..., Path], family: str, quant: Type, **options: Any) -> Path:
    return tiny_model(family, quant=quant, **(BLOCKS_OF_256 if quant in K_QUANTS else {}), **options)


def check_against_reference(backend: Backend, path: Path, quant: Type) -> None:
    expected = Reference(path).logits(TOKENS)
    logits = feed(backend, TOKENS)
    bound = BOUNDS.get(quant, 0.04)
    assert distance(logits, expected) < bound
    assert kl_divergence(expected, logits).mean() < 4 * bound**2
    decoded = np.concatenate([feed(backend, [token], position=i, sequence=1) for i, token in enumerate(TOKENS[:40])])
    assert distance(decoded, expected[:40]) < bound


@pytest.mark.parametrize("quant", FORMATS, ids=lambda quant: quant.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_and_formats(family: str, quant: Type, tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    path = tiny_of(tiny_model, family, quant)
    check_against_reference(open_cpu(path, n_seq_max=2), path, quant)


# Products of every format on every instruction set are test_cpu_kernels'; here they serve whole models.
@pytest.mark.parametrize(
    "quant",
    [quant if quant in EACH_ISA else pytest.param(quant, marks=pytest.mark.slow) for quant in FORMATS],
    ids=lambda quant: quant.name,
)
@pytest.mark.parametrize("name", ISAS)
def test_instruction_sets_and_formats(name: str, quant: Type, tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    path = tiny_of(tiny_model, "llama", quant)
    check_against_reference(open_cpu(path, name, n_seq_max=2), path, quant)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("name", ISAS)
def test_instruction_sets_and_families(name: str, family: str, tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    path = tiny_of(tiny_model, family, Type.Q4_0)
    check_against_reference(open_cpu(path, name, n_seq_max=2), path, Type.Q4_0)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied llama": ("llama", {"tied": True}),
    "llama with biases": ("llama", {"bias": True}),
    "llama-3 factors": ("llama", {"rope_factors": np.geomspace(1, 8, 16).tolist()}),
    "linear rope": ("llama", {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}}),
    "one head": ("llama", {"n_head": 1, "n_head_kv": 1, "head_dim": 128}),
    "no groups": ("llama", {"n_head_kv": 4}),
    "nine heads in three": ("llama", {"n_embd": 288, "n_head": 9, "n_head_kv": 3}),
    "twenty heads of one": ("llama", {"n_embd": 320, "n_head": 20, "n_head_kv": 1, "head_dim": 16}),
    "heads of 64": ("qwen3", {"head_dim": 64}),
    "heads of 96": ("llama", {"head_dim": 96}),
    "heads of 128": ("qwen3", {"head_dim": 128}),
    "heads of 256": ("gemma3", {"head_dim": 256, "n_head_kv": 1}),
    "odd vocabulary": ("llama", {"n_vocab": 397}),
    "odd width of ffn": ("llama", {"n_ff": 224}),
    "untied gemma": ("gemma3", {"tied": False}),
    "capped logits": ("gemma3", {"metadata": {"gemma3.final_logit_softcapping": 3.0}}),
    "scaled gemma": (
        "gemma3",
        {"metadata": {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}},
    ),
    "gemma without windows": ("gemma3", {"window": 0}),
    "mixed types": (
        "gemma3",
        {"quant": {"*attn_k*": Type.Q5_0, "*attn_v*": Type.Q8_0, "*ffn_down*": Type.F16, "*": Type.Q4_1}},
    ),
    "mixed k-quants": (
        "llama",
        {"quant": {"*ffn_down*": Type.Q6_K, "*attn_v*": Type.Q5_K, "token*": Type.Q8_0, "*": Type.Q4_K}}
        | BLOCKS_OF_256,
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    family, options = VARIANTS[variant]
    path = tiny_model(family, **{"quant": Type.Q8_0, **options})
    check_against_reference(open_cpu(path, n_seq_max=2), path, Type.Q4_0)


def test_what_the_engine_lacks_is_refused(tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    path = tiny_model("llama", head_dim=40)
    with pytest.raises(UnsupportedFormatError, match="heads of 40"):
        open_cpu(path)


@pytest.mark.parametrize("types", ["f16", "q4_0"])
def test_capped_attention(types: str, tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    """Alone, in windows, with packed keys, which are held less a mean unless scores are capped."""
    path = tiny_model("gemma3", quant=Type.Q8_0, metadata={"gemma3.attn_logit_softcapping": 1.5})
    backend = open_cpu(path, n_seq_max=2, cache_type_k=types, cache_type_v=types)
    expected = Reference(path).logits(TOKENS)
    assert distance(feed(backend, TOKENS), expected) < (0.04 if types == "f16" else 0.4)
    assert distance(feed(backend, TOKENS[:70], 1, sequence=1), expected[:70]) < (0.04 if types == "f16" else 0.4)


def test_layers_of_different_sizes(tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    """Heads and widths of each layer's own, from arrays in the file."""
    rng = np.random.default_rng(4)
    shapes = {"attn_q": (64, 128), "attn_k": (32, 128), "attn_v": (32, 128), "attn_output": (128, 64),
              "ffn_gate": (96, 128), "ffn_up": (96, 128), "ffn_down": (128, 96)}  # fmt: skip
    path = tiny_model(
        "llama",
        quant=Type.Q8_0,
        metadata={
            "llama.attention.head_count": [4, 2],
            "llama.attention.head_count_kv": [2, 1],
            "llama.attention.key_length": 32,
            "llama.attention.value_length": 32,
            "llama.feed_forward_length": [192, 96],
        },
        weights={
            f"blk.1.{name}.weight": rng.normal(0, 1 / np.sqrt(shape[1]), shape).astype(np.float32)
            for name, shape in shapes.items()
        },
    )
    check_against_reference(open_cpu(path, n_seq_max=2), path, Type.Q8_0)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 149])
def test_windows(window: int, tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    """A window of every size around those of tiles and blocks, read at once, in chunks and token by token."""
    path = tiny_model("gemma3", quant=Type.F32, window=window)
    expected = Reference(path).logits(TOKENS)
    backend = open_cpu(path, n_seq_max=3)
    for sequence, chunk in enumerate((LENGTH, 13, 1)):
        logits = feed(backend, TOKENS, chunk, sequence=sequence)
        assert distance(logits, expected) < 0.003
        assert distance(logits[window:], expected[window:]) < 0.003


# Another order of sums, or another kernel: with float weights that is a rounding of float32; with quantized ones it
# may flip the rounding of an activation to 8 bits, or avoid it (tiles of bf16), so as far as from the reference.
SAME = {Type.F32: 0.001, Type.Q4_0: 0.06}


@dataclass(frozen=True)
class Model:
    path: Path
    quant: Type

    def same(self, logits: np.ndarray, expected: np.ndarray) -> bool:
        return distance(logits, expected) < SAME[self.quant]


@pytest.fixture(
    params=[(family, quant) for family in ("llama", "gemma3") for quant in SAME],
    ids=lambda param: f"{param[0]}-{param[1].name}",
)
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Model:
    family, quant = request.param
    return Model(tiny_model(family, quant=quant), quant)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 128, 129])
def test_chunks(chunk: int, model: Model, open_cpu: Open) -> None:
    backend = open_cpu(model.path, n_seq_max=2)
    assert model.same(feed(backend, TOKENS, chunk, sequence=1), feed(backend, TOKENS))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129])
def test_prefill_then_decode(length: int, model: Model, open_cpu: Open) -> None:
    backend = open_cpu(model.path, n_seq_max=2)
    whole = feed(backend, TOKENS, sequence=1)
    first = feed(backend, TOKENS[:length])
    rest = feed(backend, TOKENS[length : length + 10], chunk=1, position=length)
    assert model.same(np.concatenate([first, rest]), whole[: length + 10])


def test_only_wanted_logits(model: Model, open_cpu: Open) -> None:
    backend = open_cpu(model.path, n_seq_max=3)
    whole = feed(backend, TOKENS)
    last = backend.forward(Batch.of(TOKENS, 0, 1)).copy()
    assert model.same(last, whole[-1:])
    n = np.arange(LENGTH, dtype=np.int32)
    some = Batch(np.asarray(TOKENS, np.int32), np.full_like(n, 2), n, n % 7 == 3)
    assert model.same(backend.forward(some).copy(), whole[n % 7 == 3])
    assert backend.forward(Batch.of(OTHERS[0][:9], LENGTH, 2, "none")).shape == (0, backend.n_vocab)
    assert backend.length(2) == LENGTH + 9


def test_sequences_share_a_batch(model: Model, open_cpu: Open) -> None:
    """Sequences of different lengths, interleaved token by token and as runs, answer as if alone."""
    texts = [TOKENS[:141], OTHERS[0][:7], OTHERS[1][:64], OTHERS[2][:1]]
    alone = open_cpu(model.path, n_seq_max=4)
    expected = [feed(alone, text, sequence=i) for i, text in enumerate(texts)]
    entries = [(i, p) for i, text in enumerate(texts) for p in range(len(text))]
    for order in (entries, sorted(entries, key=lambda entry: (entry[1], entry[0]))):
        backend = open_cpu(model.path, n_seq_max=4)
        sequences, positions = np.array(order, np.int32).T
        tokens = np.array([texts[i][p] for i, p in order], np.int32)
        logits = backend.forward(Batch(tokens, sequences, positions, np.ones(len(order), bool))).copy()
        for i in range(len(texts)):
            assert model.same(logits[sequences == i], expected[i])
        assert [backend.length(i) for i in range(4)] == [141, 7, 64, 1]
        # one decode step of all of them beside a prefill of a freed one
        backend.free(3)
        step = [(0, 141, OTHERS[0][50]), (1, 7, OTHERS[0][51]), (2, 64, OTHERS[0][52])]
        step += [(3, p, TOKENS[p]) for p in range(20)]
        sequences, positions, tokens = np.array(step, np.int32).T
        logits = backend.forward(Batch(tokens, sequences, positions, np.ones(len(step), bool))).copy()
        fresh = open_cpu(model.path, n_seq_max=4)
        for i in range(3):
            one = feed(fresh, [*texts[i], OTHERS[0][50 + i]], sequence=i)[-1:]
            assert model.same(logits[i : i + 1], one)
        assert model.same(logits[3:], feed(fresh, TOKENS[:20], sequence=3))


@pytest.mark.parametrize("length", [1, 16, 31, 32, 33, 50, 63, 64, 65, 100, 127, 128, 129, 140])
def test_fork(length: int, model: Model, open_cpu: Open) -> None:
    """The copy and the original go on independently of each other."""
    backend = open_cpu(model.path, n_seq_max=4)
    feed(backend, TOKENS[:140])
    backend.fork(0, 1, length)
    assert (backend.length(0), backend.length(1)) == (140, length)
    other = feed(backend, OTHERS[0][:20], position=length, sequence=1)
    own = feed(backend, TOKENS[140:], position=140)
    expected = feed(backend, TOKENS[:length] + OTHERS[0][:20], sequence=2)[length:]
    assert model.same(other, expected)
    assert model.same(own, feed(backend, TOKENS, sequence=3)[140:])
    backend.free(0)
    more = feed(backend, OTHERS[1][:5], position=length + 20, sequence=1)
    backend.free(3)
    whole = feed(backend, TOKENS[:length] + OTHERS[0][:20] + OTHERS[1][:5], sequence=3)
    assert model.same(more, whole[-5:])


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 64, 100, 128, 139])
def test_truncate(length: int, model: Model, open_cpu: Open) -> None:
    backend = open_cpu(model.path, n_seq_max=2)
    feed(backend, TOKENS[:140])
    backend.truncate(0, length)
    assert backend.length(0) == length
    again = feed(backend, OTHERS[0][:20], position=length)
    expected = feed(backend, TOKENS[:length] + OTHERS[0][:20], sequence=1)[length:]
    assert model.same(again, expected)


def test_freed_memory_serves_again(model: Model, open_cpu: Open) -> None:
    """Fill, free and fill the cache many times over; nothing of an old text remains."""
    backend = open_cpu(model.path, n_seq_max=2, n_ctx=160)
    expected = feed(backend, TOKENS)
    for _ in range(10):
        backend.free(0)
        feed(backend, OTHERS[1], sequence=1)
        backend.free(1)
        assert model.same(feed(backend, TOKENS), expected)


def test_threads_do_not_change_the_answer(model: Model, open_cpu: Open) -> None:
    one = feed(open_cpu(model.path, n_threads=1), TOKENS)
    for n_threads in (2, 3, 5):
        assert model.same(feed(open_cpu(model.path, n_threads=n_threads), TOKENS), one)


def test_greedy_is_the_same_alone_and_in_company(model: Model, open_cpu: Open) -> None:
    """The logits of a decode step are equal to the bit, whatever else is in the batch."""
    backend = open_cpu(model.path, n_seq_max=4)
    for i in range(4):
        feed(backend, [TOKENS, *OTHERS][i][:30], sequence=i)
    alone = feed(backend, [7], position=30)
    backend.truncate(0, 30)
    together = Batch(np.full(4, 7, np.int32), np.arange(4, dtype=np.int32), np.full(4, 30, np.int32), np.ones(4, bool))
    np.testing.assert_array_equal(backend.forward(together)[0], alone[0])


def test_whole_context(model: Model, open_cpu: Open) -> None:
    """Every length up to n_ctx works; one more token is an error that leaves the cache as it was."""
    backend = open_cpu(model.path, n_ctx=64)
    expected = Reference(model.path).logits(TOKENS[:64])
    for n_ctx_used in range(58, 65):
        backend.free(0)
        assert model.same(feed(backend, TOKENS[:n_ctx_used]), expected[:n_ctx_used])
    with pytest.raises(ValueError, match="63"):
        backend.forward(Batch.of([1], 64))
    assert backend.length(0) == 64
    backend.truncate(0, 50)
    assert model.same(feed(backend, TOKENS[50:64], chunk=1, position=50), expected[50:])


@pytest.mark.parametrize(
    "batch",
    {
        "id": Batch.of([384], 0),
        "negative id": Batch.of([-1], 0),
        "sequence": Batch.of([1], 0, sequence=2),
        "negative sequence": Batch.of([1], 0, sequence=-1),
        "gap": Batch.of([1], 1),
        "negative position": Batch.of([1], -1),
    }.items(),
    ids=lambda item: item[0],
)
def test_wrong_batches(batch: tuple[str, Batch], tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    backend = open_cpu(tiny_model("llama"), n_seq_max=2)
    with pytest.raises(ValueError):
        backend.forward(batch[1])
    assert backend.length(0) == 0
    assert np.isfinite(feed(backend, TOKENS)).all()


@pytest.mark.parametrize("quant", [Type.F32, Type.F16, Type.Q8_0], ids=lambda quant: quant.name)
def test_weights_that_are_no_numbers_are_named(quant: Type, tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    weight = np.ones((192, 128), np.float32)
    weight[100, 77] = np.nan
    with np.errstate(invalid="ignore"):
        path = tiny_model("llama", quant=quant, weights={"blk.1.ffn_up.weight": weight})
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up\.weight"):
        open_cpu(path)


REAL = {
    "smollm2": [504, 33059, 40061, 17288, 260, 7761, 338, 4180, 1092, 260, 5670, 28, 284, 4150],
    "gemma3": [2, 818, 63937, 64222, 31167, 506, 19916, 600, 6915, 1680, 506, 12978, 236764, 532, 7971],
}


@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_real_models_are_near_the_reference(name: str, request: pytest.FixtureRequest) -> None:
    path, tokens = request.getfixturevalue(f"{name}_path"), REAL[name]
    with closing(backends.load(path, backend="cpu", n_ctx=64, n_threads=2)) as backend:
        logits = feed(backend, tokens)
    expected = Reference(path, cache=False).logits(tokens)
    assert kl_divergence(expected, logits).mean() < 0.01
