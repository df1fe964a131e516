"""GGUF files for tests: written by gguf's writer, or put together byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import pytest

from edgert.errors import EdgertError, ModelFileError
from edgert.quantize.gguf_file import GGUFFile

Fill = Callable[[gguf.GGUFWriter], None]


def write(path: Path, fill: Fill, architecture: str = "llama", **options: object) -> Path:
    writer = gguf.GGUFWriter(path, architecture, **options)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path, kind: type[EdgertError] = ModelFileError) -> str:
    """The one sentence with which a file is refused; it names the file."""
    with pytest.raises(kind) as caught:
        GGUFFile.open(path)
    message = str(caught.value)
    assert str(path) in message
    assert message.endswith(".")
    return message


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def raw_file(keys: Sequence[bytes] = (), tensors: Sequence[bytes] = (), data: bytes = b"", **header: int) -> bytes:
    """A file made by hand: keys are whole entries, tensors come from raw_tensor."""
    counts = (header.get("n_tensors", len(tensors)), header.get("n_keys", len(keys)))
    head = b"GGUF" + struct.pack("<IQQ", header.get("version", 3), *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def raw_tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    n_dims = len(dims) if n_dims is None else n_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", n_dims, *dims, kind, offset)


def raw_key(name: bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value
