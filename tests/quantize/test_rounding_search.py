"""The search under importance weights against ggml's, and the functions for blocks in rows."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
import ggml
from test_rounding import hard_rows

from edgert.quantize.formats import FORMATS
from edgert.quantize.rounding import GRIDS, quantize
from edgert.quantize.rounding.batches import fitter, packer, storer, unpack

NAMES = list(GRIDS)
Floats = NDArray[np.float64]


def errors(name: str, values: NDArray[np.float32], importance: NDArray[np.float32], data: NDArray[np.uint8]) -> Floats:
    """The weighted error of each block."""
    difference = FORMATS[name].dequantize(data).astype(np.float64) - values
    return (importance * difference**2).reshape(-1, FORMATS[name].block_size).sum(axis=1)


def real_rows(n_cols: int) -> NDArray[np.float32]:
    """Rows as a model has them: normal with heavier tails, columns of several scales."""
    rng = np.random.default_rng(7)
    return (rng.standard_t(6, (48, n_cols)) * np.exp(0.3 * rng.standard_normal(n_cols)) * 0.02).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_search_is_never_worse_than_ggml_in_any_block(name: str):
    rng = np.random.default_rng(8)
    importance = np.exp(rng.standard_normal(1280)).astype(np.float32)
    dead = np.where(rng.random(1280) < 0.3, 0, importance).astype(np.float32)
    for values in (hard_rows(1280, 9), real_rows(1280)):
        for weights in (importance, dead):
            ours = errors(name, values, weights, quantize(values, name, weights))
            theirs = errors(name, values, weights, ggml.quantize(values, name, weights))
            assert (ours <= theirs * (1 + 1e-4) + 1e-30).all()


# the share of ggml's error that is left, measured with a margin of one hundredth
LEFT = {
    "Q4_0": 0.97, "Q4_1": 0.96, "Q5_0": 0.97, "Q5_1": 0.96, "Q8_0": 0.80, "Q2_K": 0.92, "Q3_K": 0.98, "Q4_K": 0.95,
    "Q5_K": 0.92, "Q6_K": 0.91, "IQ4_NL": 0.94, "IQ4_XS": 0.93,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_search_is_better_than_ggml(name: str):
    values = real_rows(1024)
    importance = np.exp(np.random.default_rng(10).standard_normal(1024)).astype(np.float32)
    ours = errors(name, values, importance, quantize(values, name, importance)).sum()
    theirs = errors(name, values, importance, ggml.quantize(values, name, importance)).sum()
    assert ours < LEFT[name] * theirs


@pytest.mark.parametrize("name", NAMES)
def test_unpack_and_pack(name: str):
    grid = GRIDS[name]
    data = quantize(hard_rows(256, 11), name).reshape(-1, grid.format.type_size)
    codes, d, m, ls, lm = unpack(name, data)
    levels = grid.levels[codes.astype(int) - grid.low].reshape(len(data), grid.n_sub, -1)
    scales, shifts = d[:, None] * ls.astype(np.float32), m[:, None] * lm.astype(np.float32)
    decoded = scales[:, :, None] * levels - shifts[:, :, None]
    np.testing.assert_array_equal(decoded.reshape(len(data), -1), grid.format.dequantize(data))
    out = np.empty_like(data)
    packer(name)(codes, d, m, ls, lm, out)
    np.testing.assert_array_equal(out, data)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "Q6_K", "IQ4_XS"])
def test_fit_in_rows(name: str):
    """A fit under equal weights, packed, has the error of a tensor quantized under equal importance."""
    grid = GRIDS[name]
    values = real_rows(256).reshape(-1, grid.block_size)[:21]
    n = len(values)
    codes, d, m = np.empty(values.shape, np.int8), np.empty(n, np.float32), np.empty(n, np.float32)
    ls, lm = np.empty((n, grid.n_sub), np.int32), np.empty((n, grid.n_sub), np.int32)
    fitter(name, "search")(values, np.ones_like(values), codes, d, m, ls, lm)
    assert codes.min() >= grid.low and codes.max() <= grid.high
    out = np.empty((n, grid.format.type_size), np.uint8)
    packer(name)(codes, d, m, ls, lm, out)
    ones = np.ones(grid.block_size, np.float32)
    quantized = quantize(values, name, ones)
    assert errors(name, values, ones, out).sum() <= 1.01 * errors(name, values, ones, quantized).sum()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS"])
def test_real_scales_are_stored_near(name: str):
    """Scales and minimums that a block held, times three, come back within half a step of their integers."""
    grid = GRIDS[name]
    codes, d, m, ls, lm = unpack(name, quantize(real_rows(256)[:19], name).reshape(-1, grid.format.type_size))
    scales = (d[:, None] * ls * 3).astype(np.float32)
    minimums = (m[:, None] * lm * 3).astype(np.float32)
    weights = np.ones_like(scales)
    curvatures = (codes.astype(np.float32) ** 2).reshape(len(codes), grid.n_sub, -1).sum(axis=2)
    new = [np.empty_like(d), np.empty_like(m), np.empty_like(ls), np.empty_like(lm)]
    storer(name)(scales, minimums, curvatures, weights, *new)
    for real, unit, integers, limits in (
        (scales, new[0], new[2], grid.scales),
        (minimums, new[1], new[3], grid.minimums),
    ):
        if limits is None:
            continue
        assert integers.min() >= limits[0] and integers.max() <= limits[1]
        step = np.abs(unit)[:, None] * (1 if limits != (1, 1) else 0.001)  # with one scale just f16's rounding
        off = np.abs(unit[:, None] * integers - real)
        # the largest may be left beyond the last integer, where that is better for the others
        assert (off[(integers > limits[0]) & (integers < limits[1])] <= 0.501 * step.max() + 1e-9).all()
        assert (off <= 0.06 * np.abs(real).max(axis=1, keepdims=True) + step).all() and off.mean() <= 0.4 * step.mean()
