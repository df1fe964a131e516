"""libggml's own quantizers, called through ctypes: what rounding is compared with."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.quantize.formats import FORMATS


@functools.cache
def library() -> ctypes.CDLL:
    """libggml-base of the installed llama-cpp-python; skips the test where there is none."""
    spec = importlib.util.find_spec("llama_cpp")
    found = sorted(Path(spec.origin).parent.glob("lib/*ggml-base*")) if spec and spec.origin else []
    if not found:
        pytest.skip("needs llama-cpp-python, whose libggml is the reference")
    loaded = ctypes.CDLL(str(found[0]))
    loaded.ggml_quantize_chunk.restype = ctypes.c_size_t
    loaded.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
    ]  # fmt: skip
    return loaded


def quantize(
    values: NDArray[np.float32], name: str, importance: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """float32 (rows, n_cols) -> uint8 (rows, row_bytes), by ggml_quantize_chunk."""
    values = np.ascontiguousarray(values, np.float32)
    rows, n_cols = values.shape
    out = np.empty((rows, FORMATS[name].row_bytes(n_cols)), np.uint8)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    written = library().ggml_quantize_chunk(
        FORMATS[name].ggml_id, values.ctypes.data, out.ctypes.data, 0, rows, n_cols,
        None if weights is None else weights.ctypes.data,
    )  # fmt: skip
    assert written == out.nbytes
    return out
