"""What the blocks of each GGUF type hold, in the terms of `layouts.py`: one reader for each type.

Readers are functions of the address of a type's block (or of the planes of a panel's, see `planes.py`), of j, which 32
of its weights are meant, and of which quad (of four weights) or group of them. Codes come four to a 32-bit word, the
first in the lowest byte; scales as the bits that the codec keeps: of float16, or a small integer.
Source of the block formats: ggml-common.h of ggml; the same as in `quantize/blocks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from edgert.backends.cpu.kernels.planes import byte_at, u16_at, u32_at
from edgert.quantize import blocks, lattices

njit = numba.njit(error_model="numpy", forceinline=True)


@njit
def _none(block, j, i):
    return 0


@dataclass(frozen=True)
class Reader:
    """The functions of one type.

    quad:     (block, j, quad) -> four codes
    scale, minimum:  (block, j, group) -> bits
    above:    (block, i) -> the bits of the float16 that integer scales (i = 0) or minima (1) are multiples of
    single:   whether they can read one row only, since they look something up in a table
    """

    block_size: int
    type_size: int
    quad: Any
    scale: Any = _none
    minimum: Any = _none
    above: Any = None
    single: bool = False


def _half(at: int) -> Any:
    """The float16 at a byte of the block, which its integer scales are multiples of."""

    @njit
    def half(block, i):
        return u16_at(block + at)

    return half


def _only(at: int) -> Any:
    """The one float16 that all weights of a block share."""

    @njit
    def half(block, j, i):
        return u16_at(block + at)

    return half


@njit
def _spread(bits):
    """Four bits -> the lowest bits of four bytes."""
    return (bits & 15) * 0x00204081 & 0x01010101


# Types of 32 weights: the first sixteen codes in the low nibbles, the others in the high ones.
def _nibbles(at: int) -> Any:
    @njit
    def quad(block, j, q):
        return u32_at(block + at + 4 * (q & 3)) >> (4 * (q >> 2)) & 0x0F0F0F0F

    return quad


def _five_bits(high_at: int) -> Any:
    nibbles = _nibbles(high_at + 4)

    @njit
    def quad(block, j, q):
        return nibbles(block, j, q) | _spread(u32_at(block + high_at) >> 4 * q) << 4

    return quad


@njit
def _q8_0_quad(block, j, q):
    return u32_at(block + 2 + 4 * q)


@njit
def _q1_0_quad(block, j, q):
    return _spread(u32_at(block + 2 + 4 * j) >> 4 * q) << 1


@njit
def _exponent(block, j, i):
    return byte_at(block)


# Q2_K, Q3_K, TQ2_0: two bits, four runs of 32 weights to 32 bytes.
def _two_bits(at: int) -> Any:
    @njit
    def quad(block, j, q):
        return u32_at(block + at + j // 4 * 32 + 4 * q) >> 2 * (j % 4) & 0x03030303

    return quad


@njit
def _q2_k_scale(block, j, i):
    return byte_at(block + 2 * j + i)


@njit
def _q2_k_above(block, i):
    return u16_at(block + 80 + 2 * i) ^ (0x8000 * i)


_q3_k_low = _two_bits(32)


@njit
def _q3_k_quad(block, j, q):
    return _q3_k_low(block, j, q) | (u32_at(block + 4 * q) >> j & 0x01010101) << 2


@njit
def _q3_k_scale(block, j, i):
    at = 2 * j + i
    low = byte_at(block + 96 + at % 8) >> at // 8 * 4 & 15
    return (low | (byte_at(block + 104 + at % 4) >> at // 4 * 2 & 3) << 4) - 32


# Q4_K, Q5_K: eight 6-bit scales and minima; the codes of two runs of 32 weights to 32 bytes.
@njit
def _k4_scale(block, j, i):
    if j < 4:
        return byte_at(block + 4 + j) & 63
    return byte_at(block + 8 + j) & 15 | byte_at(block + j) >> 6 << 4


@njit
def _k4_minimum(block, j, i):
    if j < 4:
        return byte_at(block + 8 + j) & 63
    return byte_at(block + 8 + j) >> 4 | byte_at(block + 4 + j) >> 6 << 4


@njit
def _k4_above(block, i):
    return u16_at(block + 2 * i) ^ (0x8000 * i)


def _paired_nibbles(at: int) -> Any:
    @njit
    def quad(block, j, q):
        return u32_at(block + at + j // 2 * 32 + 4 * q) >> 4 * (j % 2) & 0x0F0F0F0F

    return quad


_q5_k_low = _paired_nibbles(48)


@njit
def _q5_k_quad(block, j, q):
    return _q5_k_low(block, j, q) | (u32_at(block + 16 + 4 * q) >> j & 0x01010101) << 4


@njit
def _q6_k_quad(block, j, q):
    low = u32_at(block + j // 4 * 64 + j % 2 * 32 + 4 * q) >> 4 * (j % 4 // 2) & 0x0F0F0F0F
    return low | (u32_at(block + 128 + j // 4 * 32 + 4 * q) >> 2 * (j % 4) & 0x03030303) << 4


@njit
def _q6_k_scale(block, j, i):
    return byte_at(block + 192 + 2 * j + i)


# Ternary digits: each byte is a fraction of 256, whose digit n shows after a multiplication by 3**n.
@njit
def _digit(packed, power):
    return ((packed * power & 255) * 3) >> 8


@njit
def _tq1_0_quad(block, j, q):
    word = 0
    for i in range(4):
        at = 32 * j + 4 * q + i
        if at < 160:
            start, run, first = 0, 32, 0
        elif at < 240:
            start, run, first = 160, 16, 32
        else:
            start, run, first = 240, 4, 48
        power = 1
        for _ in range((at - start) // run):
            power *= 3
        word |= _digit(byte_at(block + first + (at - start) % run), power) << 8 * i
    return word


# FP4
_UE4M3_HALVES = blocks.UE4M3_HALVES.astype(np.float16).view(np.uint16).astype(np.int64)


@njit
def _nvfp4_quad(block, j, q):
    return u32_at(block + 4 + 16 * j + 8 * (q // 4) + 4 * (q % 2)) >> 4 * (q % 4 // 2) & 0x0F0F0F0F


@njit
def _nvfp4_scale(block, j, i):
    return _UE4M3_HALVES[byte_at(block + 2 * j + i)]


# IQ types: a code is the index of a level, and a bit above that for the sign.
@njit
def _iq4_xs_quad(block, j, q):
    return u32_at(block + 8 + 16 * j + 4 * (q & 3)) >> (4 * (q >> 2)) & 0x0F0F0F0F


@njit
def _iq4_xs_scale(block, j, i):
    low = byte_at(block + 4 + j // 2) >> 4 * (j % 2) & 15
    return (low | (u16_at(block + 2) >> 2 * j & 3) << 4) - 32


def _words(name: str) -> np.ndarray:
    """The points of a lattice, four coordinates to a word: int64 (n_points * coordinates / 4)."""
    return np.ascontiguousarray(lattices.points(name)).view(np.uint32).reshape(-1).astype(np.int64)


_SIGNS = np.packbits(lattices.signs(), axis=1, bitorder="little").reshape(-1).astype(np.int64)
_IQ2_XXS, _IQ2_XS, _IQ2_S = _words("IQ2_XXS"), _words("IQ2_XS"), _words("IQ2_S")
_IQ3_XXS, _IQ3_S, _IQ1 = _words("IQ3_XXS"), _words("IQ3_S"), _words("IQ1_S")


@njit
def _odd(scale):
    """Scales of these types are d * (2 * s + 1), up to a unit."""
    return 2 * scale + 1


@njit
def _iq2_xxs_quad(block, j, q):
    signs = _SIGNS[u32_at(block + 6 + 8 * j) >> 7 * (q // 2) & 127]
    return _IQ2_XXS[2 * byte_at(block + 2 + 8 * j + q // 2) + q % 2] | _spread(signs >> 4 * (q % 2)) << 2


@njit
def _iq2_xxs_scale(block, j, i):
    return _odd(u32_at(block + 6 + 8 * j) >> 28)


@njit
def _iq2_xs_quad(block, j, q):
    both = u16_at(block + 2 + 8 * j + q // 2 * 2)
    return _IQ2_XS[2 * (both & 511) + q % 2] | _spread(_SIGNS[both >> 9] >> 4 * (q % 2)) << 2


@njit
def _iq2_xs_scale(block, j, i):
    return _odd(byte_at(block + 66 + j) >> 4 * i & 15)


@njit
def _iq2_s_quad(block, j, q):
    point = byte_at(block + 2 + 4 * j + q // 2) | (byte_at(block + 66 + j) >> 2 * (q // 2) & 3) << 8
    return _IQ2_S[2 * point + q % 2] | _spread(byte_at(block + 34 + 4 * j + q // 2) >> 4 * (q % 2)) << 2


@njit
def _iq2_s_scale(block, j, i):
    return _odd(byte_at(block + 74 + j) >> 4 * i & 15)


@njit
def _iq3_xxs_quad(block, j, q):
    signs = _SIGNS[u32_at(block + 66 + 4 * j) >> 7 * (q // 2) & 127]
    return _IQ3_XXS[byte_at(block + 2 + 8 * j + q)] | _spread(signs >> 4 * (q % 2)) << 3


@njit
def _iq3_xxs_scale(block, j, i):
    return _odd(u32_at(block + 66 + 4 * j) >> 28)


@njit
def _iq3_s_quad(block, j, q):
    point = byte_at(block + 2 + 8 * j + q) | (byte_at(block + 66 + j) >> q & 1) << 8
    return _IQ3_S[point] | _spread(byte_at(block + 74 + 4 * j + q // 2) >> 4 * (q % 2)) << 3


@njit
def _iq3_s_scale(block, j, i):
    return _odd(byte_at(block + 106 + j // 2) >> 4 * (j % 2) & 15)


@njit
def _iq1_s_quad(block, j, q):
    high = u16_at(block + 34 + 2 * j)
    levels = _IQ1[2 * (byte_at(block + 2 + 4 * j + q // 2) | (high >> 3 * (q // 2) & 7) << 8) + q % 2]
    return 0x02020202 - levels if high >> 15 else levels  # shifted down: the negative of one that is shifted up


@njit
def _iq1_s_scale(block, j, i):
    high = u16_at(block + 34 + 2 * j)
    scale = _odd(high >> 12 & 7)
    return -scale if high >> 15 else scale


@njit
def _iq1_m_quad(block, j, q):
    high = byte_at(block + 32 + 2 * j + q // 4) >> 4 * (q // 2 % 2)
    return _IQ1[2 * (byte_at(block + 4 * j + q // 2) | (high & 7) << 8) + q % 2] | (high >> 3 & 1) * 0x04040404


@njit
def _iq1_m_scale(block, j, i):
    return _odd(u16_at(block + 48 + j // 2 * 2) >> 3 * (j % 2 * 2 + i) & 7)


@njit
def _iq1_m_above(block, i):
    bits = 0
    for part in range(4):
        bits |= u16_at(block + 48 + 2 * part) >> 12 << 4 * part
    return bits


READERS: dict[str, Reader] = {
    "Q4_0": Reader(32, 18, _nibbles(2), _only(0)),
    "Q4_1": Reader(32, 20, _nibbles(4), _only(0), _only(2)),
    "Q5_0": Reader(32, 22, _five_bits(2), _only(0)),
    "Q5_1": Reader(32, 24, _five_bits(4), _only(0), _only(2)),
    "Q8_0": Reader(32, 34, _q8_0_quad, _only(0)),
    "Q2_K": Reader(256, 84, _two_bits(16), _q2_k_scale, above=_q2_k_above),
    "Q3_K": Reader(256, 110, _q3_k_quad, _q3_k_scale, above=_half(108)),
    "Q4_K": Reader(256, 144, _paired_nibbles(16), _k4_scale, _k4_minimum, _k4_above),
    "Q5_K": Reader(256, 176, _q5_k_quad, _k4_scale, _k4_minimum, _k4_above),
    "Q6_K": Reader(256, 210, _q6_k_quad, _q6_k_scale, above=_half(208)),
    "Q1_0": Reader(128, 18, _q1_0_quad, _only(0)),
    "TQ1_0": Reader(256, 54, _tq1_0_quad, above=_half(52), single=True),
    "TQ2_0": Reader(256, 66, _two_bits(0), above=_half(64)),
    "MXFP4": Reader(32, 17, _nibbles(1), _exponent),
    "NVFP4": Reader(64, 36, _nvfp4_quad, _nvfp4_scale, single=True),
    "IQ4_NL": Reader(32, 18, _nibbles(2), _only(0)),
    "IQ4_XS": Reader(256, 136, _iq4_xs_quad, _iq4_xs_scale, above=_half(0)),
    "IQ1_S": Reader(256, 50, _iq1_s_quad, _iq1_s_scale, above=_half(0), single=True),
    "IQ1_M": Reader(256, 56, _iq1_m_quad, _iq1_m_scale, above=_iq1_m_above, single=True),
    "IQ2_XXS": Reader(256, 66, _iq2_xxs_quad, _iq2_xxs_scale, above=_half(0), single=True),
    "IQ2_XS": Reader(256, 74, _iq2_xs_quad, _iq2_xs_scale, above=_half(0), single=True),
    "IQ2_S": Reader(256, 82, _iq2_s_quad, _iq2_s_scale, above=_half(0), single=True),
    "IQ3_XXS": Reader(256, 98, _iq3_xxs_quad, _iq3_xxs_scale, above=_half(0), single=True),
    "IQ3_S": Reader(256, 110, _iq3_s_quad, _iq3_s_scale, above=_half(0), single=True),
}
