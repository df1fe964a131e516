"""A checkpoint's tensors one by one, each read as GGUF stores it: rows in its order, shifted, divided by lengths."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgert.quantize import widening
from edgert.quantize.checkpoint.safetensors import Entry
from edgert.quantize.formats import FORMATS
from edgert.quantize.source_tensor import SourceTensor


class CheckpointTensor(SourceTensor):
    """A tensor of a safetensors file.

    order:       int64: which row of the stored tensor (or element of a bias) each row is; None: all as they stand
    transposed:  whether it is stored columns first
    shift:       added to every value
    """

    def __init__(
        self,
        name: str,
        entry: Entry,
        *,
        order: NDArray[np.int64] | None = None,
        transposed: bool = False,
        shift: float = 0.0,
    ) -> None:
        shape = entry.shape[::-1] if transposed else entry.shape
        super().__init__(name, shape if order is None else (len(order), *shape[1:]), FORMATS[entry.dtype])
        self.entry = entry
        self._order, self._transposed = order, transposed
        self._shift = np.float32(shift)

    @property
    def described(self) -> str:
        return f"Tensor {self.entry.name!r} of {self.entry.file.path}"

    def _read(self, start: int, stop: int) -> NDArray[np.float32]:
        if self._transposed:
            values = np.ascontiguousarray(self._stored(0, self.entry.shape[0], self.n_rows).T[start:stop])
        elif self._order is None:
            values = self._stored(start, stop, self.n_cols)
        elif len(self.shape) == 1:
            values = self._stored(0, 1, self.entry.shape[0])[:, self._order]
        else:
            values = self._ordered(self._order[start:stop])
        return values + self._shift if self._shift else values

    def _stored(self, start: int, stop: int, n_cols: int) -> NDArray[np.float32]:
        row_bytes = self.format.row_bytes(n_cols)
        data = np.empty((stop - start, row_bytes), np.uint8)
        self.entry.read_into(data, start * row_bytes)
        return widening.dequantize(self.format, data)

    def _ordered(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Reads what lies around the rows, or if these are far apart each run of neighbours."""
        first, last = int(rows.min()), int(rows.max()) + 1
        if last - first <= 2 * len(rows):
            return self._stored(first, last, self.n_cols)[rows - first]
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        return np.concatenate([self._stored(int(run[0]), int(run[-1]) + 1, self.n_cols) for run in runs])


class ConstantTensor(SourceTensor):
    """A small tensor that no file holds."""

    def __init__(self, name: str, values: NDArray[np.float32]) -> None:
        super().__init__(name, values.shape, FORMATS["F32"])
        self._values = values.reshape(-1, values.shape[-1])

    def _read(self, start: int, stop: int) -> NDArray[np.float32]:
        return self._values[start:stop]


class NormedHead(SourceTensor):
    """The head of a model that divides it by the lengths of its rows or columns whenever it is used.

    columns:  of what each column's length is one; else of each row
    Source:   modeling_baichuan.py and modeling_bailing_moe.py of the checkpoints
    """

    def __init__(self, head: CheckpointTensor, columns: bool) -> None:
        super().__init__(head.name, head.shape, head.format)
        self._head, self._columns = head, columns
        self._lengths: NDArray[np.float32] | None = None

    @property
    def described(self) -> str:
        return self._head.described

    def _read(self, start: int, stop: int) -> NDArray[np.float32]:
        values = self._head.rows(start, stop)
        if not self._columns:
            return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)
        if self._lengths is None:
            slabs = (self._head.rows(*slab) for slab in self._head.slabs())
            squares = sum((np.square(slab, dtype=np.float64).sum(0) for slab in slabs), np.zeros(self.n_cols))
            self._lengths = (np.sqrt(squares) + 1e-7).astype(np.float32)
        return values / self._lengths
