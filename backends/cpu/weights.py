"""Reads a file's tensors and packs them for the kernels, without ever holding the file and the copy together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu import compiler
from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.layouts import BLOCK, CODEC_OF, CODECS, n_panels
from edgert.backends.cpu.memory import Arena
from edgert.backends.cpu.team import Team
from edgert.errors import UnsupportedFormatError
from edgert.quantize.formats import check_finite
from edgert.quantize.gguf_file import GGUFFile, Tensor

BUFFER_BYTES = 4 << 20  # of raw rows read at a time
CHUNK_BYTES = 32 << 20  # of packed weights allocated at a time


@dataclass(frozen=True)
class Matrix:
    """Packed weights, uint8; `n_panels` is even, the rows past `n_rows` are zeros."""

    codec: str
    n_rows: int
    n_cols: int
    n_panels: int
    data: NDArray[np.uint8]


class Packer:
    """Packs the tensors of one file through one small buffer."""

    def __init__(self, file: GGUFFile, isa: Isa, team: Team) -> None:
        self._file = file
        self._isa = isa
        self._team = team
        self._buffer = np.empty(0, np.uint8)
        self._arena = Arena(CHUNK_BYTES)

    @staticmethod
    def kernels(file: GGUFFile, names: Sequence[str]) -> set[str]:
        """The kernels that packing these tensors needs.

        Raises: UnsupportedFormatError for a tensor type without a layout, or rows that are not blocks of 32.
        """
        found = set()
        for name in names:
            tensor = file.tensor(name)
            if tensor.format.name not in CODEC_OF:
                raise UnsupportedFormatError(
                    f"{file.path}: tensor {name} has type {tensor.format.name}; the cpu backend runs "
                    f"{', '.join(CODEC_OF)}."
                )
            if tensor.n_cols % BLOCK:
                raise UnsupportedFormatError(
                    f"{file.path}: tensor {name} has rows of {tensor.n_cols}; "
                    f"the cpu backend runs multiples of {BLOCK}."
                )
            found.add(compiler.name_of("repack", format=tensor.format.name))
        return found

    def pack(self, names: Sequence[str]) -> list[Matrix]:
        """Packs tensors with equal columns one below the other; neighbours of the same codec become one matrix."""
        groups: list[list[str]] = []
        for name in names:
            rows_before = self._file.tensor(groups[-1][-1]).n_rows if groups else 1
            if groups and self._codec(groups[-1][-1]) == self._codec(name) and rows_before % self._isa.lanes == 0:
                groups[-1].append(name)
            else:
                groups.append([name])
        return [self._join(group, interleave=False) for group in groups]

    def pack_pair(self, gate: str, up: str) -> Matrix | None:
        """Packs two tensors with their panels in turn; None if their codecs differ."""
        if self._codec(gate) != self._codec(up) or self._file.tensor(gate).n_rows % (2 * self._isa.lanes):
            return None
        return self._join([gate, up], interleave=True)

    def vector(self, name: str) -> NDArray[np.float32]:
        """A small tensor as float32."""
        tensor = self._file.tensor(name)
        check_finite(tensor)
        return np.ascontiguousarray(tensor.dequantize().reshape(-1), np.float32)

    def _codec(self, name: str) -> str:
        return CODEC_OF[self._file.tensor(name).format.name]

    def _join(self, names: list[str], interleave: bool) -> Matrix:
        lanes = self._isa.lanes
        codec = CODECS[self._codec(names[0])]
        tensors = [self._file.tensor(name) for name in names]
        n_cols = tensors[0].n_cols
        n_rows = sum(tensor.n_rows for tensor in tensors)
        panels = n_panels(n_rows, 2 * lanes) * 2
        data = self._arena.take(panels * codec.panel_bytes(n_cols, lanes))
        first = 0
        for i, tensor in enumerate(tensors):
            if interleave:
                self._pack_tensor(tensor, data, i, len(tensors))
            else:
                self._pack_tensor(tensor, data, first, 1)
            first += n_panels(tensor.n_rows, lanes)
        return Matrix(codec.name, n_rows, n_cols, panels, data)

    def _pack_tensor(self, tensor: Tensor, data: NDArray[np.uint8], first: int, step: int) -> None:
        """Packs one tensor into the panels first, first + step, ... of `data`, a few rows at a time."""
        lanes = self._isa.lanes
        name = compiler.name_of("repack", format=tensor.format.name)
        address = compiler.addresses([name], self._isa)[name]
        rows_at_once = max(1, BUFFER_BYTES // (tensor.row_bytes * lanes)) * lanes
        for row in range(0, tensor.n_rows, rows_at_once):
            n_rows = min(rows_at_once, tensor.n_rows - row)
            n_bytes = n_rows * tensor.row_bytes
            if len(self._buffer) < n_bytes:
                self._buffer = np.empty(n_bytes, np.uint8)
            raw = self._buffer[:n_bytes]
            tensor.read_into(raw, row * tensor.row_bytes)
            check_finite(tensor, raw)
            panel = first + row // lanes * step
            where = [raw.ctypes.data, tensor.row_bytes, n_rows, tensor.n_cols, data.ctypes.data, panel, step]
            arguments = np.array(where, np.int64)
            self._team.run(np.array([[address, arguments.ctypes.data, 1]], np.int64))
