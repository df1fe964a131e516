"""Experts of a checkpoint as GGUF stacks them: one tensor of all, whether they are apart, fused or transposed there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError
from edgert.quantize.checkpoint.safetensors import Entry
from edgert.quantize.formats import FORMATS
from edgert.quantize.source_tensor import SourceTensor


class Stack(SourceTensor):
    """Matrices of single experts, one after the other.

    entries:  by the number of the expert, of one shape and type
    Raises:   ModelFileError for experts that are missing or differ
    """

    def __init__(self, name: str, entries: Mapping[int, Entry], folder: Path) -> None:
        first = next(iter(entries.values()))
        for number in range(max(entries) + 1):
            if number not in entries:
                raise ModelFileError(f"{folder} lacks expert {number} of {name!r}: a shard may be missing.")
            entry = entries[number]
            if (entry.shape, entry.dtype) != (first.shape, first.dtype):
                raise ModelFileError(
                    f"{folder}: the experts {first.name!r} and {entry.name!r} differ in shape or type."
                )
        super().__init__(name, (len(entries), *first.shape), FORMATS[first.dtype])
        self._entries = [entries[number] for number in range(len(entries))]

    def _read(self, start: int, stop: int) -> NDArray[np.float32]:
        row_bytes, per = self.format.row_bytes(self.n_cols), self.shape[1]
        data = np.empty((stop - start, row_bytes), np.uint8)
        row = start
        while row < stop:
            expert, first = divmod(row, per)
            n = min(per - first, stop - row)
            self._entries[expert].read_into(data[row - start : row - start + n], first * row_bytes)
            row += n
        return self.format.dequantize(data)


class Part(SourceTensor):
    """Some rows of every expert of a stored stack, (n_expert, rows, n_cols) or biases (n_expert, rows).

    rows:        which, of each expert's
    transposed:  whether matrices are stored columns first
    """

    def __init__(self, name: str, entry: Entry, rows: slice, transposed: bool) -> None:
        n_expert, *sizes = entry.shape
        self._is_bias = len(sizes) == 1
        self._transposed = transposed and not self._is_bias
        self._stored = sizes[::-1] if self._transposed else sizes
        self._picked = range(self._stored[0])[rows]
        self._last: tuple[int, NDArray[np.float32]] | None = None
        self._entry = entry
        super().__init__(name, (n_expert, len(self._picked), *self._stored[1:]), FORMATS[entry.dtype])

    def _read(self, start: int, stop: int) -> NDArray[np.float32]:
        if self._is_bias:
            values = self._rows(start, stop, self._stored[0])
            return values[:, self._picked.start : self._picked.stop : self._picked.step]
        found, per = [], self.shape[1]
        while start < stop:
            expert, first = divmod(start, per)
            picked = self._picked[first : min(per, first + stop - start)]
            found.append(self._of_expert(expert, picked))
            start += len(picked)
        return np.concatenate(found)

    def _of_expert(self, expert: int, picked: range) -> NDArray[np.float32]:
        n_rows, n_cols = self._stored
        if self._transposed:
            if self._last is None or self._last[0] != expert:
                whole = self._rows(expert * n_cols, (expert + 1) * n_cols, n_rows)
                self._last = expert, np.ascontiguousarray(whole.T)
            return self._last[1][picked.start : picked.stop : picked.step]
        first = expert * n_rows
        return self._rows(first + picked[0], first + picked[-1] + 1, n_cols)[:: picked.step]

    def _rows(self, start: int, stop: int, n_cols: int) -> NDArray[np.float32]:
        row_bytes = self.format.row_bytes(n_cols)
        data = np.empty((stop - start, row_bytes), np.uint8)
        self._entry.read_into(data, start * row_bytes)
        return self.format.dequantize(data)


def parts_of(name: str, entry: Entry, transposed: bool, in_turn: bool) -> dict[str, SourceTensor]:
    """The GGUF tensors of a stored stack: gate and up for fused ones.

    transposed:  matrices are stored columns first
    in_turn:     rows of gate and up stand in turn, not one below the other
    """
    if "ffn_gate_up_exps" not in name:
        return {name: Part(name, entry, slice(None), transposed)}
    half = entry.shape[-1 if transposed or len(entry.shape) == 2 else -2] // 2
    rows = (slice(0, None, 2), slice(1, None, 2)) if in_turn else (slice(0, half), slice(half, None))
    names = [name.replace("gate_up", part) for part in ("gate", "up")]
    return {own: Part(own, entry, which, transposed) for own, which in zip(names, rows, strict=True)}
