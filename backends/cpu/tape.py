"""A tape: the kernels of one forward step, in order, with the addresses that each works on."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu.layouts import BLOCK, WORDS_BYTES
from edgert.backends.cpu.memory import Arena
from edgert.backends.cpu.weights import Matrix
from edgert.quantize.engine import Expert, sums_of_squares


def float_bits(value: float) -> int:
    """A float32 as the int64 argument that kernels read it from."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def address(array: NDArray[Any] | None) -> int:
    """Where an array stands, as kernels take it; 0 for none."""
    return 0 if array is None else array.ctypes.data


@dataclass(frozen=True)
class Runs:
    """Rows that stand sorted by expert.

    table:   as `kernels/gather.py` writes it
    n_runs:  place in the step's header of its length
    """

    table: NDArray[np.int64]
    n_runs: int
    n_expert: int


@dataclass(frozen=True)
class Reads:
    """What a product multiplies: a matrix, and rows prepared in one of the forms of `kernels/rows.py`.

    form:   "int8", "pairs", "f32" or "tiles"; "squares": of the rows there are only the sums of their squares
    count:  place in the step's header of the number of rows
    words:  of the forms "int8" and "pairs"
    runs:   whose rows these are, where a tensor holds several experts
    """

    matrix: Matrix
    form: str
    count: int
    rows: NDArray[np.uint8]
    words: NDArray[np.uint8]
    runs: Runs | None = None

    def calls(self, header: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.float32], Expert | None]]:
        """The rows of the step that the header tells of, as `values`; of experts those of each that has some."""
        values = self.values(int(header[self.count]))
        if self.runs is None:
            yield values, None
            return
        count = self.runs.n_expert
        for number, first, n in self.runs.table[: header[self.runs.n_runs]].tolist():
            yield values[first : first + n], Expert(number, count) if count > 1 else None

    def squares(self, header: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.float32], int, Expert | None]]:
        """As `calls`, of the rows the sums of their squares, float32 (n_cols,), and how many there are."""
        if self.form == "squares":
            yield self.rows[: 4 * self.matrix.n_cols].view(np.float32), int(header[self.count]), None
            return
        for rows, expert in self.calls(header):
            yield sums_of_squares(rows), len(rows), expert

    def values(self, n: int) -> NDArray[np.float32]:
        """The first n rows as float32 (n, n_cols); not for tiles."""
        n_cols = self.matrix.n_cols
        if self.form == "f32":
            return self.rows[: n * n_cols * 4].view(np.float32).reshape(n, n_cols)
        integers = self.rows[: (n + n % 2) * n_cols].view(np.int8)
        if self.form == "pairs":
            integers = integers.reshape(-1, n_cols // 8, 2, 8).transpose(0, 2, 1, 3).reshape(-1)
        blocks = integers[: n * n_cols].reshape(n, -1, BLOCK)
        words = self.words[: n * n_cols // BLOCK * WORDS_BYTES].view(np.float32).reshape(n, n_cols // BLOCK, -1)
        return (blocks * words[:, :, :1]).reshape(n, n_cols)


class Op:
    """A kernel by name, its int64 arguments, whether all threads meet after it, and what a product reads."""

    def __init__(self, kernel: str, arguments: Iterable[int], meet: bool = True, reads: Reads | None = None) -> None:
        self.kernel = kernel
        self.arguments = np.array(list(arguments), np.int64)
        self.meet = meet
        self.reads = reads
        self.ends_layer = False


class Tape:
    """Ops made ready to be walked: int64 (n_ops, 3), and all arguments in one piece.

    layers:  how many ops there are up to the end of each layer, all of them in the end
    logits:  where the ops put them at present
    """

    logits: NDArray[np.float32] | None = None

    def __init__(self, ops: list[Op], addresses: Mapping[str, int], arena: Arena) -> None:
        self.ops = ops
        for op in ops:
            place = arena.integers(len(op.arguments))
            place[:] = op.arguments
            op.arguments = place
        self.words = arena.integers(len(ops), 3)
        self.words[:] = [[addresses[op.kernel], op.arguments.ctypes.data, op.meet] for op in ops]
        self.address = self.words.ctypes.data
        self.layers = [*(i for i, op in enumerate(ops, 1) if op.ends_layer), len(ops)]

    def pieces(self) -> Iterator[tuple[NDArray[np.int64], Reads]]:
        """The tape cut before each product: the ops since the product before, and what the product reads.

        Whoever walks a piece may look at the rows when it ends: threads meet after every op.
        """
        words = self.words.copy()
        words[:, 2] = 1
        start = 0
        for i, op in enumerate(self.ops):
            if op.reads is not None:
                yield words[start:i], op.reads
                start = i
