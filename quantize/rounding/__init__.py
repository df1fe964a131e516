"""Floats -> blocks: rounding to every format that edgert writes, with and without importance weights.

`quantize` takes whole tensors. `grid_of` says what a block of a format can hold, for whoever chooses codes otherwise.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError
from edgert.quantize.formats import FORMATS, Format
from edgert.quantize.rounding.grids import GRIDS, Grid, grid_of

__all__ = ["GRIDS", "Grid", "grid_of", "quantize"]

_FLOATS = ("F32", "F16", "BF16")
_KERNELS = {"plain": "plain", "ggml": "weighted", "search": "search"}
_UNITS = 64  # of sixteen blocks; what a thread takes at a time


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
    if target is None or (target.name not in GRIDS and target.name not in _FLOATS):
        grid_of(format)
        raise AssertionError
    if method is not None and method not in _KERNELS:
        raise ValueError(f"method {method!r}; it is one of {', '.join(_KERNELS)}")
    values = np.ascontiguousarray(values, np.float32)
    if values.ndim != 2:
        raise ValueError(f"a tensor of {values.ndim} dimensions; quantize takes rows and columns")
    rows, n_cols = values.shape
    out = np.empty((rows, target.row_bytes(n_cols)), np.uint8)
    _check_finite(values)
    if importance is not None:
        importance = np.ascontiguousarray(importance, np.float32)
        if importance.shape != (n_cols,):
            raise ValueError(f"importance of shape {importance.shape} for rows of {n_cols}")
        if not (np.isfinite(importance).all() and (importance >= 0).all()):
            raise ValueError("importance must be finite and not negative")
    if not values.size:
        return out
    if target.name in _FLOATS:
        out[:] = _floats(values, target.name)
    else:
        _blocks(values, target, importance, method or ("plain" if importance is None else "search"), out, n_threads)
    _check_written(target, out)
    return out


def _check_finite(values: NDArray[np.float32]) -> None:
    for row in range(0, len(values), 256):
        piece = values[row : row + 256]
        if not np.isfinite(piece.sum(dtype=np.float64)):  # NaN and infinity both survive a sum
            bad = row + int(np.flatnonzero(~np.isfinite(piece).all(axis=1))[0])
            raise ValueError(f"row {bad} holds NaN or infinity")


def _check_written(target: Format, out: NDArray[np.uint8]) -> None:
    if not target.is_finite(out):
        bad = next(row for row in range(len(out)) if not target.is_finite(out[row : row + 1]))
        raise ModelFileError(
            f"Row {bad} holds values too large for the f16 numbers of {target}: keep it in F32 or BF16."
        )


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
) -> None:
    from edgert.quantize.rounding import kernels

    rows, n_cols = values.shape
    row_blocks = n_cols // target.block_size
    n_blocks = rows * row_blocks
    sigma2 = np.zeros(rows, np.float32)
    if importance is None:
        importance = np.zeros(1, np.float32)
        method = "plain"
    elif GRIDS[target.name].spread == ("row", 1):
        kernels.mean_squares(values, sigma2)
    kernel = kernels.quantizer(target.name, _KERNELS[method])
    n_units = -(-n_blocks // 16)

    def run(first: int) -> None:
        last = min(first + _UNITS, n_units)
        kernel(values.reshape(-1), importance, sigma2, out.reshape(-1), n_blocks, row_blocks, first, last)

    if n_threads == 1:
        for first in range(0, n_units, _UNITS):
            run(first)
        return
    run(0)  # compiles, once
    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(run, range(_UNITS, n_units, _UNITS)))
