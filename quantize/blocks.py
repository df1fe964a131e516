"""What the bytes of a block mean: uint8 (n, type_size) -> float32 (n, block_size), one function a format.

Every function takes the products and sums in ggml's order, so that the floats are equal bit for bit.
Source: ggml's ggml-common.h for the layouts (`d` scale, `m` minimum, `qs` low bits, `qh` high bits).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgert.quantize import lattices

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# IQ4_NL's sixteen levels, spaced for values that are roughly normally distributed.
IQ4_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)  # fmt: skip
# Twice the values of FP4 (E2M1), so that they are whole.
E2M1_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
IQ2_LEVELS = np.array([8, 25, 43], np.float32)
IQ3_XXS_LEVELS = np.array([4, 12, 20, 28, 36, 44, 52, 62], np.float32)
IQ3_S_LEVELS = np.arange(1, 16, 2, dtype=np.float32)
IQ1_DELTA = np.float32(0.125)  # what all values of a run are shifted by


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


def q1_0(block: Bytes) -> Floats:
    d = _half(block, 0)
    return np.where(np.unpackbits(block[:, 2:], axis=1, bitorder="little"), d, -d)


def _trits(packed: Bytes, n: int) -> Bytes:
    """uint8 (blocks, m) -> (blocks, n * m): each byte is a fraction of 256 whose first n ternary digits are taken."""
    shifted = packed[:, None, :] * np.array([1, 3, 9, 27, 81][:n], np.uint8)[:, None]
    return (shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(packed), -1)


def tq1_0(block: Bytes) -> Floats:
    runs = (block[:, :32], 5), (block[:, 32:48], 5), (block[:, 48:52], 4)
    q = np.concatenate([_trits(packed, n) for packed, n in runs], axis=1).astype(np.int8) - np.int8(1)
    return _half(block, 52) * q.astype(np.float32)


def tq2_0(block: Bytes) -> Floats:
    q = planes(block[:, :64].reshape(-1, 2, 32), 2).reshape(-1, 256).astype(np.int8) - np.int8(1)
    return _half(block, 64) * q.astype(np.float32)


def e8m0_half(exponents: Bytes) -> Floats:
    """Half of 2**(exponent - 127), which E2M1_LEVELS are doubled for."""
    wide = exponents.astype(np.uint32)
    small = np.uint32(0x00200000) << np.minimum(wide, 1)
    return np.where(wide < 2, small, (wide - 1) << 23).astype(np.uint32).view(np.float32)


def mxfp4(block: Bytes) -> Floats:
    q = E2M1_LEVELS[planes(block[:, 1:], 4).reshape(-1, 32)]
    return e8m0_half(block[:, :1]) * q.astype(np.float32)


def _ue4m3_halves() -> Floats:
    """Half of each E4M3 value, whose sign is not looked at; the pattern for NaN counts as 0."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(code == 0x7F, 0, value / 2).astype(np.float32)


UE4M3_HALVES = _ue4m3_halves()


def nvfp4(block: Bytes) -> Floats:
    d = UE4M3_HALVES[block[:, :4]]
    q = E2M1_LEVELS[planes(block[:, 4:].reshape(-1, 4, 8), 4).reshape(-1, 4, 16)]
    return (d[:, :, None] * q.astype(np.float32)).reshape(-1, 64)


def _words(block: Bytes, dtype: str) -> NDArray[np.unsignedinteger]:
    """The bytes of each block as little-endian numbers."""
    return np.ascontiguousarray(block).view(dtype)


def _signed(levels: Floats, negative: Bytes) -> Floats:
    return np.where(negative.reshape(levels.shape), -levels, levels)


def _iq_scales(block: Bytes, four_bits: Bytes, unit: float) -> Floats:
    """d * (0.5 + s) * unit for each 4-bit s: float32 (blocks, n)."""
    return _half(block, 0) * (np.float32(0.5) + four_bits.astype(np.float32)) * np.float32(unit)


def _xxs(words: NDArray[np.unsignedinteger]) -> tuple[Bytes, Bytes]:
    """uint32 (blocks, 8) -> their 4-bit scales (blocks, 8), and the signs of 32 values each (blocks, 8, 32)."""
    indexes = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    return (words >> 28).astype(np.uint8), lattices.signs()[indexes].reshape(-1, 8, 32)


