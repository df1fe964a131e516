"""What the CPU engine shows of its products' inputs, against the float32 reference; and weights replaced in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from reference import ObservedReference, Reference, observed, relative_error
from tiny import FAMILIES, write_tiny

from edgert import backends
from edgert.backends.base import Backend, Batch
from edgert.backends.cpu import isa
from edgert.errors import UnsupportedFormatError

LENGTH = 150  # two whole windows of the engine's wide kernels, and a rest
TOKENS = np.random.default_rng(21).integers(0, 384, LENGTH).tolist()
FLOAT_CACHE = {"cache_type_k": "f16", "cache_type_v": "f16"}  # what is compared here is all but the cache
# How far an input may lie from the reference's, in its own root mean square: the cache holds 16 bits; bf16 tiles. On
# processors without tiles activations become bytes, and it is what these alone cost, if that is more.
BOUNDS = {Type.F32: 0.002, Type.F16: 0.005, Type.BF16: 0.02, Type.Q8_0: 0.03, Type.Q4_0: 0.03}

Open = Callable[..., Backend]


def allowed(quant: Type, rounded: np.ndarray, exact: np.ndarray) -> float:
    """How far what is found may lie from `exact`, where activations rounded to bytes lead to `rounded`."""
    most = BOUNDS[quant]
    if isa.select().name == "amx" or quant not in (Type.Q4_0, Type.Q8_0):
        return most
    return max(most, 1.1 * relative_error(rounded, exact))


@pytest.fixture
def open_cpu() -> Iterator[Open]:
    opened: list[Backend] = []

    def make(path: Path, **options: Any) -> Backend:
        opened.append(backends.load(path, backend="cpu", **{"n_ctx": 256, "n_threads": 2, **FLOAT_CACHE, **options}))
        return opened[-1]

    yield make
    for backend in opened:
        backend.close()


@pytest.mark.parametrize("quant", BOUNDS, ids=lambda quant: quant.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_those_of_the_reference(
    family: str, quant: Type, tiny_model: Callable[..., Path], open_cpu: Open
) -> None:
    path = tiny_model(family, quant=quant)
    expected = ObservedReference(path).inputs(TOKENS)
    rounded = ObservedReference(path, int8=True).inputs(TOKENS)
    backend = open_cpu(path)
    found = observed(backend, Batch.of(TOKENS, 0, wanted="all"))
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in found}
    assert {
        name: error for name, error in errors.items() if error > allowed(quant, rounded[name], expected[name])
    } == {}


@pytest.mark.parametrize("length", [1, 3, 7, 64])
def test_any_number_of_tokens(length: int, tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    path = tiny_model("gemma3", quant=Type.F32)
    expected = ObservedReference(path).inputs(TOKENS[:length])
    found = observed(open_cpu(path), Batch.of(TOKENS[:length], 0, wanted="all"))
    assert max(relative_error(found[name], expected[name]) for name in expected) < BOUNDS[Type.F32]


MATRICES = [
    "token_embd.weight",
    "output.weight",
    *(
        f"blk.1.{part}.weight"
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    ),
]


ODD = {"n_embd": 96, "n_head": 3, "n_head_kv": 1, "n_ff": 160, "n_vocab": 397}


def logits_of(backend: Backend) -> np.ndarray:
    backend.free(0)
    return backend.forward(Batch.of(TOKENS, 0, wanted="all")).copy()


@pytest.mark.parametrize(
    "quant, weights_as", [(Type.F32, None), (Type.F16, None), (Type.BF16, None), (Type.F32, "bf16"), (Type.Q4_0, "f32")]
)
@pytest.mark.parametrize("options", [{}, ODD], ids=["even", "odd"])
def test_replaced_matrices_are_those_of_a_file_with_these_values(
    quant: Type, weights_as: str | None, options: dict[str, Any], tmp_path: Path, open_cpu: Open
) -> None:
    """Bit for bit, whichever matrices share a packed one; and back again."""
    path = write_tiny(tmp_path / "a.gguf", "llama", quant=quant, **options)
    backend = open_cpu(path, weights_as=weights_as)
    before = logits_of(backend)
    own = {name: Reference(path).weight(name) for name in MATRICES}
    rng = np.random.default_rng(5)
    other = {name: (values * rng.uniform(0.5, 1.5, values.shape)).astype(np.float32) for name, values in own.items()}
    rounded = quant if quant != Type.Q4_0 else Type.F32
    # Only what is replaced may differ, so all other matrices of the second file are the first's own values.
    rest = {t.name: Reference(path).weight(t.name) for t in Reference(path).tensors.values()}
    there = open_cpu(
        write_tiny(tmp_path / "b.gguf", "llama", quant=rounded, weights=rest | other, **options), weights_as=weights_as
    )
    for name in MATRICES:
        backend.replace(name, other[name])
    after = logits_of(backend)
    assert np.abs(after - before).max() > 0.1
    np.testing.assert_array_equal(after, logits_of(there))
    for name in MATRICES:
        backend.replace(name, own[name])
    np.testing.assert_array_equal(logits_of(backend), before)


def test_what_cannot_be_replaced(tiny_model: Callable[..., Path], open_cpu: Open) -> None:
    name = "blk.0.ffn_down.weight"
    quantized = open_cpu(tiny_model("llama", quant=Type.Q4_0))
    with pytest.raises(UnsupportedFormatError, match=r"q4_0.*weights_as"):
        quantized.replace(name, np.zeros((128, 192), np.float32))
    backend = open_cpu(tiny_model("llama", quant=Type.F16))
    before = logits_of(backend)
    with pytest.raises(ValueError, match=r"\(128, 192\)"):
        backend.replace(name, np.zeros((192, 128), np.float32))
    with pytest.raises(ValueError, match="no matrix"):
        backend.replace("blk.0.ffn_norm.weight", np.zeros((1, 128), np.float32))
    for value in (np.nan, np.inf, 1e6):
        with pytest.raises(UnsupportedFormatError, match="f16"):
            backend.replace(name, np.full((128, 192), value, np.float32))
    np.testing.assert_array_equal(logits_of(backend), before)


@pytest.mark.parametrize("quant", [Type.Q4_0, Type.Q8_0, Type.F16])
def test_weights_held_as_f32_are_the_dequantized_ones(
    quant: Type, tiny_model: Callable[..., Path], open_cpu: Open
) -> None:
    path = tiny_model("gemma3", quant=quant)
    expected = Reference(path).logits(TOKENS)
    assert relative_error(logits_of(open_cpu(path, weights_as="f32")), expected) < BOUNDS[Type.F32]
    with pytest.raises(ValueError, match="weights_as"):
        open_cpu(path, weights_as="q8_0")


@pytest.mark.parametrize("n_wanted", [31, 32, 33, 64, 150])
@pytest.mark.parametrize("quant", [Type.BF16, Type.Q4_0, Type.F32])
@pytest.mark.parametrize("options", [{"tied": True}, ODD], ids=["even", "odd"])
def test_many_logits_by_tiles(
    n_wanted: int, quant: Type, options: dict[str, Any], tiny_model: Callable[..., Path], open_cpu: Open
) -> None:
    """Those of the reference, for scattered rows too, and again after a smaller step."""
    path = tiny_model("llama", quant=quant, **options)
    expected = Reference(path).logits(TOKENS)
    bytewise = ObservedReference(path, int8=True)
    rounded = bytewise.logits(TOKENS)
    backend = open_cpu(path, tile_head=True)
    places = np.sort(np.random.default_rng(n_wanted).choice(LENGTH, n_wanted, replace=False))
    batch = Batch.of(TOKENS, 0, wanted="none")
    batch.wanted[places] = True
    for _ in range(2):
        backend.free(0)
        logits = backend.forward(batch)
        assert relative_error(logits, expected[places]) < allowed(quant, rounded[places], expected[places])
        backend.free(0)
        assert relative_error(backend.forward(Batch.of(TOKENS[:9], 0)), expected[8:9]) < 2 * BOUNDS[quant]
    backend.free(0)
    name = "token_embd.weight" if options.get("tied") else "output.weight"
    head, exact = observed(backend, batch)[name], ObservedReference(path).inputs(TOKENS)[name][places]
    assert relative_error(head, exact) < allowed(quant, bytewise.seen[name][places], exact)
