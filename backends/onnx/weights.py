"""All weights of a model in one file of external data, which the graphs of every profile share."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from edgert import ending
from edgert.backends.onnx.packing import PACKINGS
from edgert.quantize.architecture import Architecture
from edgert.quantize.formats import check_finite
from edgert.quantize.gguf_file import GGUFFile, Tensor

ALIGNMENT = 4096  # so that a runtime can map each tensor
STEP_BYTES = 1 << 24  # of GGUF data that are converted at a time
# Matrices of a layer that read the same, one below the other in the file.
GROUPS = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "attn_output": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "ffn_down": ("ffn_down",),
}
DATA, INDEX = "weights.bin", "weights.json"


@dataclass(frozen=True)
class Entry:
    """A tensor in the file of external data."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class Matrix:
    """A matrix (n_rows, n_cols) that multiplies activations: MatMulNBits if it has bits, else in float32.

    The entries are called name + ".codes", ".scales", ".rest" (n_cols / block_size, n_rows), or ".floats"
    (n_cols, n_rows).
    """

    name: str
    n_rows: int
    n_cols: int
    bits: int = 0
    block_size: int = 0
    has_rest: bool = False


@dataclass(frozen=True)
class Weights:
    """What a weights file holds. A group is a list of matrices that stand one below the other."""

    folder: Path
    entries: dict[str, Entry]
    groups: dict[str, list[Matrix]]

    def values(self, name: str) -> bytes:
        """An entry as it stands in the file."""
        entry = self.entries[name]
        with (self.folder / DATA).open("rb") as file:
            file.seek(entry.offset)
            return file.read(entry.n_bytes)

    def table(self, a: Architecture) -> Matrix | None:
        """The head, where its rows are the embeddings as well and codes and scales say all of them."""
        matrix = self.groups["output"][0]
        return matrix if a.tied_head and matrix.bits and not matrix.has_rest else None

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.entries.values())

    @classmethod
    def read(cls, folder: Path) -> Weights:
        """The index in a folder. Raises: OSError, ValueError, KeyError, TypeError when it is not there or damaged."""
        index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        entries = {
            name: Entry(e["dtype"], tuple(e["shape"]), e["offset"], e["n_bytes"])
            for name, e in index["entries"].items()
        }
        groups = {name: [Matrix(**matrix) for matrix in group] for name, group in index["groups"].items()}
        found = (folder / DATA).stat().st_size
        if found < max((e.offset + e.n_bytes for e in entries.values()), default=0):
            raise ValueError(f"{folder / DATA} has only {found} bytes")
        return cls(folder, entries, groups)


