"""What ggml does to single numbers, sixteen at a time: to f16 and back, to the nearest integer, to a level of IQ4."""

from __future__ import annotations

import numpy as np

from edgert.quantize.blocks import IQ4_LEVELS
from edgert.quantize.jit.compiled import inline
from edgert.quantize.jit.lanes import absolute, bits_of, float_of, select, vf, vi


@inline
def half_bits(value):
    """float32 -> the bits of the nearest f16 (ties to even, infinity past 65504)."""
    bits = bits_of(value)
    exponent = bits & vi(0x7F800000)
    exponent = select(exponent < vi(0x38800000), vi(0x38800000), exponent)
    scaled = (absolute(value) * vf(2.0**112)) * vf(2.0**-110)
    rounded = bits_of(float_of(exponent + vi(0x07800000)) + scaled)
    return ((rounded >> vi(13)) & vi(0x7C00)) + (rounded & vi(0xFFF)) | (bits >> vi(16)) & vi(0x8000)


@inline
def from_half(bits):
    """The bits of an f16 -> float32."""
    magnitude = bits & vi(0x7FFF)
    value = bits_of(float_of(magnitude << vi(13)) * vf(2.0**112))
    value = select(magnitude >= vi(0x7C00), vi(0x7F800000), value)
    return float_of(value | (bits & vi(0x8000)) << vi(16))


@inline
def rounded(value):
    """float32 -> the float32 that a stored f16 gives back."""
    return from_half(half_bits(value))


@inline
def nearest(value):
    """float32 below 2**22 in magnitude -> int32, ties to even."""
    return (bits_of(value + vf(12582912.0)) & vi(0x007FFFFF)) - vi(0x00400000)


@inline
def clip(value, low, high):
    """int32 lanes into [low, high]."""
    value = select(value > vi(high), vi(high), value)
    return select(value < vi(low), vi(low), value)


def _steps(levels: np.ndarray) -> np.ndarray:
    """The least float32 that is nearer to level k + 1 than to level k, as ggml compares them."""
    steps = []
    for low, high in zip(levels[:-1].astype(np.float32), levels[1:].astype(np.float32), strict=True):
        middle = np.float32((float(low) + float(high)) / 2)
        for _ in range(4):
            middle = np.nextafter(middle, low, dtype=np.float32)
        while middle - low < high - middle:
            middle = np.nextafter(middle, high, dtype=np.float32)
        steps.append(middle)
    return np.array(steps, np.float32)


_STEPS = _steps(IQ4_LEVELS)


@inline
def level(value):
    """float32 -> the index of the nearest level of IQ4 and the level itself, int32 both."""
    index, found = vi(0), vi(IQ4_LEVELS[0])
    for k in range(15):
        above = value >= vf(_STEPS[k])
        index = select(above, vi(k + 1), index)
        found = select(above, vi(IQ4_LEVELS[k + 1]), found)
    return index, found
