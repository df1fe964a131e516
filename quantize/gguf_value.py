"""A metadata value with its exact GGUF type, as bytes: what is copied from file to file stays equal bit for bit.

Source: ggml's docs/gguf.md (types of metadata values).
"""

from __future__ import annotations

import array
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.quantize.gguf_shard import Strings


class Kind(IntEnum):
    """GGUF's type ids of metadata values."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


_DTYPES = {
    Kind.U8: "<u1",
    Kind.I8: "<i1",
    Kind.U16: "<u2",
    Kind.I16: "<i2",
    Kind.U32: "<u4",
    Kind.I32: "<i4",
    Kind.F32: "<f4",
    Kind.BOOL: "?",
    Kind.U64: "<u8",
    Kind.I64: "<i8",
    Kind.F64: "<f8",
}
_KINDS = {np.dtype(dtype): kind for kind, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Value:
    """A value of metadata.

    data:  its bytes as they stand in a file behind the type id, strings and arrays with their lengths
    """

    kind: Kind
    data: bytes

    @classmethod
    def number(cls, kind: Kind, number: float) -> Value:
        """Raises: OverflowError when an integer does not fit the type."""
        return cls(kind, np.array(number, _DTYPES[kind]).tobytes())

    @classmethod
    def u16(cls, number: int) -> Value:
        return cls.number(Kind.U16, number)

    @classmethod
    def u32(cls, number: int) -> Value:
        return cls.number(Kind.U32, number)

    @classmethod
    def i32(cls, number: int) -> Value:
        return cls.number(Kind.I32, number)

    @classmethod
    def f32(cls, number: float) -> Value:
        return cls.number(Kind.F32, number)

    @classmethod
    def boolean(cls, truth: bool) -> Value:
        return cls.number(Kind.BOOL, truth)

    @classmethod
    def string(cls, text: str | bytes) -> Value:
        return cls(Kind.STRING, _string(text))

    @classmethod
    def strings(cls, texts: Iterable[str | bytes]) -> Value:
        """An array of strings."""
        items = [_string(text) for text in texts]
        return cls(Kind.ARRAY, struct.pack("<IQ", Kind.STRING, len(items)) + b"".join(items))

    @classmethod
    def array(cls, values: NDArray[Any]) -> Value:
        """An array of numbers (n,), whose dtype is the type of the elements."""
        kind = _KINDS[values.dtype.newbyteorder("<")]
        return cls(Kind.ARRAY, struct.pack("<IQ", kind, len(values)) + values.astype(_DTYPES[kind]).tobytes())

    @classmethod
    def bools(cls, values: Iterable[bool]) -> Value:
        return cls.array(np.array(list(values), np.bool_))

    def decode(self) -> Any:
        """str, int, float, bool, Strings or a NumPy array, as a file's reader gives them."""
        if self.kind == Kind.STRING:
            return self.data[8:].decode("utf-8", "replace")
        if self.kind != Kind.ARRAY:
            return np.frombuffer(self.data, _DTYPES[self.kind])[0].item()
        kind, n = struct.unpack_from("<IQ", self.data)
        items = self.data[12:]
        if kind != Kind.STRING:
            return np.frombuffer(items, _DTYPES[Kind(kind)], n)
        starts = array.array("Q")
        position = 0
        for _ in range(n):
            starts.append(position + 8)
            position += 8 + struct.unpack_from("<Q", items, position)[0]
        return Strings(items, starts)


def encode(metadata: Mapping[str, Value]) -> bytes:
    """All keys and values as they stand in a file's header."""
    return b"".join(_string(key) + struct.pack("<I", value.kind) + value.data for key, value in metadata.items())


def _string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data
