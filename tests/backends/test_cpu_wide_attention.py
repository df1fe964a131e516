"""Attention of whole windows against NumPy in float64, on every instruction set that multiplies pairs of bf16."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from edgert import backends
from edgert.backends.cpu import compiler, isa
from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.layouts import BLOCK, PAGE, WINDOW, attention_scratch_bytes
from edgert.backends.cpu.memory import aligned
from edgert.backends.cpu.tape import float_bits

Kernel = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
# Those with tile instructions write tiles, and are held against the reference with the models.
CHOSEN = [name for name in isa.available() if isa.select(name).bfloat and not isa.select(name).tiles]
pytestmark = pytest.mark.skipif(not CHOSEN, reason="this processor multiplies no pairs of bf16 in vectors")


def pages_of(rows: NDArray[np.float64], kind: str, is_key: bool) -> NDArray[np.uint8]:
    """Keys or values (n, dim) of a head, page by page; they become what is held of them."""
    n_pages, dim = len(rows) // PAGE, rows.shape[1]
    if kind == "f16":
        rows[:] = rows.astype(np.float16)
        return rows.astype(np.float16).reshape(n_pages, -1).view(np.uint8)
    blocks = rows.reshape(n_pages, PAGE, dim // BLOCK, BLOCK)
    scales = (np.abs(blocks).max(-1) / 127).astype(np.float16)
    codes = np.rint(blocks / scales[..., None]).astype(np.int64)
    blocks[:] = codes * scales[..., None].astype(np.float64)
    stored = (codes + 128).astype(np.uint8)
    if is_key:  # page, four dimensions, position
        stored = stored.reshape(n_pages, PAGE, dim // 4, 4).transpose(0, 2, 1, 3)
    else:  # page, four positions, dimension
        stored = stored.reshape(n_pages, PAGE // 4, 4, dim).transpose(0, 1, 3, 2)
    by_block = np.ascontiguousarray(scales.transpose(0, 2, 1)).reshape(n_pages, -1).view(np.uint8)
    return np.concatenate([stored.reshape(n_pages, -1), by_block], 1)


def expected(
    q: NDArray[np.float32], keys: NDArray[np.float64], values: NDArray[np.float64], begin: int, window: int, cap: float
) -> NDArray[np.float64]:
    """Of the queries (rows, dim) at positions from `begin` on."""
    scores = q.astype(np.float64) @ keys.T
    if cap:
        scores = cap * np.tanh(scores / cap)
    places, at = np.arange(len(keys)), begin + np.arange(len(q))[:, None]
    seen = (places <= at) & ((places > at - window) if window else True)
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return np.asarray(weights @ values / weights.sum(-1, keepdims=True))


@pytest.mark.parametrize(
    ("heads", "heads_kv", "dim", "type_v", "begin", "window", "cap"),
    [
        (3, 1, 64, "q8_0", 0, 0, 0.0),
        (6, 2, 64, "q8_0", 576, 0, 0.0),
        (2, 2, 96, "q8_0", 64, 50, 0.0),
        (4, 1, 128, "q8_0", 320, 0, 1.5),
        (2, 1, 64, "f16", 576, 300, 0.0),
    ],
)
@pytest.mark.parametrize("name", CHOSEN)
def test_windows(
    name: str, heads: int, heads_kv: int, dim: int, type_v: str, begin: int, window: int, cap: float
) -> None:
    """Two windows of one sequence, whose pages lie in no order; threads change no bit."""
    chosen: Isa = isa.select(name)
    rng = np.random.default_rng(0)
    n_rows, end = 2 * WINDOW, begin + 2 * WINDOW
    keys, values = (rng.standard_normal((heads_kv, end, dim)) for _ in range(2))
    pages = []
    for k, v in zip(keys, values, strict=True):
        pages += [pages_of(k, "q8_0", True), pages_of(v, type_v, False)]
    table = rng.permutation(end // PAGE).astype(np.int32)
    pool = aligned(np.concatenate(pages, 1).size).reshape(end // PAGE, -1)
    pool[table] = np.concatenate(pages, 1)
    q = (rng.standard_normal((n_rows, heads + 2 * heads_kv, dim)) * 2 / np.sqrt(dim)).astype(np.float32)
    count, positions, slots = np.array([n_rows]), np.arange(begin, end), np.zeros(n_rows, np.int64)
    stride = attention_scratch_bytes(dim, heads // heads_kv) + 63 & ~63
    scratch = aligned(5 * stride)
    capped = {"capped": "yes"} if cap else {}
    kernel_name = compiler.name_of(
        "attention_tiles", n_head=heads, n_head_kv=heads_kv, head_dim=dim, type_k="q8_0", type_v=type_v, **capped
    )
    kernel = Kernel(compiler.addresses([kernel_name], chosen)[kernel_name])
    results = []
    for n_threads in (1, 5):
        out = np.full((n_rows, heads, dim), np.nan, np.float32)
        arguments = np.array(
            [q.ctypes.data, q.strides[0], count.ctypes.data, positions.ctypes.data, slots.ctypes.data,
             table.ctypes.data, len(table), pool.ctypes.data, pool.ctypes.data + pages[0].shape[1], pool.strides[0],
             window, out.ctypes.data, scratch.ctypes.data, stride, float_bits(cap), 0], np.int64,
        )  # fmt: skip
        for thread in range(n_threads):
            kernel(thread, n_threads, arguments.ctypes.data)
        results.append(out)
    assert (results[0] == results[1]).all()
    for head in range(heads):
        of = head // (heads // heads_kv)
        right = expected(q[:, head], keys[of], values[of], begin, window, cap)
        wrong = np.abs(results[0][:, head] - right)
        assert (
            wrong.max() < 0.06 and wrong.mean() < 0.003
        )  # of values around 1: queries are rounded to 2**-8 of the largest


@pytest.mark.parametrize(("quant", "rounded"), [(Type.Q8_0, True), (Type.F32, False)])
def test_models_of_floats_keep_float_attention(
    quant: Type, rounded: bool, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not rounded elsewhere is not rounded by attention either; who shares windows is told."""
    monkeypatch.setenv("EDGERT_ISA", CHOSEN[0])
    backend = backends.load(tiny_model("llama", quant=quant), backend="cpu", n_ctx=256, n_threads=1)
    try:
        assert backend.rounds_windows is rounded
    finally:
        backend.close()
