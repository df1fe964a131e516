"""Floats -> blocks: rounding to every format that edgert writes, with and without importance weights.

`quantize` takes whole tensors. `grid_of` says what a block of a format can hold, for whoever chooses codes otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError
from edgert.quantize.formats import FLOATS, FORMATS, Format
from edgert.quantize.jit import objects
from edgert.quantize.rounding.grids import GRIDS, Grid, grid_of

__all__ = ["GRIDS", "Grid", "grid_of", "quantize"]

_KERNELS = {"plain": "plain", "ggml": "weighted", "search": "search"}
_ELEMENTS = 1 << 18  # what a thread takes at a time


def quantize(
    values: NDArray[np.float32],
    format: Format | str,
    importance: NDArray[np.float32] | None = None,
    *,
    method: str | None = None,
    n_threads: int = 1,
) -> NDArray[np.uint8]:
    """Rounds float32 (rows, n_cols) to uint8 (rows, row_bytes).

    importance: float32 (n_cols,), the mean squared inputs of the columns; without it the bytes are ggml's
    method:     "plain": importance is not used; "ggml": used as ggml uses it, byte for byte; "search" (what importance
                is for): the sum of importance times squared error of a block is at most ggml's, and mostly below
    Raises:     UnsupportedFormatError for a format that cannot be written; ValueError for shapes that do not fit, or
                values that are not finite; ModelFileError where a scale is too large for f16
    """
    target = FORMATS.get(str(format))
    if target is None or (target.name not in GRIDS and target.name not in FLOATS):
        grid_of(format)
        raise AssertionError
    if method is not None and method not in _KERNELS:
        raise ValueError(f"method {method!r}; it is one of {', '.join(_KERNELS)}")
    values = np.ascontiguousarray(values, np.float32)
    if values.ndim != 2:
        raise ValueError(f"a tensor of {values.ndim} dimensions; quantize takes rows and columns")
    rows, n_cols = values.shape
    out = np.empty((rows, target.row_bytes(n_cols)), np.uint8)
    if importance is not None:
        importance = np.ascontiguousarray(importance, np.float32)
        if importance.shape != (n_cols,):
            raise ValueError(f"importance of shape {importance.shape} for rows of {n_cols}")
        if not (np.isfinite(importance).all() and (importance >= 0).all()):
            raise ValueError("importance must be finite and not negative")
    if not values.size:
        return out
    if target.name in FLOATS:
        out[:] = _floats(values, target.name)
        suspects = [] if target.is_finite(out) else list(range(rows))
    else:
        suspects = _blocks(values, target, importance, method or ("plain" if importance is None else "search"), out,
                           n_threads)  # fmt: skip
    for row in suspects:
        if not np.isfinite(values[row]).all():
            raise ValueError(f"row {row} holds NaN or infinity")
        if not target.is_finite(out[row : row + 1]):
            raise ModelFileError(
                f"Row {row} holds values too large for the f16 numbers of {target}: keep it in F32 or BF16."
            )
    return out


def _floats(values: NDArray[np.float32], name: str) -> NDArray[np.uint8]:
    if name == "F32":
        return values.view(np.uint8)
    if name == "F16":
        with np.errstate(over="ignore"):
            return values.astype("<f2").view(np.uint8)
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2").view(np.uint8)


def _blocks(
    values: NDArray[np.float32],
    target: Format,
    importance: NDArray[np.float32] | None,
    method: str,
    out: NDArray[np.uint8],
    n_threads: int,
) -> list[int]:
    """Fills uint8 (rows, row_bytes); returns the rows that may not be finite."""
    rows, n_cols = values.shape
    size, row_blocks = target.block_size, n_cols // target.block_size
    n_units, rest = divmod(rows * row_blocks, 16)
    sigma2 = np.zeros(rows + 16, np.float32)  # the last unit may end after the last row
    if importance is None:
        importance, method = np.zeros(1, np.float32), "plain"
    kernel: Callable[..., int]
    if method == "plain":
        kernel = objects.load("edgert.quantize.rounding.kernels", f"plain.{target.name}")
    else:
        from edgert.quantize.rounding import kernels

        kernel = kernels.quantizer(target.name, _KERNELS[method])
        if GRIDS[target.name].spread == ("row", 1):
            kernels.mean_squares(values, sigma2)
    numbers, blocks = values.reshape(-1), out.reshape(-1)
    step = max(1, _ELEMENTS // (16 * size))

    def run(first: int) -> int:
        """Does the units from `first` on; returns the first block of a unit that is not finite, or -1."""
        n = min(step, n_units - first)
        piece, space = numbers[16 * first * size :], blocks[16 * first * target.type_size :]
        bad = kernel(piece, importance, sigma2, space, 16 * first, row_blocks, n)
        return -1 if bad == n else 16 * (first + bad)

    bad = [run(0)] if n_units else []  # the first call compiles
    if n_threads == 1:
        bad += [run(first) for first in range(step, n_units, step)]
    else:
        with ThreadPoolExecutor(n_threads) as pool:
            bad += pool.map(run, range(step, n_units, step))
    if rest:
        first = 16 * n_units
        piece, space = np.zeros(16 * size, np.float32), np.empty(16 * target.type_size, np.uint8)
        piece[: rest * size] = numbers[first * size :]
        if not kernel(piece, importance, sigma2, space, first, row_blocks, 1):
            bad.append(first)
        blocks[first * target.type_size :] = space[: rest * target.type_size]
    return sorted(
        {min(block + k, rows * row_blocks - 1) // row_blocks for block in bad if block >= 0 for k in range(16)}
    )
