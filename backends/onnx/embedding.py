"""Embeddings that graphs do not look up themselves: rows of the table in the GGUF file."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgert.quantize.architecture import Architecture
from edgert.quantize.gguf_file import GGUFFile


class Embedding:
    """The table, which stays where it is."""

    def __init__(self, file: GGUFFile, a: Architecture) -> None:
        tensor = file.tensor("token_embd.weight")
        self._rows, self._format = tensor.data, tensor.format
        self._scale = np.float32(a.embedding_scale)

    def write(self, tokens: NDArray[np.int64], x: NDArray[np.float32]) -> None:
        """Rows as the first layer reads them, to x (n, n_embd)."""
        np.multiply(self._format.dequantize(self._rows[tokens]), self._scale, out=x)
