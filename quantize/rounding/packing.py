"""Codes and scales of sixteen blocks -> their bytes, one function a format; and NumPy's way back.

All have one signature, `pack(codes, d, m, ls, lm, out, at, stride)`: the arrays of ggml.py's fits, and the uint8 array
where block k starts at [at + k * stride]. Source: ggml's ggml-common.h.
"""

from __future__ import annotations

from edgert.quantize.jit.compiled import inline
from edgert.quantize.jit.lanes import load, scatter, vi
from edgert.quantize.rounding.numbers import half_bits


@inline
def _half(out, at, stride, values, sign):
    value = load(values, 0)
    scatter(out, at, stride, half_bits(-value if sign < 0 else value), 2)


@inline
def _word(codes, i, bias):
    """Four neighbours as the bytes of an int32."""
    bias = vi(bias)
    return (
        (load(codes, 16 * i) + bias)
        | (load(codes, 16 * i + 16) + bias) << vi(8)
        | (load(codes, 16 * i + 32) + bias) << vi(16)
        | (load(codes, 16 * i + 48) + bias) << vi(24)
    )


@inline
def _nibbles(codes, i, n, bias, out, at, stride):
    """n bytes whose low nibbles are codes i ... and whose high nibbles codes i + n ..."""
    for k in range(0, n, 4):
        low, high = _word(codes, i + k, bias), _word(codes, i + n + k, bias)
        scatter(out, at + k, stride, low & vi(0x0F0F0F0F) | (high & vi(0x0F0F0F0F)) << vi(4), 4)


@inline
def _pairs(codes, i, bias, shift, out, at, stride):
    """32 bytes of two bits of codes i, i + 32, i + 64 and i + 96, from bit `shift` on."""
    for k in range(0, 32, 4):
        word = vi(0)
        for part in range(4):
            bits = (_word(codes, i + 32 * part + k, bias) >> vi(shift)) & vi(0x03030303)
            word = word | bits << vi(2 * part)
        scatter(out, at + k, stride, word, 4)


@inline
def q4_0(codes, d, m, ls, lm, out, at, stride):
    _half(out, at, stride, d, 1)
    _nibbles(codes, 0, 16, 8, out, at + 2, stride)


@inline
def q4_1(codes, d, m, ls, lm, out, at, stride):
    _half(out, at, stride, d, 1)
    _half(out, at + 2, stride, m, -1)
    _nibbles(codes, 0, 16, 0, out, at + 4, stride)


@inline
def _fifth_bits(codes, bias, out, at, stride):
    word = vi(0)
    for i in range(32):
        word = word | (((load(codes, 16 * i) + vi(bias)) >> vi(4)) & vi(1)) << vi(i)
    scatter(out, at, stride, word, 4)


@inline
def q5_0(codes, d, m, ls, lm, out, at, stride):
    _half(out, at, stride, d, 1)
    _fifth_bits(codes, 16, out, at + 2, stride)
    _nibbles(codes, 0, 16, 16, out, at + 6, stride)


@inline
def q5_1(codes, d, m, ls, lm, out, at, stride):
    _half(out, at, stride, d, 1)
    _half(out, at + 2, stride, m, -1)
    _fifth_bits(codes, 0, out, at + 4, stride)
    _nibbles(codes, 0, 16, 0, out, at + 8, stride)


@inline
def q8_0(codes, d, m, ls, lm, out, at, stride):
    _half(out, at, stride, d, 1)
    for k in range(0, 32, 4):
        word = vi(0)
        for part in range(4):
            word = word | (load(codes, 16 * (k + part)) & vi(255)) << vi(8 * part)
        scatter(out, at + 2 + k, stride, word, 4)


@inline
def q2_k(codes, d, m, ls, lm, out, at, stride):
    for j in range(16):
        scatter(out, at + j, stride, load(ls, 16 * j) | load(lm, 16 * j) << vi(4), 1)
    _pairs(codes, 0, 0, 0, out, at + 16, stride)
    _pairs(codes, 128, 0, 0, out, at + 48, stride)
    _half(out, at + 80, stride, d, 1)
    _half(out, at + 82, stride, m, 1)


