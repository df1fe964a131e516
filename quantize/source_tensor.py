"""One tensor of a source: float32 rows as the GGUF file will have them, read from disk when they are asked for."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError
from edgert.quantize import rounding
from edgert.quantize.formats import Format

_SLAB_BYTES = 1 << 24


class SourceTensor(ABC):
    """A tensor of the model to be written, read a few rows at a time.

    name:    GGUF's
    shape:   rows before columns; stacked experts are 3-D
    format:  how the source stores it
    is_native:  whether the model was trained in it, so that nothing else holds it better
    """

    is_native = False

    def __init__(self, name: str, shape: tuple[int, ...], format: Format) -> None:
        self.name = name
        self.shape = shape
        self.format = format

    @property
    def n_cols(self) -> int:
        return self.shape[-1]

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def is_quantized(self) -> bool:
        """Whether the source has lost precision already."""
        return self.format.block_size > 1

    def rows(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Rows [start, stop) as float32 (stop - start, n_cols), as the GGUF file has them; only these are read.

        Raises: ModelFileError that names the tensor when a value is NaN or infinite.
        """
        stop = self.n_rows if stop is None else stop
        if not 0 <= start <= stop <= self.n_rows:
            raise ValueError(f"{self.name} has {self.n_rows} rows: no rows {start} to {stop}")
        if start == stop:
            return np.empty((0, self.n_cols), np.float32)
        values = self._read(start, stop)
        if not (math.isfinite(values.max()) and math.isfinite(values.min())):
            row, column = np.argwhere(~np.isfinite(values))[0]
            raise ModelFileError(
                f"{self.described}: row {start + row}, column {column} is {values[row, column]}; "
                "the checkpoint is damaged or its training diverged."
            )
        return values

    def stored(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows [start, stop) in the source's own format, uint8 (stop - start, row_bytes): nothing is lost.

        Raises: ModelFileError that names the tensor when a value is NaN or infinite.
        """
        return rounding.quantize(self.rows(start, stop), self.format)  # checkpoints hold floats

    def dequantize(self) -> NDArray[np.float32]:
        """All values, float32 in the tensor's shape."""
        return self.rows().reshape(self.shape)

    def sample(self, n_rows: int) -> NDArray[np.float32]:
        """Rows from all over the tensor, in runs of sixteen: float32 (n_rows, n_cols); all where there are fewer."""
        if self.n_rows <= n_rows:
            return self.rows()
        starts = np.linspace(0, self.n_rows - 16, max(1, n_rows // 16)).astype(int)
        return np.concatenate([self.rows(start, start + 16) for start in starts.tolist()])

    def slabs(self, n_bytes: int = _SLAB_BYTES) -> Iterable[tuple[int, int]]:
        """Ranges of rows of about n_bytes in float32 each, whole multiples of 64, which together are the tensor."""
        step = max(64, n_bytes // (4 * self.n_cols) // 64 * 64)
        return ((start, min(start + step, self.n_rows)) for start in range(0, self.n_rows, step))

    @property
    def described(self) -> str:
        """What a message calls it."""
        return f"Tensor {self.name!r}"

    def matrix(self, number: int) -> SourceTensor:
        """One of the matrices of a stack as a tensor of its own."""
        return _Matrix(self, number)

    @abstractmethod
    def _read(self, start: int, stop: int) -> NDArray[np.float32]: ...


class _Matrix(SourceTensor):
    def __init__(self, stack: SourceTensor, number: int) -> None:
        super().__init__(stack.name, stack.shape[-2:], stack.format)
        self.is_native = stack.is_native
        self._stack, self._first = stack, number * stack.shape[-2]

    def rows(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        stop = self.n_rows if stop is None else stop
        return self._stack.rows(self._first + start, self._first + stop)

    def stored(self, start: int, stop: int) -> NDArray[np.uint8]:
        return self._stack.stored(self._first + start, self._first + stop)

    def _read(self, start: int, stop: int) -> NDArray[np.float32]:
        return self.rows(start, stop)
