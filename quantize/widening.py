"""float16 -> float32 in a compiled kernel: NumPy takes longer for it than rounding does for what comes of it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.quantize.formats import Format
from edgert.quantize.jit import objects

LITTLE = 1 << 16  # elements for which no kernel is loaded


def dequantize(format: Format, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """As Format.dequantize: uint8 (rows, row_bytes) -> float32 (rows, n_cols)."""
    if format.name != "F16" or data.size < 2 * LITTLE:
        return format.dequantize(data)
    halves = np.ascontiguousarray(data).reshape(-1).view("<u2")
    values = np.empty(len(halves), np.float32)
    whole = len(halves) // 16 * 16
    _kernel()(halves, values, whole)
    values[whole:] = halves[whole:].view("<f2")
    return values.reshape(len(data), -1)


@functools.cache
def _kernel() -> Any:
    return objects.load("edgert.quantize.widening_kernel", "widen.F16")
