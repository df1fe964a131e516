"""Finds the Q4_0 grid that a checkpoint's float weights already lie on, and stores them without any loss.

Checkpoints trained for Q4_0 (quantization-aware training) and floats taken back from a Q4_0 file hold, in every
block of 32, multiples of one scale from -8 to 7. A search for better scales would only leave that grid.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
STRAY = 0.06  # of a step: what rounding both the scale and the products to bfloat16 may add up to
TELLING = 4  # different magnitudes that a block must hold to prove anything
SHARE = 0.99  # of the telling blocks that must lie on the grid
FEW_ROWS = 16  # where far less of them does: other weights are told from these rows, which takes no time


def scales(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The Q4_0 scale of each block whose weights are multiples -8..7 of it, NaN for the other blocks.

    values:  float32 (rows, n_cols), n_cols a multiple of 32 -> float32 (rows, n_cols / 32)
    """
    blocks = values.reshape(-1, BLOCK)
    largest = blocks[np.arange(len(blocks)), np.abs(blocks).argmax(axis=1)]
    found = np.where(largest == 0, np.float32(0), np.float32(np.nan))
    left = np.flatnonzero(largest != 0)
    for level in range(1, 9):  # the coarsest grid that fits is the one that was meant
        steps = largest[left] / np.float32(-8 if level == 8 else level)
        q = blocks[left] / steps[:, None]
        nearest = np.rint(q)
        fits = (np.abs(q - nearest) < STRAY).all(axis=1) & (nearest >= -8).all(axis=1) & (nearest <= 7).all(axis=1)
        q = nearest[fits]  # the scale that all weights of the block agree on, not the largest alone
        found[left[fits]] = np.vecdot(blocks[left[fits]], q) / np.vecdot(q, q)
        left = left[~fits]
    return found.reshape(len(values), -1)


def lies_on_q4_0(slabs: Iterable[NDArray[np.float32]]) -> bool:
    """Whether a tensor, given as slabs of rows, float32 (rows, n_cols), is on a Q4_0 grid."""
    n_telling = n_fitting = 0
    for values in slabs:
        if values.shape[1] % BLOCK:
            return False
        if not n_telling and not may_lie_on_q4_0(values[:FEW_ROWS]):
            return False
        telling, fitting = _counts(values)
        n_telling += telling
        n_fitting += fitting
        if n_fitting < SHARE * n_telling:
            return False
    return n_telling > 0


def may_lie_on_q4_0(few: NDArray[np.float32]) -> bool:
    """Whether it is worth reading more than these rows of a tensor, FEW_ROWS of them."""
    if few.shape[1] % BLOCK:
        return False
    telling, fitting = _counts(few)
    return fitting >= telling / 2


def _counts(values: NDArray[np.float32]) -> tuple[int, int]:
    """How many blocks prove something, and how many of these lie on a grid."""
    telling = _is_telling(values)
    return int(telling.sum()), int(np.isfinite(scales(values)).reshape(-1)[telling].sum())


def _is_telling(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """bool (blocks,): which blocks hold enough different magnitudes to prove anything."""
    magnitudes = np.sort(np.abs(values.reshape(-1, BLOCK)), axis=1)
    distinct = 1 + (np.diff(magnitudes, axis=1) > magnitudes[:, -1:] / 64).sum(axis=1)
    return distinct >= TELLING


def encode(values: NDArray[np.float32], otherwise: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Q4_0 blocks on the grid that was found.

    values:     float32 (rows, n_cols)
    otherwise:  uint8 (rows, n_cols / 32 * 18), Q4_0 as a quantizer made it: kept for blocks that are on no grid
    """
    d = scales(values).reshape(-1)
    on_grid = np.isfinite(d)
    out = otherwise.reshape(-1, 18).copy()
    stored = d[on_grid].astype(np.float16)
    inverse = np.divide(1, stored, where=stored != 0, out=np.zeros(len(stored), np.float32))
    q = np.clip(np.rint(values.reshape(-1, BLOCK)[on_grid] * inverse[:, None]), -8, 7).astype(np.int8) + np.int8(8)
    out[on_grid, :2] = stored.view(np.uint8).reshape(-1, 2)
    out[on_grid, 2:] = (q[:, :16] | q[:, 16:] << 4).view(np.uint8)
    return out.reshape(otherwise.shape)
