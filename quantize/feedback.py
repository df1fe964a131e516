"""Rounding with error feedback on the stored grid: each column makes up for the errors before it, as in GPTQ.

Rows are rounded column by column. With H the Hessian of a matrix's inputs and H = R D R^T (R unit upper triangular),
the output error of a row is the sum of D_kk (x_k - q_k)^2, where x_k = w_k + sum over j < k of (w_j - q_j) R_jk: so
each q_k is chosen nearest to x_k. What a block stores besides codes is fitted to the x of its columns when the first
of them is reached, and stays. Then sweeps over all columns move each code to the best one given all others.

Source: Frantar et al., GPTQ (2210.17323); Chee et al., QuIP (2307.13304), for the form without an inverse.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgert.errors import EdgertError
from edgert.quantize.formats import FORMATS, Format
from edgert.quantize.rounding.grids import grid_of

Floats = NDArray[np.float32]

DAMPING = 0.01  # of the mean diagonal: what calibration has seen of a column is never all
TIED_DAMPING = 0.2  # an embedding that is the head too must also stay near its own values
SWEEPS = 2
SLAB_BYTES = 32 << 20  # of float32 that are rounded at a time; each takes five times as much beside
WIDTH = 256  # columns between two matrix products


class Curvature:
    """A damped Hessian, made ready for rounding; tensors with the same input share it.

    hessian:     float32 (n_cols, n_cols), its mean diagonal 1
    importance:  float32 (n_cols,), the Hessian's diagonal; no column is without, so that none is clipped at will
    scale:       the mean diagonal that the Hessian was given with
    """

    def __init__(self, hessian: Floats, damping: float = DAMPING) -> None:
        """From float32 (n_cols, n_cols), the mean of x x^T over inputs x, in any scale.

        damping:  added to the diagonal, as a share of its mean
        Raises:   EdgertError for a Hessian of values that are not finite.
        """
        if not (np.isfinite(hessian.max()) and np.isfinite(hessian.min())):
            raise EdgertError("The inputs' Hessian holds NaN or infinity: the model's weights or texts are damaged.")
        self.scale, self._damping = float(hessian.diagonal().mean(dtype=np.float64)), damping
        self.hessian = hessian / np.float32(self.scale) if self.scale > 0 else np.zeros_like(hessian)
        self.hessian.flat[:: len(hessian) + 1] += np.float32(damping if self.scale > 0 else 1.0)
        self.importance = self.hessian.diagonal().copy()

    @cached_property
    def gains(self) -> Floats:
        """float32 (n_cols, n_cols), the unit upper triangular R; only who feeds errors back has it made.

        Where the Hessian is not positive definite in floats, it is that of a Hessian damped more.
        """
        damped = self.hessian[::-1, ::-1].astype(np.float64)
        more = max(9 * self._damping, 1e-3)
        while True:
            try:
                # The factor of the matrix in reverse order is lower triangular; turned back it is upper.
                factor = np.linalg.cholesky(damped)[::-1, ::-1]
                break
            except np.linalg.LinAlgError:
                damped.flat[:: len(damped) + 1] += more
                more *= 10
        del damped
        gains = np.empty(factor.shape, np.float32)
        np.divide(factor, factor.diagonal(), out=gains, casting="same_kind")
        return gains


def quantize(
    values: Floats,
    format: Format | str,
    curvature: Curvature,
    importance: Floats | None = None,
    *,
    feeds: bool = True,
    sweeps: int = SWEEPS,
    n_threads: int = 1,
) -> NDArray[np.uint8]:
    """Rounds float32 (rows, n_cols) to uint8 (rows, row_bytes) so that the output error is small.

    importance:  float32 (n_cols,), weights of the fit of scales; without it the Hessian's diagonal
    feeds:       False: round by importance alone, with the kernels of feedback, so that no others are needed
    sweeps:      how often all codes are gone over again

    Raises: UnsupportedFormatError for a format that has no grid; ValueError for shapes that do not fit;
    EdgertError where a scale is too large for f16.
    """
    from edgert.quantize import feedback_kernels

    grid = grid_of(format)
    rows, n_cols = values.shape
    out = np.empty((rows, FORMATS[grid.name].row_bytes(n_cols)), np.uint8)
    if curvature.hessian.shape != (n_cols, n_cols):
        raise ValueError(f"a Hessian of {curvature.hessian.shape} for rows of {n_cols}")
    weights = curvature.importance if importance is None else np.ascontiguousarray(importance, np.float32)
    slab = max(64, SLAB_BYTES // (4 * n_cols) // 64 * 64)
    with ThreadPoolExecutor(n_threads) as pool:
        for first in range(0, rows, slab):
            piece = feedback_kernels.Slab(values[first : first + slab], grid, pool, n_threads)
            piece.feed(curvature.gains if feeds else None, weights, WIDTH)
            for _ in range(sweeps if feeds else 0):
                if not piece.sweep(curvature.hessian, WIDTH):
                    break
            piece.pack(out[first : first + slab])
    if not FORMATS[grid.name].is_finite(out):
        raise EdgertError(f"A scale is too large for the f16 numbers of {grid.name}: keep the tensor in F32 or BF16.")
    return out


def output_error(difference: Floats, hessian: Floats) -> float:
    """tr(dW H dW^T): the mean squared error of the outputs, summed over the rows.

    difference:  float32 (rows, n_cols), by how much the rounded values are off
    hessian:     float32 (n_cols, n_cols), the mean of x x^T over inputs x
    """
    total = 0.0
    for row in range(0, len(difference), 4096):
        piece = difference[row : row + 4096]
        total += float(np.einsum("ij,ij->", piece @ hessian, piece, dtype=np.float64))
    return total


def error_of(data: NDArray[np.uint8], format: Format, values: Floats, curvature: Curvature) -> float:
    """The output error of blocks, as output_error() has it, in the scale of the inputs."""
    total = 0.0
    for row in range(0, len(values), 4096):
        difference = format.dequantize(data[row : row + 4096]) - values[row : row + 4096]
        total += output_error(difference, curvature.hessian)
    return curvature.scale * total
