"""Rounding against libggml, byte for byte, and against gguf's decoders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
import ggml

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize.formats import FORMATS
from edgert.quantize.rounding import GRIDS, quantize

NAMES = list(GRIDS)


def one_of_each_kind(*quick: str) -> list[Any]:
    """All formats, of which others than these, with kernels of their own to be compiled, are left to the slow tests."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def different(
    name: str, values: NDArray[np.float32], importance: NDArray[np.float32] | None = None
) -> NDArray[np.intp]:
    """Indexes of the blocks that are not ggml's."""
    size = FORMATS[name].type_size
    ours = quantize(values, name, importance, method="plain" if importance is None else "ggml").reshape(-1, size)
    theirs = ggml.quantize(values, name, importance).reshape(-1, size)
    return np.flatnonzero((ours != theirs).any(axis=1))


def hard_rows(n_cols: int, seed: int) -> NDArray[np.float32]:
    """Rows of many kinds: random at several scales, zero, constant, ties, one outlier, positive, negative, tiny."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((6, n_cols)).astype(np.float32)
    rows = [normal[0], normal[1] * 1e-3, normal[2] * 3e2, np.abs(normal[3]), -np.abs(normal[4])]
    rows += [np.zeros(n_cols), np.full(n_cols, 0.37), np.full(n_cols, -1.5), normal[5] * 1e-9, normal[5] * 1e-20]
    rows.append(rng.integers(-8, 9, n_cols) / 16)  # ties, and equal magnitudes of both signs
    rows.append(np.where(np.arange(n_cols) % 37 == 5, 40.0, normal[0] * 0.01))
    rows.append(np.where(np.arange(n_cols) // 32 % 3 == 1, 0.0, normal[1]))  # zero sub-blocks
    rows.append(rng.standard_t(2, n_cols))
    return np.array(rows, np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_plain_is_ggmls_byte_for_byte(name: str):
    for seed, n_cols in ((0, 256), (1, 1792)):
        assert not len(different(name, hard_rows(n_cols, seed)))


@pytest.mark.parametrize("name", one_of_each_kind("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL"))
def test_ggmls_use_of_importance_byte_for_byte(name: str):
    values = hard_rows(1280, 2)
    rng = np.random.default_rng(3)
    importance = (rng.standard_normal(1280) ** 2).astype(np.float32)
    assert not len(different(name, values, importance))
    assert not len(different(name, values, np.ones(1280, np.float32)))
    importance[rng.random(1280) < 0.3] = 0
    importance[:256] = 0
    assert not len(different(name, values, importance))


numbers = st.floats(-60000, 60000, width=32, allow_nan=False)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(data=st.data())
def test_plain_on_any_block(name: str, data: st.DataObject):
    few = data.draw(st.lists(numbers, min_size=1, max_size=12))
    n = FORMATS[name].block_size
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    values = rng.choice(np.array(few, np.float32), n)[None] * np.float32(data.draw(st.sampled_from([1.0, 1e-3, 1e-6])))
    assert not len(different(name, values))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_near(name: str):
    """The decoded numbers agree with gguf's decoder and lie within a step of the values."""
    values = np.random.default_rng(5).standard_normal((7, 512)).astype(np.float32)
    data = quantize(values, name)
    decoded = FORMATS[name].dequantize(data)
    theirs = quants.dequantize(data, GGMLQuantizationType[name])
    np.testing.assert_array_equal(decoded, theirs)
    grid = GRIDS[name]
    step = np.abs(values).max() * np.diff(grid.levels).max() / (grid.levels[-1] - grid.levels[0])
    assert np.abs(decoded - values).max() < 2.5 * step


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats(name: str):
    values = hard_rows(96, 4)
    data = quantize(values, name)
    expected = quants.quantize(values, GGMLQuantizationType[name])
    np.testing.assert_array_equal(data, np.ascontiguousarray(expected).view(np.uint8))


def test_threads_and_odd_counts_change_nothing():
    values = np.random.default_rng(6).standard_normal((1031, 96)).astype(np.float32)
    one = quantize(values, "IQ4_NL")
    np.testing.assert_array_equal(one, quantize(values, "IQ4_NL", n_threads=3))
    np.testing.assert_array_equal(one[5:6], quantize(values[5:6], "IQ4_NL"))
    np.testing.assert_array_equal(one, ggml.quantize(values, "IQ4_NL"))
    assert quantize(values[:0], "IQ4_NL").shape == (0, one.shape[1])


def test_refusals():
    values = np.zeros((4, 320), np.float32)
    with pytest.raises(ValueError, match="Q4_K stores blocks of 256: no row of 320"):
        quantize(values, "Q4_K")
    with pytest.raises(UnsupportedFormatError, match="cannot quantize to IQ2_S; it can to Q4_0"):
        quantize(values, "IQ2_S")
    for bad in (np.nan, np.inf, -np.inf):
        values[2, 7] = bad
        with pytest.raises(ValueError, match="row 2 holds NaN or infinity"):
            quantize(values, "Q4_0")
    values[2, 7] = 3e38
    with pytest.raises(ModelFileError, match="Row 2 holds values too large"):
        quantize(values, "Q4_0")
    values[2, 7] = 0
    with pytest.raises(ValueError, match="importance of shape"):
        quantize(values, "Q4_0", np.ones(4, np.float32))
    with pytest.raises(ValueError, match="importance must be finite"):
        quantize(values, "Q4_0", np.full(320, np.nan, np.float32))
