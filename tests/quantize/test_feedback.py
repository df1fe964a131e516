"""Error feedback on the stored grid: against GPTQ written out in float64, and against plain rounding."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from unpacked import unpack

from edgert.errors import EdgertError, UnsupportedFormatError
from edgert.quantize import feedback, rounding
from edgert.quantize.feedback import Curvature, output_error
from edgert.quantize.formats import FORMATS
from edgert.quantize.rounding.grids import GRIDS

Floats = NDArray[np.float32]
NAMES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
ALL = (*NAMES, pytest.param("IQ4_XS", marks=pytest.mark.slow))


def problem(n_cols: int, rows: int = 40, seed: int = 0) -> tuple[Floats, Floats, Floats]:
    """Weights, and two Hessians of inputs of the same kind: one to calibrate, one held out."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(n_cols, n_cols)) * np.logspace(0, -1.5, n_cols)[:, None]
    seen, unseen = (rng.normal(size=(4 * n_cols, n_cols)) @ mixing for _ in range(2))
    hessians = [(x.T @ x / len(x)).astype(np.float32) for x in (seen, unseen)]
    return rng.normal(size=(rows, n_cols)).astype(np.float32) * 0.05, hessians[0], hessians[1]


def decoded(name: str, data: NDArray[np.uint8]) -> Floats:
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])


def gptq(values: Floats, data: NDArray[np.uint8], name: str, hessian: Floats, damping: float) -> Floats:
    """GPTQ as its paper has it (Cholesky factor of the inverse), with the scales that `data` stores."""
    grid = GRIDS[name]
    rows, n_cols = values.shape
    _, d, m, ls, lm = unpack(name, data)
    scales = np.repeat(d[:, None] * ls, grid.sub_size, axis=1).reshape(rows, n_cols).astype(np.float64)
    shifts = np.repeat(m[:, None] * lm, grid.sub_size, axis=1).reshape(rows, n_cols).astype(np.float64)
    damped = hessian.astype(np.float64) + damping * hessian.diagonal().mean(dtype=np.float64) * np.eye(n_cols)
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    work, out = values.astype(np.float64), np.empty((rows, n_cols))
    for i in range(n_cols):
        scale = np.where(scales[:, i] == 0, 1, scales[:, i])
        ratio = (work[:, i] + shifts[:, i]) / scale
        if grid.levelled:
            code = grid.levels[np.abs(ratio[:, None] - grid.levels).argmin(axis=1)]
        else:
            code = np.clip(np.rint(ratio), grid.low, grid.high)
        out[:, i] = scales[:, i] * code - shifts[:, i]
        work[:, i:] -= np.outer((work[:, i] - out[:, i]) / upper[i, i], upper[i, i:])
    return out.astype(np.float32)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n_cols", [512])
def test_feedback_is_gptq(name: str, n_cols: int) -> None:
    """With the same scales: float32 beside float64 parts at ties only, after which a row goes another way."""
    values, hessian, _ = problem(n_cols)
    data = feedback.quantize(values, name, Curvature(hessian), sweeps=0)
    ours, theirs = decoded(name, data), gptq(values, data, name, hessian, feedback.DAMPING)
    same = (np.abs(ours - theirs) < 1e-6).all(axis=1)
    assert same.mean() > 0.8 if name != "Q8_0" else np.abs(ours - theirs).max() < 0.01 * np.abs(values).max()
    assert output_error(ours - values, hessian) == pytest.approx(output_error(theirs - values, hessian), rel=0.02)


@pytest.mark.parametrize("name", ALL)
def test_output_error_falls_on_inputs_not_seen(name: str) -> None:
    values, hessian, unseen = problem(512)
    curvature = Curvature(hessian)
    plain = decoded(name, rounding.quantize(values, name, hessian.diagonal()))
    once = decoded(name, feedback.quantize(values, name, curvature, sweeps=0))
    swept = decoded(name, feedback.quantize(values, name, curvature, sweeps=2))
    errors = [output_error(rounded - values, unseen) for rounded in (plain, once, swept)]
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] < 0.95 * errors[1]


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_NL"])
@pytest.mark.parametrize("n_cols", [256, 768])
def test_without_feeding_it_is_rounding_by_importance(name: str, n_cols: int) -> None:
    values, hessian, _ = problem(n_cols)
    curvature = Curvature(hessian)
    alone = decoded(name, feedback.quantize(values, name, curvature, feeds=False)) - values
    other = decoded(name, rounding.quantize(values, name, curvature.importance)) - values
    a, b = (float((curvature.importance * difference**2).sum()) for difference in (alone, other))
    assert a == pytest.approx(b, rel=0.01)


