"""The cache of compiled kernels, and arithmetic on sixteen lanes against NumPy's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert.quantize.blocks import IQ4_LEVELS
from edgert.quantize.jit.compiled import jit
from edgert.quantize.jit.lanes import load, scatter, store, to_float, turn
from edgert.quantize.rounding.numbers import half_bits, level, nearest, rounded


def kernel(added: int) -> Any:
    @jit(f"added_{added}")
    def function(x):
        return x + added

    return function


def hits(function: Any) -> int:
    return sum(function.stats.cache_hits.values())


def test_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path))
    first, again, other = kernel(1), kernel(1), kernel(2)
    assert (first(5), hits(first)) == (6, 0)
    assert (again(5), hits(again)) == (6, 1)
    assert (other(5), hits(other)) == (7, 0)
    for file in tmp_path.rglob("*.nbc"):
        file.write_bytes(file.read_bytes()[:100])  # damaged: compiled again
    repaired = kernel(1)
    assert (repaired(5), hits(repaired)) == (6, 0)


def test_a_cache_that_cannot_be_used_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path / "file"))
    assert kernel(3)(5) == 8


@jit()
def _numbers(x, halves, bits, whole, index, levels):
    for i in range(0, len(x), 16):
        v = load(x, i)
        store(halves, i, rounded(v))
        store(bits, i, half_bits(v))
        store(whole, i, nearest(v))
        found, value = level(v)
        store(index, i, found)
        store(levels, i, to_float(value))


def test_numbers_are_rounded_as_numpy_rounds():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(1 << 14) * 10.0 ** rng.uniform(-9, 4.7, 1 << 14)).astype(np.float32)
    x[:64] = np.arange(64) - 31.5  # ties
    x[64:68] = 65519.9, 65520, -7e4, -0.0
    halves, bits, whole, index, levels = (np.empty(len(x), kind) for kind in "fiiif")
    _numbers(x, halves, bits, whole, index, levels)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(halves, x.astype(np.float16).astype(np.float32))
        np.testing.assert_array_equal(bits.astype(np.uint16), x.astype(np.float16).view(np.uint16))
    np.testing.assert_array_equal(whole, np.rint(x).astype(np.int32))
    distance = np.abs(x[:, None].astype(np.float64) - IQ4_LEVELS)
    np.testing.assert_array_equal(levels, IQ4_LEVELS[index])
    assert (distance[np.arange(len(x)), index] <= distance.min(axis=1) * (1 + 1e-6)).all()


@jit()
def _moves(x, turned, spread):
    turn(x, 3, 20, turned, 0)
    for i in range(16):
        value = nearest(load(turned, 16 * i))
        scatter(spread, 5 + 4 * i, 64, value, 4)


def test_transposing_and_scattering():
    x = np.arange(400, dtype=np.float32)
    turned, spread = np.empty(256, np.float32), np.zeros(16 * 64 + 5, np.uint8)
    _moves(x, turned, spread)
    expected = x[3:323].reshape(16, 20)[:, :16]
    np.testing.assert_array_equal(turned.reshape(16, 16), expected.T)
    np.testing.assert_array_equal(spread[5:].view(np.int32).reshape(16, 16), expected)
