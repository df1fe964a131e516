"""Experts of a checkpoint as GGUF stacks them: one tensor of all, be they apart, fused, transposed or coded there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError
from edgert.quantize import widening
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
        return widening.dequantize(self.format, data)


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
        return widening.dequantize(self.format, data)


class Blocks(SourceTensor):
    """Some rows of every expert of a stack in MXFP4, whose codes and scales stand apart: they are put together.

    codes:   uint8 (n_expert, rows, n_cols / 32, 16), of neighbours in a byte
    scales:  uint8 (n_expert, rows, n_cols / 32)
    rows:    which, of each expert's
    Raises:  ModelFileError where these do not belong together
    Source:  transformers' integrations/mxfp4.py; ggml's block_mxfp4, whose byte i holds the elements i and i + 16
    """

    is_native = True

    def __init__(self, name: str, codes: Entry, scales: Entry, rows: slice) -> None:
        if len(codes.shape) != 4 or codes.shape[3] != 16 or codes.shape[:3] != scales.shape:
            raise ModelFileError(
                f"{codes.file.path}: {codes.name!r} and {scales.name!r} have the shapes {codes.shape} and "
                f"{scales.shape}, which are no MXFP4."
            )
        n_expert, self._n_rows, self._n_blocks, _ = codes.shape
        self._picked = range(self._n_rows)[rows]
        self._codes, self._scales = codes, scales
        super().__init__(name, (n_expert, len(self._picked), 32 * self._n_blocks), FORMATS["MXFP4"])

    def stored(self, start: int, stop: int) -> NDArray[np.uint8]:
        found = []
        while start < stop:
            expert, first = divmod(start, self.shape[1])
            picked = self._picked[first : min(self.shape[1], first + stop - start)]
            found.append(self._of_expert(expert, picked))
            start += len(picked)
        data = np.concatenate(found)
        if not self.format.is_finite(data):
            raise ModelFileError(f"{self.described}: a scale is no number; the checkpoint is damaged.")
        return data

    def _read(self, start: int, stop: int) -> NDArray[np.float32]:
        return self.format.dequantize(self.stored(start, stop))

    def _of_expert(self, expert: int, picked: range) -> NDArray[np.uint8]:
        n, per = picked[-1] + 1 - picked[0], self._n_blocks
        first = expert * self._n_rows + picked[0]
        codes, scales = np.empty((n, per, 16), np.uint8), np.empty((n, per, 1), np.uint8)
        self._codes.read_into(codes, first * per * 16)
        self._scales.read_into(scales, first * per)
        codes, scales = codes[:: picked.step], scales[:: picked.step]
        elements = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(picked), per, 32)
        together = elements[..., :16] | elements[..., 16:] << 4
        return np.concatenate([scales, together], axis=-1).reshape(len(picked), -1)


def blocks_of(name: str, codes: Entry, scales: Entry, in_turn: bool) -> dict[str, SourceTensor]:
    """The GGUF tensors of a stack in MXFP4, as parts_of() makes them of floats."""
    return {own: Blocks(own, codes, scales, rows) for own, rows in _split(name, codes.shape[1], in_turn).items()}


def _split(name: str, n_rows: int, in_turn: bool) -> dict[str, slice]:
    """Which rows of a stack are whose: gate's and up's of fused ones."""
    if "ffn_gate_up_exps" not in name:
        return {name: slice(None)}
    half = n_rows // 2
    rows = (slice(0, None, 2), slice(1, None, 2)) if in_turn else (slice(0, half), slice(half, None))
    return {name.replace("gate_up", part): own for part, own in zip(("gate", "up"), rows, strict=True)}


def parts_of(name: str, entry: Entry, transposed: bool, in_turn: bool) -> dict[str, SourceTensor]:
    """The GGUF tensors of a stored stack: gate and up for fused ones.

    transposed:  matrices are stored columns first
    in_turn:     rows of gate and up stand in turn, not one below the other
    """
    n_rows = entry.shape[-1 if transposed or len(entry.shape) == 2 else -2]
    return {own: Part(own, entry, rows, transposed) for own, rows in _split(name, n_rows, in_turn).items()}
