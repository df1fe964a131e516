"""Where everything of a GGUF model lies before a byte of it is written: headers, offsets, shards.

Source: ggml's docs/gguf.md; names and `split.*` keys of shards as llama.cpp's gguf-split writes them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgert.errors import ModelFileError
from edgert.quantize.formats import Format
from edgert.quantize.gguf_value import Value, encode

TensorPlan = tuple[str, tuple[int, ...], Format]  # name, shape (rows before columns), how it will be stored

VERSION = 3
DEFAULT_ALIGNMENT = 32
MAX_NAME = 63  # bytes of a tensor's name that llama.cpp accepts
MAX_DIMS = 4
MAX_SHARDS = 0xFFFF  # split.count has 16 bits


@dataclass(frozen=True)
class Slot:
    """A tensor's place: bytes [offset, offset + n_bytes) of its file, then zeros up to the alignment."""

    name: str
    shape: tuple[int, ...]
    format: Format
    offset: int
    n_bytes: int
    n_padding: int


@dataclass(frozen=True)
class Part:
    """A file of the model: its header (padded) and the tensors behind it."""

    path: Path
    header: bytes
    slots: tuple[Slot, ...]
    n_bytes: int


def tensor_bytes(tensor: TensorPlan) -> int:
    """Bytes of a tensor's data. Raises: ModelFileError for a shape that GGUF cannot hold in this format."""
    name, shape, format = tensor
    if len(name.encode()) > MAX_NAME:
        raise ModelFileError(f"The tensor name {name!r} has more than the {MAX_NAME} bytes that GGUF readers accept.")
    if not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1:
        raise ModelFileError(f"The tensor {name!r} has the shape {shape}: GGUF stores 1 to {MAX_DIMS} dimensions >= 1.")
    if shape[-1] % format.block_size:
        raise ModelFileError(
            f"The tensor {name!r} has rows of {shape[-1]} elements, and {format} stores blocks of {format.block_size}."
        )
    return math.prod(shape[:-1]) * format.row_bytes(shape[-1])


def plan(
    path: Path, metadata: Mapping[str, Value], tensors: Sequence[TensorPlan], split_max_size: int | None = None
) -> tuple[Part, ...]:
    """The files that will hold the model, one unless its tensors exceed split_max_size bytes.

    Raises: ModelFileError for names and shapes that GGUF cannot hold.
    """
    names = [name for name, _, _ in tensors]
    if len(set(names)) != len(names):
        raise ModelFileError(f"The tensor {next(n for n in names if names.count(n) > 1)!r} would be written twice.")
    alignment = metadata["general.alignment"].decode() if "general.alignment" in metadata else DEFAULT_ALIGNMENT
    groups = _split(tensors, split_max_size)
    if len(groups) == 1:
        return (_part(path, metadata, groups[0], alignment),)
    if len(groups) > MAX_SHARDS:
        raise ModelFileError(f"{path} would have {len(groups):,} parts, and {MAX_SHARDS:,} is the most.")
    parts = []
    for index, group in enumerate(groups):
        keys = dict(metadata) if index == 0 else {}
        keys |= {
            "split.no": Value.u16(index),
            "split.count": Value.u16(len(groups)),
            "split.tensors.count": Value.i32(len(tensors)),
        }
        name = shard_path(path, index, len(groups))
        parts.append(_part(name, keys, group, alignment if index == 0 else DEFAULT_ALIGNMENT))
    return tuple(parts)


def shard_path(path: Path, index: int, count: int) -> Path:
    """model.gguf -> model-00001-of-00003.gguf for index 0."""
    return path.with_name(f"{path.name.removesuffix('.gguf')}-{index + 1:05d}-of-{count:05d}.gguf")


def _split(tensors: Sequence[TensorPlan], split_max_size: int | None) -> list[list[TensorPlan]]:
    """Runs of tensors of at most split_max_size bytes, or of one tensor that alone is larger."""
    if split_max_size is None:
        return [list(tensors)]
    if split_max_size < 1:
        raise ValueError(f"split_max_size is {split_max_size}")
    groups: list[list[TensorPlan]] = [[]]
    size = 0
    for tensor in tensors:
        n_bytes = _aligned(tensor_bytes(tensor), DEFAULT_ALIGNMENT)
        if groups[-1] and size + n_bytes > split_max_size:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += n_bytes
    return groups


def _part(path: Path, metadata: Mapping[str, Value], tensors: Iterable[TensorPlan], alignment: int) -> Part:
    entries, sizes, relative = [], [], 0
    tensors = list(tensors)
    for tensor in tensors:
        name, shape, format = tensor
        sizes.append(tensor_bytes(tensor))
        encoded = name.encode()
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        entries.append(struct.pack("<Q", len(encoded)) + encoded + dims + struct.pack("<IQ", format.ggml_id, relative))
        relative += _aligned(sizes[-1], alignment)
    head = b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)) + encode(metadata) + b"".join(entries)
    header = head + bytes(_aligned(len(head), alignment) - len(head))
    offset = len(header)
    slots = []
    for (name, shape, format), n_bytes in zip(tensors, sizes, strict=True):
        n_padding = _aligned(n_bytes, alignment) - n_bytes
        slots.append(Slot(name, shape, format, offset, n_bytes, n_padding))
        offset += n_bytes + n_padding
    return Part(path, header, tuple(slots), offset)


def _aligned(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment
