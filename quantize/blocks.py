"""What the bytes of a block mean: uint8 (n, type_size) -> float32 (n, block_size), one function a format.

Every function takes the products and sums in ggml's order, so that the floats are equal bit for bit.
Source: ggml's ggml-common.h for the layouts (`d` scale, `m` minimum, `qs` low bits, `qh` high bits).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# IQ4_NL's sixteen levels, spaced for values that are roughly normally distributed.
IQ4_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)  # fmt: skip


def _half(block: Bytes, offset: int) -> Floats:
    """The f16 field at a byte offset: float32 (n, 1)."""
    return np.ascontiguousarray(block[:, offset : offset + 2]).view("<f2").astype(np.float32)


def planes(packed: Bytes, bits: int) -> Bytes:
    """uint8 (..., m) -> (..., 8 / bits, m): the fields of each byte, lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return packed[..., None, :] >> shifts & np.uint8(2**bits - 1)


def _bits32(packed: Bytes) -> Bytes:
    """uint8 (n, 4) -> (n, 32): the bits of a little-endian uint32, lowest first."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def f32(block: Bytes) -> Floats:
    return block.view("<f4").astype(np.float32, copy=False)


def f16(block: Bytes) -> Floats:
    return block.view("<f2").astype(np.float32)


def bf16(block: Bytes) -> Floats:
    return np.left_shift(block.view("<u2"), 16, dtype=np.uint32).view(np.float32)


def q4_0(block: Bytes) -> Floats:
    q = planes(block[:, 2:], 4).reshape(-1, 32).astype(np.int8) - np.int8(8)
    return _half(block, 0) * q.astype(np.float32)


def q4_1(block: Bytes) -> Floats:
    q = planes(block[:, 4:], 4).reshape(-1, 32)
    return _half(block, 0) * q.astype(np.float32) + _half(block, 2)


def q5_0(block: Bytes) -> Floats:
    q = planes(block[:, 6:], 4).reshape(-1, 32) | _bits32(block[:, 2:6]) << 4
    return _half(block, 0) * (q.astype(np.int8) - np.int8(16)).astype(np.float32)


def q5_1(block: Bytes) -> Floats:
    q = planes(block[:, 8:], 4).reshape(-1, 32) | _bits32(block[:, 4:8]) << 4
    return _half(block, 0) * q.astype(np.float32) + _half(block, 2)


def q8_0(block: Bytes) -> Floats:
    return _half(block, 0) * block[:, 2:].view(np.int8).astype(np.float32)


def q2_k(block: Bytes) -> Floats:
    scales = block[:, :16]
    d = _half(block, 80) * (scales & 15).astype(np.float32)  # (n, 16)
    m = _half(block, 82) * (scales >> 4).astype(np.float32)  # (n, 16)
    q = planes(block[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return (d[:, :, None] * q.astype(np.float32) - m[:, :, None]).reshape(-1, 256)


def q3_k(block: Bytes) -> Floats:
    high = planes(block[:, :32], 1)  # (n, 8, 32)
    low = planes(block[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    q = (low | high << 2).astype(np.int8) - np.int8(4)
    scale_low = planes(block[:, 96:104], 4).reshape(-1, 16)
    scale_high = planes(block[:, 104:108], 2).reshape(-1, 16)
    scales = (scale_low | scale_high << 4).astype(np.int8) - np.int8(32)
    d = _half(block, 108) * scales.astype(np.float32)  # (n, 16)
    return (d[:, :, None] * q.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)


def k4_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """uint8 (n, 12) -> the eight 6-bit scales and minimums of Q4_K and Q5_K, uint8 (n, 8) each."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, c & 15 | (a >> 6) << 4], axis=1)
    minimums = np.concatenate([b & 63, c >> 4 | (b >> 6) << 4], axis=1)
    return scales, minimums


def _k4(block: Bytes, q: Bytes) -> Floats:
    """Scales uint8 (n, 8, 32) quants by a Q4_K or Q5_K block's head."""
    scales, minimums = k4_scales(block[:, 4:16])
    d = _half(block, 0) * scales.astype(np.float32)
    m = _half(block, 2) * minimums.astype(np.float32)
    return (d[:, :, None] * q.astype(np.float32) - m[:, :, None]).reshape(-1, 256)


def q4_k(block: Bytes) -> Floats:
    return _k4(block, planes(block[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32))


def q5_k(block: Bytes) -> Floats:
    low = planes(block[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return _k4(block, low | planes(block[:, 16:48], 1) << np.uint8(4))


def q6_k(block: Bytes) -> Floats:
    low = planes(block[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 8, 32)
    high = planes(block[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    q = (low | high << 4).astype(np.int8) - np.int8(32)
    d = _half(block, 208) * block[:, 192:208].view(np.int8).astype(np.float32)  # (n, 16)
    return (d[:, :, None] * q.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)


def iq4_nl(block: Bytes) -> Floats:
    q = IQ4_LEVELS[planes(block[:, 2:], 4).reshape(-1, 32)]
    return _half(block, 0) * q.astype(np.float32)


def iq4_xs(block: Bytes) -> Floats:
    scale_low = planes(block[:, 4:8, None], 4).reshape(-1, 8)
    scale_high = planes(block[:, 2:4, None], 2).reshape(-1, 8)
    scales = (scale_low | scale_high << 4).astype(np.int8) - np.int8(32)
    d = _half(block, 0) * scales.astype(np.float32)  # (n, 8)
    q = IQ4_LEVELS[planes(block[:, 8:].reshape(-1, 8, 16), 4).reshape(-1, 8, 32)]
    return (d[:, :, None] * q.astype(np.float32)).reshape(-1, 256)
