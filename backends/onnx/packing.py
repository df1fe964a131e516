"""GGUF's blocks as MatMulNBits takes them, without loss: integer codes, float32 scales, and what is left over.

A weight is scale * (code - zero_point) + rest, with zero_point 8 for 4 bits and 128 for 8. The rest, one number a
block, multiplies the sum of the block's activations; MatMulNBits knows only integer zero points, and rounding the
minimum of Q4_1 or Q4_K to one would cost more than a fourth of the perplexity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgert.quantize.blocks import IQ4_LEVELS, k4_scales

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
# uint8 (n, type_size) -> codes uint8 (n, elements), scales and rest float32 (n, elements / block_size)
Unpack = Callable[[Bytes], tuple[Bytes, Floats, Floats | None]]


@dataclass(frozen=True)
class Packing:
    """How a GGUF format becomes codes.

    bits:        of a code in MatMulNBits, 4 or 8
    block_size:  elements that share a scale
    has_rest:    whether blocks have a number beside the scale
    """

    bits: int
    block_size: int
    has_rest: bool
    unpack: Unpack

    @property
    def zero_point(self) -> int:
        return 1 << self.bits - 1

    def pack(self, data: Bytes, type_size: int) -> tuple[Bytes, Floats, Floats | None]:
        """uint8 (rows, row_bytes) -> codes (rows, blocks, block_size * bits / 8), scales and rest (rows, blocks)."""
        rows = len(data)
        codes, scales, rest = self.unpack(np.ascontiguousarray(data).reshape(-1, type_size))
        if self.bits == 4:
            codes = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
        packed = codes.reshape(rows, -1, self.block_size * self.bits // 8)
        return packed, scales.reshape(rows, -1), None if rest is None else rest.reshape(rows, -1)


def _half(block: Bytes, offset: int) -> Floats:
    return np.ascontiguousarray(block[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Runs of bytes hold first the low, then the high halves: uint8 (n, m) -> (n, 2 m)."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(packed), -1)


def _fields(packed: Bytes, bits: int, run: int) -> Bytes:
    """As _nibbles, for fields of fewer bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, run)
    return (runs >> shifts & np.uint8(2**bits - 1)).reshape(len(packed), -1)


def _bits32(packed: Bytes) -> Bytes:
    return np.unpackbits(packed, axis=1, bitorder="little")


def _q4_0(block: Bytes) -> tuple[Bytes, Floats, None]:
    return _nibbles(block[:, 2:], 16), _half(block, 0), None


def _q4_1(block: Bytes) -> tuple[Bytes, Floats, Floats]:
    d = _half(block, 0)
    return _nibbles(block[:, 4:], 16), d, _half(block, 2) + np.float32(8) * d


def _q5_0(block: Bytes) -> tuple[Bytes, Floats, None]:
    return (_nibbles(block[:, 6:], 16) | _bits32(block[:, 2:6]) << np.uint8(4)) + np.uint8(112), _half(block, 0), None


def _q5_1(block: Bytes) -> tuple[Bytes, Floats, Floats]:
    d = _half(block, 0)
    codes = (_nibbles(block[:, 8:], 16) | _bits32(block[:, 4:8]) << np.uint8(4)) + np.uint8(112)
    rest = _half(block, 2) + np.float32(16) * d
    return codes, d, rest


def _q8_0(block: Bytes) -> tuple[Bytes, Floats, None]:
    return block[:, 2:] ^ np.uint8(128), _half(block, 0), None


def _q2_k(block: Bytes) -> tuple[Bytes, Floats, Floats]:
    d = _half(block, 80) * (block[:, :16] & 15).astype(np.float32)
    m = _half(block, 82) * (block[:, :16] >> 4).astype(np.float32)
    return _fields(block[:, 16:80], 2, 32) + np.uint8(6), d, np.float32(2) * d - m


def _q3_k(block: Bytes) -> tuple[Bytes, Floats, None]:
    codes = (_fields(block[:, 32:96], 2, 32) | _fields(block[:, :32], 1, 32) << np.uint8(2)) + np.uint8(4)
    low, high = _fields(block[:, 96:104], 4, 8), _fields(block[:, 104:108], 2, 4)
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    return codes, _half(block, 108) * scales.astype(np.float32), None


def _k4(block: Bytes, codes: Bytes, middle: int) -> tuple[Bytes, Floats, Floats]:
    scales, minimums = k4_scales(block[:, 4:16])
    d = _half(block, 0) * scales.astype(np.float32)
    return codes, d, np.float32(middle) * d - _half(block, 2) * minimums.astype(np.float32)


def _q4_k(block: Bytes) -> tuple[Bytes, Floats, Floats]:
    return _k4(block, _nibbles(block[:, 16:], 32), 8)


def _q5_k(block: Bytes) -> tuple[Bytes, Floats, Floats]:
    codes = _nibbles(block[:, 48:], 32) | _fields(block[:, 16:48], 1, 32) << np.uint8(4)
    return _k4(block, codes + np.uint8(112), 16)


def _q6_k(block: Bytes) -> tuple[Bytes, Floats, None]:
    codes = _nibbles(block[:, :128], 64) | _fields(block[:, 128:192], 2, 32) << np.uint8(4)
    d = _half(block, 208) * block[:, 192:208].view(np.int8).astype(np.float32)
    return codes + np.uint8(96), d, None


def _levels(codes: Bytes) -> Bytes:
    return IQ4_LEVELS[codes].view(np.uint8) ^ np.uint8(128)


def _iq4_nl(block: Bytes) -> tuple[Bytes, Floats, None]:
    return _levels(_nibbles(block[:, 2:], 16)), _half(block, 0), None


def _iq4_xs(block: Bytes) -> tuple[Bytes, Floats, None]:
    low, high = _fields(block[:, 4:8], 4, 1), _fields(block[:, 2:4], 2, 1)
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    return _levels(_nibbles(block[:, 8:], 16)), _half(block, 0) * scales.astype(np.float32), None


# By the name of the GGUF format; formats without a row are computed in float32.
PACKINGS: dict[str, Packing] = {
    "Q4_0": Packing(4, 32, False, _q4_0),
    "Q4_1": Packing(4, 32, True, _q4_1),
    "Q5_0": Packing(8, 32, False, _q5_0),
    "Q5_1": Packing(8, 32, True, _q5_1),
    "Q8_0": Packing(8, 32, False, _q8_0),
    "Q2_K": Packing(4, 16, True, _q2_k),
    "Q3_K": Packing(4, 16, False, _q3_k),
    "Q4_K": Packing(4, 32, True, _q4_k),
    "Q5_K": Packing(8, 32, True, _q5_k),
    "Q6_K": Packing(8, 16, False, _q6_k),
    "IQ4_NL": Packing(8, 32, False, _iq4_nl),
    "IQ4_XS": Packing(8, 32, False, _iq4_xs),
}