class Writer:
    """Appends tensors to the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.entries: dict[str, Entry] = {}
        self.groups: dict[str, list[Matrix]] = {}

    def add(self, name: str, array: NDArray[Any]) -> None:
        position = self._file.tell()
        padding = -position % ALIGNMENT
        self._file.write(bytes(padding))
        array = np.ascontiguousarray(array)
        array.tofile(self._file)
        self.entries[name] = Entry(array.dtype.name, array.shape, position + padding, array.nbytes)

    def add_group(self, name: str, tensors: list[tuple[Tensor, int]]) -> None:
        """Matrices of the same input; neighbours of one packing become one matrix.

        tensors:  each with the size of heads whose rows are put into NeoX's order, or 0
        """
        runs: list[list[tuple[Tensor, int]]] = []
        for entry in tensors:
            if runs and _kind(runs[-1][0][0]) == _kind(entry[0]):
                runs[-1].append(entry)
            else:
                runs.append([entry])
        self.groups[name] = [self._matrix(f"{name}.{i}" if i else name, run) for i, run in enumerate(runs)]

    def _matrix(self, name: str, tensors: list[tuple[Tensor, int]]) -> Matrix:
        n_rows, n_cols = sum(tensor.n_rows for tensor, _ in tensors), tensors[0][0].n_cols
        packing = PACKINGS.get(tensors[0][0].format.name)
        if packing is None:
            floats = [neox_rows(tensor.rows(0, tensor.n_rows), heads) for tensor, heads in tensors]
            self.add(f"{name}.floats", np.concatenate(floats).T)
            return Matrix(name, n_rows, n_cols)
        n_blocks = n_cols // packing.block_size
        codes = np.empty((n_rows, n_blocks, packing.block_size * packing.bits // 8), np.uint8)
        scales = np.empty((n_rows, n_blocks), np.float32)
        rest = np.empty((n_blocks, n_rows), np.float32) if packing.has_rest else None
        row = 0
        for tensor, heads in tensors:
            step = tensor.n_rows if heads else max(1, STEP_BYTES // tensor.row_bytes)
            for start in range(0, tensor.n_rows, step):
                # Read and not mapped: what is mapped stays in memory as long as the file is open.
                raw = np.empty((min(step, tensor.n_rows - start), tensor.row_bytes), np.uint8)
                tensor.read_into(raw, start * tensor.row_bytes)
                check_finite(tensor, raw)
                data = neox_rows(raw, heads)
                rows = slice(row, row + len(data))
                codes[rows], scales[rows], part = PACKINGS[tensor.format.name].pack(data, tensor.format.type_size)
                if rest is not None and part is not None:
                    rest[:, rows] = part.T
                row += len(data)
        self.add(f"{name}.codes", codes)
        self.add(f"{name}.scales", scales)
        if rest is not None:
            self.add(f"{name}.rest", rest)
        return Matrix(name, n_rows, n_cols, packing.bits, packing.block_size, packing.has_rest)

    def index(self) -> str:
        """What Weights.read takes."""
        return json.dumps(
            {
                "entries": {name: asdict(entry) for name, entry in self.entries.items()},
                "groups": {name: [asdict(matrix) for matrix in group] for name, group in self.groups.items()},
            }
        )


def neox_rows(rows: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Rows of heads whose neighbours (2i, 2i+1) are rotated, in the order (i, i + head_dim / 2); 0: as they are.

    Attention is a product of q and k, so the same order of both changes nothing.
    """
    if not head_dim:
        return rows
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(np.moveaxis(pairs, 2, 1)).reshape(rows.shape)


def members(a: Architecture, group: str) -> tuple[str, ...]:
    """The tensors of a group like "blk.0.qkv" or "output"."""
    prefix, _, name = group.rpartition(".")
    if not prefix:
        return ("token_embd.weight" if a.tied_head else "output.weight",)
    return tuple(f"{prefix}.{part}.weight" for part in GROUPS[name])


def _kind(tensor: Tensor) -> tuple[int, int, bool] | None:
    packing = PACKINGS.get(tensor.format.name)
    return (packing.bits, packing.block_size, packing.has_rest) if packing else None


def write(folder: Path, file: GGUFFile, a: Architecture) -> None:
    """Converts all that the graphs need; embeddings are looked up in the GGUF file itself.

    Raises: ModelFileError that names a tensor with NaN or infinity.
    """
    with (folder / DATA).open("wb") as out:
        writer = Writer(out)

        def values(name: str) -> NDArray[np.float32]:
            tensor = file.tensor(name)
            check_finite(tensor)
            return neox_rows(tensor.dequantize(), heads_of(name))

        def heads_of(name: str) -> int:
            """The size of heads whose rows must be put into NeoX's order."""
            return a.head_dim if pairs and name.split(".")[-2].startswith(("attn_q", "attn_k")) else 0

        pairs = a.layers[0].rope.style == "norm"

        for i in range(a.n_layer):
            prefix = f"blk.{i}."
            needed = a.layer_tensors(i)
            for name, shape in needed.items():
                if len(shape) == 1 and not name.endswith(".bias"):
                    writer.add(name, values(name))
            if a.qkv_bias:
                biases = [values(f"{prefix}attn_{part}.bias") for part in "qkv"]
                writer.add(f"{prefix}qkv.bias", np.concatenate(biases))
            for group in GROUPS:
                ending.check()
                tensors = [file.tensor(name) for name in members(a, prefix + group)]
                writer.add_group(prefix + group, [(tensor, heads_of(tensor.name)) for tensor in tensors])
        writer.add("output_norm.weight", values("output_norm.weight"))
        writer.add_group("output", [(file.tensor(name), 0) for name in members(a, "output")])
    (folder / INDEX).write_text(writer.index(), encoding="utf-8")
