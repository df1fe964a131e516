"""Reads safetensors files without torch: the header is checked in full, weights are read where they are asked for.

Source: the format's description in the safetensors repository: 8 bytes length, JSON header, data.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize import file_kind

_MAX_HEADER = 100_000_000  # the format's own limit
_MAX_DIMS = 16
_BYTES_OF = {
    1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    2: "U16 I16 F16 BF16",
    4: "U32 I32 F32",
    8: "U64 I64 F64 C64",
}
_BITS = {name: 8 * n for n, names in _BYTES_OF.items() for name in names.split()}
_BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: bytes [offset, offset + n_bytes)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    file: SafetensorsFile

    def read_into(self, buffer: Any, start: int = 0) -> None:
        """Reads bytes [start, start + len(buffer)) of the tensor into a writable C-contiguous buffer."""
        if start < 0 or start + memoryview(buffer).nbytes > self.n_bytes:
            raise ValueError(f"{self.name} has {self.n_bytes} bytes: no {memoryview(buffer).nbytes} bytes at {start}")
        self.file.read_into(buffer, self.offset + start)


class SafetensorsFile:
    """An open file.

    tensors:  by name, in the order of the header
    Raises:   ModelFileError, UnsupportedFormatError for dtypes that nobody knows
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ModelFileError(f"{path} cannot be opened: {error.strerror or error}.") from None
        self._lock = threading.Lock()
        try:
            self.n_bytes = os.fstat(self._file.fileno()).st_size
            self.tensors = self._parse()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def read_into(self, buffer: Any, offset: int) -> None:
        """Fills a writable buffer from a byte offset; safe from several threads.

        Raises: ModelFileError when the file has become shorter since it was opened.
        """
        target = memoryview(buffer).cast("B")
        while target:
            piece = target[: 1 << 30]
            if hasattr(os, "preadv"):
                n = os.preadv(self._file.fileno(), [piece], offset)
            else:
                with self._lock:
                    self._file.seek(offset)
                    n = self._file.readinto(piece) or 0
            if n == 0:
                raise ModelFileError(f"{self.path} became shorter while it was read: start again.")
            target, offset = target[n:], offset + n

    def _parse(self) -> dict[str, Entry]:
        head = bytearray(min(8, self.n_bytes))
        self.read_into(head, 0)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or not 2 <= length <= _MAX_HEADER:
            raise self._foreign(length)
        if length > self.n_bytes - 8:
            raise self._cut_short("its header", 8 + length)
        text = bytearray(length)
        self.read_into(text, 8)
        if text[:1] != b"{":
            raise self._foreign(length)
        entries = {}
        for name, fields in _object(self, text).items():
            if name != "__metadata__":
                entries[name] = self._entry(name, fields, 8 + length)
        ordered = sorted((entry for entry in entries.values() if entry.n_bytes), key=lambda entry: entry.offset)
        for first, second in itertools.pairwise(ordered):
            if first.offset + first.n_bytes > second.offset:
                raise self.damaged(f"the tensors {first.name!r} and {second.name!r} overlap")
        return entries

    def _entry(self, name: str, fields: Any, base: int) -> Entry:
        what = f"the tensor {name!r}"
        if not isinstance(fields, dict):
            raise self.damaged(f"{what} is not described")
        dtype: Any
        shape: Any
        offsets: Any
        dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in _BITS:
            raise UnsupportedFormatError(f"{self.path}: {what} has the dtype {dtype!r}; safetensors has {list(_BITS)}.")
        if not _counts(shape) or len(shape) > _MAX_DIMS:
            raise self.damaged(f"{what} has the shape {_shown(shape)}")
        if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self.damaged(f"{what} has the data_offsets {_shown(offsets)}")
        n_bits = math.prod(shape) * _BITS[dtype]
        n_bytes = offsets[1] - offsets[0]
        if n_bits != 8 * n_bytes:
            raise self.damaged(f"{what} ({dtype}, {_shown(shape)}) has {n_bytes:,} bytes")
        if base + offsets[1] > self.n_bytes:
            raise self._cut_short(what, base + offsets[1])
        return Entry(name, dtype, tuple(shape), base + offsets[0], n_bytes, self)

    def damaged(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is damaged: {what}; download it again.")

    def _cut_short(self, what: str, needed: int) -> ModelFileError:
        return ModelFileError(
            f"{self.path} is incomplete or damaged: it has {self.n_bytes:,} bytes, and {what} "
            f"reaches to byte {needed:,}; download it again."
        )

    def _foreign(self, length: int) -> ModelFileError:
        head = bytearray(min(file_kind.HEAD_BYTES, self.n_bytes))
        self.read_into(head, 0)
        if length > _MAX_HEADER and head[8:9] == b"{":
            return self.damaged(f"its header has {length:,} bytes, and {_MAX_HEADER:,} is the most")
        kind = file_kind.describe(bytes(head), self.n_bytes)
        return ModelFileError(f"{self.path} is not a safetensors file; it is {kind}.")


def _object(file: SafetensorsFile, text: bytes | bytearray) -> dict[str, Any]:
    """The header's JSON, in which no tensor may occur twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in result if names.count(name) > 1)
            raise file.damaged(f"{twice!r} occurs twice in its header")
        return result

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise file.damaged("its header is no JSON") from None
    if not isinstance(header, dict):
        raise file.damaged("its header is no JSON object")
    return header


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
