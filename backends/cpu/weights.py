"""Reads a file's tensors and packs them for the kernels, without ever holding the file and the copy together."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert import ending
from edgert.backends.cpu import compiler, copies
from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.layouts import BLOCK, CODEC_OF, CODECS, n_panels
from edgert.backends.cpu.memory import Arena, FreshMemory, system_call
from edgert.backends.cpu.team import Team
from edgert.errors import UnsupportedFormatError
from edgert.quantize.formats import FORMATS, check_finite
from edgert.quantize.gguf_file import GGUFFile, Model

# Of raw rows read at a time: the size of a core's own cache. With half as much, threads wait more.
BUFFER_BYTES = 2 << 20
TASK_BYTES = 8 << 20  # of raw rows that a thread takes at a time
CHUNK_BYTES = 32 << 20  # of packed weights allocated at a time
FLOAT_CODECS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor of the file, from row `start` on."""

    name: str
    start: int
    count: int


@dataclass(frozen=True)
class Part:
    """Where rows of the file's tensors stand in a matrix: in the panels first, first + step, ..."""

    rows: Rows
    first: int
    step: int


@dataclass(frozen=True)
class Matrix:
    """Packed weights, uint8; `n_panels` is even, the rows past `n_rows` are zeros.

    bias:  what products with it add, float32 of all rows of the panels, or None
    """

    codec: str
    n_rows: int
    n_cols: int
    n_panels: int
    data: NDArray[np.uint8]
    parts: tuple[Part, ...]
    bias: NDArray[np.float32] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors in it."""
        return tuple(dict.fromkeys(part.rows.name for part in self.parts))


class Packer:
    """Packs the tensors of one file through small buffers, or takes them from a copy that was kept of them packed.

    Matrices hold their weights after `finish`.

    codec:  a float codec that all matrices are dequantized to; None: each keeps its own type, which takes a GGUFFile
    """

    def __init__(self, file: Model[Any], isa: Isa, team: Team, codec: str | None = None) -> None:
        self._file = file
        self._all_as = codec
        self._isa = isa
        self._team = team
        self._left: deque[tuple[Matrix, Part, int, int]] = deque()  # which rows are still to be read and packed
        self._arena = Arena(CHUNK_BYTES)
        self._key = copies.key(file.paths, isa) if codec is None and isinstance(file, GGUFFile) else None
        self._copy = copies.find(self._key, isa, team) if self._key else None
        self._made: list[tuple[str, NDArray[np.uint8]]] = []

    @staticmethod
    def kernels(file: Model[Any], names: Sequence[str], codec: str | None = None) -> set[str]:
        """The kernels that packing these tensors needs.

        Raises: UnsupportedFormatError for a tensor type without a layout, or rows that are not blocks of 32.
        """
        found = set()
        for name in names:
            tensor = file.tensor(name)
            if codec is None and tensor.format.name not in CODEC_OF:
                raise UnsupportedFormatError(
                    f"{file.path}: tensor {name} has type {tensor.format.name}; the cpu backend runs "
                    f"{', '.join(CODEC_OF)}."
                )
            if tensor.n_cols % BLOCK:
                raise UnsupportedFormatError(
                    f"{file.path}: tensor {name} has rows of {tensor.n_cols}; "
                    f"the cpu backend runs multiples of {BLOCK}."
                )
            found.add(compiler.name_of("repack", format=codec.upper() if codec else tensor.format.name))
        if codec is None and isinstance(file, GGUFFile) and copies.is_worthwhile(file.paths):
            found.update(copies.KERNELS)
        return found

    def keep(self) -> copies.Keeper | None:
        """Begins to write a copy of what was packed, if one pays and none was there."""
        return copies.Keeper(self._key, self._isa, self._made) if self._key and self._made else None

    def pack(self, names: Sequence[str | Rows]) -> list[Matrix]:
        """Packs tensors with equal columns one below the other; neighbours of the same codec become one matrix."""
        groups: list[list[Rows]] = []
        for rows in map(self._rows, names):
            before = groups[-1][-1] if groups else None
            if before and self._codec(before.name) == self._codec(rows.name) and before.count % self._isa.lanes == 0:
                groups[-1].append(rows)
            else:
                groups.append([rows])
        return [self._join(group, interleave=False) for group in groups]

    def pack_some(self, name: str, ids: NDArray[np.int64]) -> Matrix:
        """Packs the rows `ids` (ascending) of a tensor, in the type that it has in the file."""
        tensor, lanes = self._file.tensor(name), self._isa.lanes
        codec = CODECS[CODEC_OF[tensor.format.name]]
        rows = np.empty((len(ids), tensor.row_bytes), np.uint8)
        at_once = max(1, BUFFER_BYTES // tensor.row_bytes)
        for start in range(0, tensor.n_rows, at_once):
            raw = np.empty((min(at_once, tensor.n_rows - start), tensor.row_bytes), np.uint8)
            tensor.read_into(raw, start * tensor.row_bytes)
            low, high = np.searchsorted(ids, [start, start + len(raw)])
            rows[low:high] = raw[ids[low:high] - start]
        panels = n_panels(len(ids), 2 * lanes) * 2
        data = self._arena.take(panels * codec.panel_bytes(tensor.n_cols, lanes))
        part = Part(Rows(name, 0, len(ids)), 0, 1)
        bias = self._bias([part.rows], panels)
        if bias is not None:
            bias[: len(ids)] = self._small(_bias_of(name))[ids]
        matrix = Matrix(codec.name, len(ids), tensor.n_cols, panels, data, (part,), bias)
        pack_rows(self._team, self._isa, tensor.format.name, rows, matrix, part)
        return matrix

    def pack_pair(self, gate: Rows, up: Rows) -> Matrix | None:
        """Packs rows with their panels in turn; None if their codecs differ, or they have biases."""
        if any(_bias_of(rows.name) in self._file.tensors for rows in (gate, up)):
            return None
        return self.pack_pairs([gate, up])

    def pack_pairs(self, pairs: list[Rows]) -> Matrix | None:
        """Packs pairs of rows one below the other, the panels of each pair in turn, and so its biases.

        None if their codecs differ.
        """
        if len({self._codec(rows.name) for rows in pairs}) > 1 or pairs[0].count % (2 * self._isa.lanes):
            return None
        return self._join(pairs, interleave=True)

    def router(self, names: Sequence[str]) -> list[Matrix]:
        """Packs what chooses between experts, in float32 whatever the other matrices become."""
        kept, self._all_as = self._all_as, "f32"
        try:
            return self.pack(names)
        finally:
            self._all_as = kept

    def vector(self, name: str) -> NDArray[np.float32]:
        """A small tensor as float32."""
        values = self._small(name)
        place = self._arena.floats(len(values))
        place[:] = values
        return place

    def _small(self, name: str) -> NDArray[np.float32]:
        tensor = self._file.tensor(name)
        return tensor.rows(0, tensor.n_rows).reshape(-1)

    def _rows(self, name: str | Rows) -> Rows:
        return name if isinstance(name, Rows) else Rows(name, 0, self._file.tensor(name).n_rows)

    def _codec(self, name: str) -> str:
        return self._all_as or CODEC_OF[self._file.tensor(name).format.name]

    def _bias(self, group: Sequence[Rows], n_panels: int) -> NDArray[np.float32] | None:
        """Those of rows one below the other, with zeros where there is none; None where none has any."""
        if not any(_bias_of(rows.name) in self._file.tensors for rows in group):
            return None
        bias = self._arena.floats(n_panels * self._isa.lanes)
        bias[:] = 0
        at = 0
        for rows in group:
            if _bias_of(rows.name) in self._file.tensors:
                values = self._small(_bias_of(rows.name))
                bias[at : at + rows.count] = values[rows.start : rows.start + rows.count]
            at += rows.count
        return bias

    def _join(self, group: list[Rows], interleave: bool) -> Matrix:
        lanes = self._isa.lanes
        codec = CODECS[self._codec(group[0].name)]
        n_cols = self._file.tensor(group[0].name).n_cols
        n_rows = sum(rows.count for rows in group)
        panels = n_panels(n_rows, 2 * lanes) * 2
        n_bytes = panels * codec.panel_bytes(n_cols, lanes)
        label = f"{codec.name} {interleave} {group}"
        copied = self._copy.take(label, n_bytes) if self._copy else None
        data = self._arena.take(n_bytes) if copied is None else copied
        parts, first = [], 0
        for i, rows in enumerate(group):
            parts.append(Part(rows, first, 1 + interleave))
            if not interleave:
                first += n_panels(rows.count, lanes)
            else:  # the second of a pair begins a panel after the first, and the next pair where both end
                first += 2 * n_panels(rows.count, lanes) - 1 if i % 2 else 1
        bias = self._bias(group, panels)
        if bias is not None and interleave:
            bias = _in_turn(bias, [part.rows.count // lanes for part in parts], lanes)
        matrix = Matrix(codec.name, n_rows, n_cols, panels, data, tuple(parts), bias)
        if copied is None:
            for part in parts:
                self._pack_part(matrix, part)
            self._made.append((label, data))
        return matrix

    def _pack_part(self, matrix: Matrix, part: Part) -> None:
        """Packs rows of one tensor into their place, a few at a time: at once, or those of a file by `finish`."""
        lanes, start = self._isa.lanes, part.rows.start
        tensor: Any = self._file.tensor(part.rows.name)
        if self._all_as:
            for row, n in _pieces(part.rows.count, BUFFER_BYTES, 4 * matrix.n_cols, lanes):
                ending.check()
                rows = encode(self._all_as, tensor.rows(start + row, start + row + n))
                pack_rows(self._team, self._isa, self._all_as.upper(), rows, matrix, part, row)
            return
        for row, n in _pieces(part.rows.count, TASK_BYTES, tensor.row_bytes, lanes):
            self._left.append((matrix, part, row, n))

    def finish(self) -> None:
        """Reads and packs what the matrices were made for: each thread takes the next rows, and none waits.

        Raises: ModelFileError for values that are NaN or infinite, or a file that has become shorter.
        """
        others = min(self._team.n_threads, len(self._left)) - 1
        memory = FreshMemory(self._arena.pieces) if self._arena.n_bytes >= copies.WORTHWHILE else None
        held = self._file.held() if isinstance(self._file, GGUFFile) else contextlib.nullcontext()
        try:
            with held, ThreadPoolExecutor(max(1, others), "edgert-pack") as pool:
                stop = ending.current()
                helped = [pool.submit(self._work, memory, stop) for _ in range(others)]
                self._work(memory, stop)
                for future in helped:
                    future.result()
        finally:
            self._left.clear()
        if memory:
            memory.settle()

    def _work(self, memory: FreshMemory | None, stop: ending.Stop) -> None:
        buffer = np.empty(0, np.uint8)
        try:
            while True:
                stop.check()
                try:
                    matrix, part, row, n = self._left.popleft()
                except IndexError:
                    return
                tensor = self._file.tensor(part.rows.name)
                begin, n_bytes = (part.rows.start + row) * tensor.row_bytes, n * tensor.row_bytes
                lent = tensor.lend(begin, n_bytes)
                if lent is not None:
                    self._pack_raw(matrix, part, row, lent, memory)
                    tensor.take_back(begin, n_bytes)
                else:
                    for at, few in _pieces(n, BUFFER_BYTES, tensor.row_bytes, self._isa.lanes):
                        if len(buffer) < few * tensor.row_bytes:
                            buffer = np.empty(few * tensor.row_bytes, np.uint8)
                        raw = buffer[: few * tensor.row_bytes]
                        tensor.read_into(raw, begin + at * tensor.row_bytes)
                        self._pack_raw(matrix, part, row + at, raw, memory)
                if memory and memory.scarce and self._key:
                    # The system's copy of these bytes serves as the memory of the next: from now on the packed copy
                    # is what is read.
                    tensor.forget(begin, n_bytes)
        except BaseException:
            self._left.clear()  # the other threads need not go on
            raise

    def _pack_raw(
        self, matrix: Matrix, part: Part, row: int, raw: NDArray[np.uint8], memory: FreshMemory | None
    ) -> None:
        """Packs the bytes of rows of the file, from row `row` of a part on. Raises: ModelFileError as `finish` does."""
        tensor = self._file.tensor(part.rows.name)
        rows = raw.reshape(-1, tensor.row_bytes)
        if not pack_rows(None, self._isa, tensor.format.name, rows, matrix, part, row, memory):
            check_finite(tensor, rows)


def _pieces(n_rows: int, n_bytes: int, row_bytes: int, lanes: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of pieces of about so many bytes, each of whole panels but for the last."""
    at_once = max(1, n_bytes // (row_bytes * lanes)) * lanes
    for row in range(0, n_rows, at_once):
        yield row, min(at_once, n_rows - row)


def _bias_of(name: str) -> str:
    return name.removesuffix("weight") + "bias"


def _in_turn(bias: NDArray[np.float32], counts: Sequence[int], lanes: int) -> NDArray[np.float32]:
    """The biases of pairs, one member below the other, in the order of panels that take turns."""
    members = np.split(bias.reshape(-1, lanes), np.cumsum(counts)[:-1])
    pairs = zip(members[::2], members[1::2], strict=True)
    return np.concatenate([np.stack(pair, 1).reshape(-1) for pair in pairs])


def pack_rows(
    team: Team | None,
    isa: Isa,
    format: str,
    rows: NDArray[np.uint8],
    matrix: Matrix,
    part: Part,
    first_row: int = 0,
    memory: FreshMemory | None = None,
) -> bool:
    """Packs rows of a GGUF type, uint8 (n, row_bytes), into a tensor's place; first_row begins a panel.

    team:    who shares the work; None: the calling thread alone
    memory:  how the place's memory is brought, by one thread
    Returns whether the floats in them (all, or scales and minima) are finite.
    """
    name = compiler.name_of("repack", format=format)
    address = compiler.addresses([name], isa)[name]
    panel = part.first + first_row // isa.lanes * part.step
    bring = [system_call(), memory.unit] if memory else [0, 1]
    where = [rows.ctypes.data, *rows.shape[::-1], matrix.n_cols, matrix.data.ctypes.data, panel, part.step]
    arguments = np.array([*where, *bring, 0, 0, 0], np.int64)
    if team:
        team.run(np.array([[address, arguments.ctypes.data, 1]], np.int64))
    else:
        begun = time.thread_time()  # in which no other process counts
        compiler.Kernel(address)(0, 1, arguments.ctypes.data)
        seconds = time.thread_time() - begun
    flaws, waited, took = arguments[-3:].tolist()
    if memory and took:
        memory.judge(matrix.data.nbytes // matrix.n_panels * n_panels(len(rows), isa.lanes), seconds * waited / took)
    return not flaws


def encode(codec: str, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32 (rows, n_cols) -> the nearest values of a float codec, uint8 (rows, row_bytes).

    Raises: ValueError for another codec; UnsupportedFormatError for values that it cannot hold.
    """
    values = np.ascontiguousarray(values, np.float32)
    if codec == "bf16":  # the upper half of float32, ties to even
        bits = values.view(np.uint32)
        encoded: NDArray[np.generic] = (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    elif codec in ("f16", "f32"):
        with np.errstate(over="ignore"):
            encoded = values.astype("f2" if codec == "f16" else "f4")
    else:
        raise ValueError(f"{codec} is no float codec: choose {', '.join(FLOAT_CODECS)}")
    rows = encoded.view(np.uint8)
    if not FORMATS[codec.upper()].is_finite(rows):
        raise UnsupportedFormatError(f"Values are NaN, infinite, or too large for {codec}.")
    return rows