@inline
def q3_k(codes, d, m, ls, lm, out, at, stride):
    for k in range(0, 32, 4):
        word = vi(0)
        for part in range(8):
            word = word | ((_word(codes, 32 * part + k, 4) >> vi(2)) & vi(0x01010101)) << vi(part)
        scatter(out, at + k, stride, word, 4)
    _pairs(codes, 0, 4, 0, out, at + 32, stride)
    _pairs(codes, 128, 4, 0, out, at + 64, stride)
    for j in range(8):
        low, high = load(ls, 16 * j) + vi(32), load(ls, 16 * j + 128) + vi(32)
        scatter(out, at + 96 + j, stride, low & vi(15) | (high & vi(15)) << vi(4), 1)
    for j in range(4):
        byte = vi(0)
        for part in range(4):
            byte = byte | ((load(ls, 16 * (4 * part + j)) + vi(32)) >> vi(4)) << vi(2 * part)
        scatter(out, at + 104 + j, stride, byte, 1)
    _half(out, at + 108, stride, d, 1)


@inline
def _k4_head(d, m, ls, lm, out, at, stride):
    _half(out, at, stride, d, 1)
    _half(out, at + 2, stride, m, 1)
    for j in range(4):
        scale, minimum = load(ls, 16 * j + 64), load(lm, 16 * j + 64)
        scatter(out, at + 4 + j, stride, load(ls, 16 * j) | (scale >> vi(4)) << vi(6), 1)
        scatter(out, at + 8 + j, stride, load(lm, 16 * j) | (minimum >> vi(4)) << vi(6), 1)
        scatter(out, at + 12 + j, stride, scale & vi(15) | (minimum & vi(15)) << vi(4), 1)


@inline
def q4_k(codes, d, m, ls, lm, out, at, stride):
    _k4_head(d, m, ls, lm, out, at, stride)
    for chunk in range(4):
        _nibbles(codes, 64 * chunk, 32, 0, out, at + 16 + 32 * chunk, stride)


@inline
def q5_k(codes, d, m, ls, lm, out, at, stride):
    _k4_head(d, m, ls, lm, out, at, stride)
    for k in range(0, 32, 4):
        word = vi(0)
        for part in range(8):
            word = word | ((_word(codes, 32 * part + k, 0) >> vi(4)) & vi(0x01010101)) << vi(part)
        scatter(out, at + 16 + k, stride, word, 4)
    for chunk in range(4):
        _nibbles(codes, 64 * chunk, 32, 0, out, at + 48 + 32 * chunk, stride)


@inline
def q6_k(codes, d, m, ls, lm, out, at, stride):
    for half in range(2):
        _nibbles(codes, 128 * half, 64, 32, out, at + 64 * half, stride)
        _pairs(codes, 128 * half, 32, 4, out, at + 128 + 32 * half, stride)
    for j in range(16):
        scatter(out, at + 192 + j, stride, load(ls, 16 * j), 1)
    _half(out, at + 208, stride, d, 1)


@inline
def iq4_nl(codes, d, m, ls, lm, out, at, stride):
    _half(out, at, stride, d, 1)
    _nibbles(codes, 0, 16, 0, out, at + 2, stride)


@inline
def iq4_xs(codes, d, m, ls, lm, out, at, stride):
    _half(out, at, stride, d, 1)
    high = vi(0)
    for j in range(8):
        high = high | ((load(ls, 16 * j) + vi(32)) >> vi(4)) << vi(2 * j)
    scatter(out, at + 2, stride, high, 2)
    for j in range(4):
        even, odd = load(ls, 32 * j) + vi(32), load(ls, 32 * j + 16) + vi(32)
        scatter(out, at + 4 + j, stride, even & vi(15) | (odd & vi(15)) << vi(4), 1)
    for chunk in range(8):
        _nibbles(codes, 32 * chunk, 16, 0, out, at + 8 + 16 * chunk, stride)
