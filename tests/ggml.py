"""libggml's own quantizers, called through ctypes: what rounding is compared with, and models that they rounded."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.quantize.formats import FORMATS
from edgert.quantize.gguf_writer import Writer
from edgert.quantize.source import open_source


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


class Traits(ctypes.Structure):
    """The first fields of ggml.h's ggml_type_traits."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def dequantize(data: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
    """uint8 (rows, row_bytes) -> float32 (rows, n_cols), by the type's own to_float."""
    traits_of = library().ggml_get_type_traits
    traits_of.restype, traits_of.argtypes = ctypes.POINTER(Traits), [ctypes.c_int]
    traits = traits_of(FORMATS[name].ggml_id).contents
    data = np.ascontiguousarray(data)
    values = np.empty((len(data), data.shape[1] // traits.type_size * traits.blck_size), np.float32)
    traits.to_float(data.ctypes.data, values.ctypes.data, values.size)
    return values


def rounded(model: Path, out: Path, types: Mapping[str, str]) -> Path:
    """A GGUF file of floats again, with each matrix in the type of the first pattern of its name; without one, F32."""
    with open_source(model) as source:
        plans = []
        for name, tensor in source.tensors.items():
            found = (type_ for pattern, type_ in types.items() if len(tensor.shape) > 1 and fnmatch(name, pattern))
            plans.append((name, tensor.shape, FORMATS[next(found, "F32")]))
        with Writer(out, source.metadata, plans) as writer:
            for name, shape, format in plans:
                values = source.tensors[name].rows()
                if format.name == "F32":
                    writer.write(name, values.view(np.uint8).reshape(len(values), -1))
                else:  # some types ask for importance
                    writer.write(name, quantize(values, format.name, np.ones(shape[-1], np.float32)))
    return out