@pytest.mark.parametrize("name", ["Q4_0", "IQ4_NL", "Q5_K", "Q6_K"])
def test_a_sweep_leaves_no_code_that_a_single_change_would_better(name: str) -> None:
    values, hessian, _ = problem(256, rows=8)
    curvature = Curvature(hessian)
    data = feedback.quantize(values, name, curvature, sweeps=100)
    rounded = decoded(name, data)
    grid = GRIDS[name]
    _, d, m, ls, lm = unpack(name, data)
    scales = np.repeat(d[:, None] * ls, grid.sub_size, axis=1).reshape(values.shape)
    shifts = np.repeat(m[:, None] * lm, grid.sub_size, axis=1).reshape(values.shape)
    gradient = (rounded - values).astype(np.float64) @ curvature.hessian.astype(np.float64)
    for level in grid.levels:
        change = scales * level - shifts - rounded
        gain = 2 * gradient * change + curvature.hessian.diagonal() * change**2
        assert gain.min() > -1e-7


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q4_K", "Q6_K"])
def test_threads_slabs_and_odd_rows_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, hessian, _ = problem(256, rows=211)
    curvature = Curvature(hessian)
    once = feedback.quantize(values, name, curvature)
    monkeypatch.setattr(feedback, "SLAB_BYTES", 64 * 4 * 256)
    again = feedback.quantize(values, name, curvature, n_threads=3)
    # A matrix product of other sizes may add in another order, which decides ties only.
    assert (once != again).mean() < 1e-3
    a, b = (output_error(decoded(name, data) - values, hessian) for data in (once, again))
    assert a == pytest.approx(b, rel=1e-3)
    np.testing.assert_array_equal(once[:16], feedback.quantize(values[:16], name, curvature))


def test_columns_without_inputs_keep_near_their_values() -> None:
    values, hessian, _ = problem(256)
    hessian = hessian.copy()
    hessian[:, ::7] = hessian[::7] = 0
    rounded = decoded("Q8_0", feedback.quantize(values, "Q8_0", Curvature(hessian)))
    assert np.abs(rounded - values)[:, ::7].max() < np.abs(values).max() / 60  # two steps of the largest
    zero = decoded("Q5_K", feedback.quantize(values, "Q5_K", Curvature(np.zeros((256, 256), np.float32))))
    assert np.abs(zero - values).max() < np.abs(values).max() / 15


def test_fewer_inputs_than_columns_still_have_a_factor() -> None:
    values, _, _ = problem(256)
    x = np.random.default_rng(3).normal(size=(3, 256)).astype(np.float32)
    data = feedback.quantize(values, "Q4_0", Curvature(x.T @ x, damping=0.0))
    assert np.isfinite(decoded("Q4_0", data)).all()


def test_zero_rows_and_the_largest_values() -> None:
    values, hessian, _ = problem(256)
    values[3] = 0
    values[5] *= 1e5
    for name in NAMES:
        rounded = decoded(name, feedback.quantize(values, name, Curvature(hessian)))
        assert (rounded[3] == 0).all()
        assert np.isfinite(rounded).all()
    with pytest.raises(EdgertError, match="too large for the f16"):
        feedback.quantize(values * np.float32(1e9), "Q4_0", Curvature(hessian))


def test_refusals() -> None:
    values, hessian, _ = problem(256)
    with pytest.raises(UnsupportedFormatError, match="BF16"):
        feedback.quantize(values, "BF16", Curvature(hessian))
    with pytest.raises(ValueError, match="Hessian"):
        feedback.quantize(values[:, :128], "Q4_0", Curvature(hessian))
    with pytest.raises(ValueError, match="blocks of 256"):
        feedback.quantize(values[:, :128], "Q4_K", Curvature(hessian[:128, :128]))
    hessian[2, 3] = np.nan
    with pytest.raises(EdgertError, match="NaN"):
        Curvature(hessian)


def test_the_error_of_outputs_is_that_of_the_outputs() -> None:
    rng = np.random.default_rng(1)
    x, difference = rng.normal(size=(500, 64)).astype(np.float32), rng.normal(size=(7, 64)).astype(np.float32)
    expected = ((x @ difference.T) ** 2).sum(axis=1).mean()
    assert output_error(difference, x.T @ x / 500) == pytest.approx(expected, rel=1e-4)
    assert FORMATS["Q4_K"].row_bytes(256) == 144