def iq2_xxs(block: Bytes) -> Floats:
    words = _words(block[:, 2:], "<u4").reshape(-1, 8, 2)
    scales, negative = _xxs(words[:, :, 1])
    point = _words(words[:, :, 0], "u1").reshape(-1, 8, 4)
    levels = IQ2_LEVELS[lattices.points("IQ2_XXS")[point]].reshape(-1, 8, 32)
    return (_iq_scales(block, scales, 0.25)[:, :, None] * _signed(levels, negative)).reshape(-1, 256)


def iq2_xs(block: Bytes) -> Floats:
    words = _words(block[:, 2:66], "<u2").reshape(-1, 16, 2)
    levels = IQ2_LEVELS[lattices.points("IQ2_XS")[words & 511]].reshape(-1, 16, 16)
    negative = lattices.signs()[words >> 9]
    scales = planes(block[:, 66:, None], 4).reshape(-1, 16)
    return (_iq_scales(block, scales, 0.25)[:, :, None] * _signed(levels, negative)).reshape(-1, 256)


def iq2_s(block: Bytes) -> Floats:
    high = planes(block[:, 66:74, None], 2).reshape(-1, 32)
    point = block[:, 2:34] | high.astype(np.uint16) << 8
    levels = IQ2_LEVELS[lattices.points("IQ2_S")[point]].reshape(-1, 16, 16)
    negative = planes(block[:, 34:66, None], 1)
    scales = planes(block[:, 74:, None], 4).reshape(-1, 16)
    return (_iq_scales(block, scales, 0.25)[:, :, None] * _signed(levels, negative)).reshape(-1, 256)


def iq3_xxs(block: Bytes) -> Floats:
    scales, negative = _xxs(_words(block[:, 66:], "<u4"))
    levels = IQ3_XXS_LEVELS[lattices.points("IQ3_XXS")[block[:, 2:66]]].reshape(-1, 8, 32)
    return (_iq_scales(block, scales, 0.5)[:, :, None] * _signed(levels, negative)).reshape(-1, 256)


def iq3_s(block: Bytes) -> Floats:
    high = planes(block[:, 66:74, None], 1).reshape(-1, 64)
    point = block[:, 2:66] | high.astype(np.uint16) << 8
    levels = IQ3_S_LEVELS[lattices.points("IQ3_S")[point]].reshape(-1, 8, 32)
    negative = planes(block[:, 74:106, None], 1)
    d = _half(block, 0) * (1 + 2 * planes(block[:, 106:, None], 4).reshape(-1, 8)).astype(np.float32)
    return (d[:, :, None] * _signed(levels, negative)).reshape(-1, 256)


def _iq1(point: NDArray[np.integer], negative: NDArray[np.bool_], d: Floats) -> Floats:
    """Points (blocks, 32), each with the sign of its shift, and scales (blocks, n) of equal runs."""
    values = lattices.points("IQ1_S")[point].astype(np.float32) - np.float32(1)
    values += np.where(negative, -IQ1_DELTA, IQ1_DELTA)[:, :, None]
    return (d[:, :, None] * values.reshape(*d.shape, -1)).reshape(-1, 256)


def iq1_s(block: Bytes) -> Floats:
    words = _words(block[:, 34:], "<u2")
    high = words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7
    d = _half(block, 0) * (2 * (words >> 12 & 7) + 1).astype(np.float32)
    return _iq1(block[:, 2:34] | high.reshape(-1, 32) << 8, np.repeat(words >= 0x8000, 4, axis=1), d)


def iq1_m(block: Bytes) -> Floats:
    words = _words(block[:, 48:], "<u2")  # four of them: three bits of four scales, then four of the float16
    d = (words >> 12 << np.array([0, 4, 8, 12], np.uint16)).sum(axis=1, dtype=np.uint16)
    scales = words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7
    high = planes(block[:, 32:48, None], 4).reshape(-1, 32).astype(np.uint16)
    d = d.view("<f2").astype(np.float32)[:, None] * (2 * scales.reshape(-1, 16) + 1).astype(np.float32)
    return _iq1(block[:, :32] | (high & 7) << 8, high >= 8, d)
