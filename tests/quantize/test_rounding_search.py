"""The search under importance weights against ggml's, and what the blocks then hold."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
import ggml
from test_rounding import hard_rows, one_of_each_kind
from unpacked import unpack

from edgert.quantize.formats import FORMATS
from edgert.quantize.rounding import GRIDS, quantize

NAMES = list(GRIDS)
SEARCHED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL")
Floats = NDArray[np.float64]


def errors(name: str, values: NDArray[np.float32], importance: NDArray[np.float32], data: NDArray[np.uint8]) -> Floats:
    """The weighted error of each block."""
    difference = FORMATS[name].dequantize(data).astype(np.float64) - values
    return (importance * difference**2).reshape(-1, FORMATS[name].block_size).sum(axis=1)


def real_rows(n_cols: int) -> NDArray[np.float32]:
    """Rows as a model has them: normal with heavier tails, columns of several scales."""
    rng = np.random.default_rng(7)
    return (rng.standard_t(6, (48, n_cols)) * np.exp(0.3 * rng.standard_normal(n_cols)) * 0.02).astype(np.float32)


@pytest.mark.parametrize("name", one_of_each_kind(*SEARCHED))
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


@pytest.mark.parametrize("name", one_of_each_kind(*SEARCHED))
def test_search_is_better_than_ggml(name: str):
    values = real_rows(1024)
    importance = np.exp(np.random.default_rng(10).standard_normal(1024)).astype(np.float32)
    ours = errors(name, values, importance, quantize(values, name, importance)).sum()
    theirs = errors(name, values, importance, ggml.quantize(values, name, importance)).sum()
    assert ours < LEFT[name] * theirs


@pytest.mark.parametrize("name", NAMES)
def test_a_block_holds_what_its_grid_says(name: str):
    grid = GRIDS[name]
    data = quantize(hard_rows(256, 11), name).reshape(-1, grid.format.type_size)
    codes, d, m, ls, lm = unpack(name, data)
    levels = grid.levels[codes.astype(int) - grid.low].reshape(len(data), grid.n_sub, -1)
    scales, shifts = d[:, None] * ls.astype(np.float32), m[:, None] * lm.astype(np.float32)
    decoded = scales[:, :, None] * levels - shifts[:, :, None]
    np.testing.assert_array_equal(decoded.reshape(len(data), -1), grid.format.dequantize(data))
