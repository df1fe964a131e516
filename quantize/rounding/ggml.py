"""ggml's quantizers, format by format, on sixteen blocks at once: scales, minimums and codes of a unit.

All have one signature, `fit(x, w, d, m, ls, lm, codes, scratch)`; arrays lie in lanes (see fits.py):
x:        float32 (16 block_size), the values
w:        float32 (16 block_size), their weights; a `plain` fit sets its own
d, m:     float32 (16,), what a block's f16 scale and minimum give back
ls, lm:   int32 (16 n_sub), the integer scales and minimums of the sub-blocks
codes:    int8 (16 block_size); x = d ls code - m lm, or d ls level[code]
scratch:  float32 (16 * 48)
Source: ggml's ggml-quants.c, quantize_row_*_ref and quantize_row_*_impl.
"""

from __future__ import annotations

from edgert.quantize.jit.compiled import inline
from edgert.quantize.jit.lanes import absolute, load, root, select, store, to_float, to_int, trunc, vf, vi
from edgert.quantize.rounding.fits import TINY, asymmetric, extreme, levelled, positive, settled, symmetric
from edgert.quantize.rounding.numbers import clip, level, nearest, rounded


@inline
def _reciprocal(value):
    return select(value != vf(0.0), vf(1.0) / value, vf(0.0))


@inline
def _single(d, m, ls, lm, scale, minimum):
    """Stores the head of a format with one scale a block."""
    store(d, 0, rounded(scale))
    store(m, 0, -rounded(-minimum))
    store(ls, 0, vi(1))
    store(lm, 0, vi(1))


@inline
def recode(x, d, m, ls, lm, codes, n_sub, n, low, high):
    """The nearest codes under the stored scales; those of sub-blocks whose scale is zero stay."""
    for j in range(n_sub):
        scale = load(d, 0) * to_float(load(ls, 16 * j))
        shift = load(m, 0) * to_float(load(lm, 16 * j))
        for i in range(j * n, j * n + n):
            code = clip(nearest((load(x, 16 * i) + shift) / scale), low, high)
            store(codes, 16 * i, select(scale == vf(0.0), load(codes, 16 * i), code))


@inline
def _plain_symmetric(x, d, m, ls, lm, codes, n_max):
    value, _ = extreme(x, 0, 32)
    scale = value / vf(-n_max)
    inverse = _reciprocal(scale)
    for i in range(32):
        code = to_int(load(x, 16 * i) * inverse + vf(n_max + 0.5))
        code = (code << vi(24)) >> vi(24)  # as C's int8
        store(codes, 16 * i, select(code > vi(2 * n_max - 1), vi(2 * n_max - 1), code) - vi(n_max))
    _single(d, m, ls, lm, scale, vf(0.0))


@inline
def _plain_asymmetric(x, d, m, ls, lm, codes, n_max):
    low = load(x, 0)
    high = low
    for i in range(1, 32):
        v = load(x, 16 * i)
        low = select(v < low, v, low)
        high = select(v > high, v, high)
    scale = (high - low) / vf(n_max)
    inverse = _reciprocal(scale)
    for i in range(32):
        code = to_int((load(x, 16 * i) - low) * inverse + vf(0.5)) & vi(255)
        store(codes, 16 * i, select(code > vi(n_max), vi(n_max), code))
    _single(d, m, ls, lm, scale, -low)


@inline
def plain_q4_0(x, w, d, m, ls, lm, codes, scratch):
    _plain_symmetric(x, d, m, ls, lm, codes, 8)


@inline
def plain_q5_0(x, w, d, m, ls, lm, codes, scratch):
    _plain_symmetric(x, d, m, ls, lm, codes, 16)


@inline
def plain_q4_1(x, w, d, m, ls, lm, codes, scratch):
    _plain_asymmetric(x, d, m, ls, lm, codes, 15)


@inline
def plain_q5_1(x, w, d, m, ls, lm, codes, scratch):
    _plain_asymmetric(x, d, m, ls, lm, codes, 31)


@inline
def plain_q8_0(x, w, d, m, ls, lm, codes, scratch):
    _, magnitude = extreme(x, 0, 32)
    scale = magnitude / vf(127)
    inverse = _reciprocal(scale)
    for i in range(32):
        value = load(x, 16 * i) * inverse
        whole = trunc(value)
        away = select(value < vf(0.0), vf(-1.0), vf(1.0))
        whole = select(absolute(value - whole) >= vf(0.5), whole + away, whole)  # ties away from zero
        store(codes, 16 * i, to_int(whole))
    _single(d, m, ls, lm, scale, vf(0.0))


@inline
def weighted_q4_0(x, w, d, m, ls, lm, codes, scratch):
    _single(d, m, ls, lm, symmetric(x, w, 0, 32, 8, codes), vf(0.0))


@inline
def weighted_q5_0(x, w, d, m, ls, lm, codes, scratch):
    _single(d, m, ls, lm, symmetric(x, w, 0, 32, 16, codes), vf(0.0))


@inline
def weighted_q4_1(x, w, d, m, ls, lm, codes, scratch):
    scale, minimum = asymmetric(x, w, 0, 32, 15, -0.9, 0.05, 36, False, codes)
    _single(d, m, ls, lm, scale, minimum)


@inline
def weighted_q5_1(x, w, d, m, ls, lm, codes, scratch):
    scale, minimum = asymmetric(x, w, 0, 32, 31, -0.9, 0.05, 36, False, codes)
    _single(d, m, ls, lm, scale, minimum)


@inline
def _largest(scratch, at, n):
    largest = vf(0.0)
    for j in range(n):
        v = load(scratch, at + 16 * j)
        largest = select(v > largest, v, largest)
    return largest


@inline
def _plain_k4(x, w, d, m, ls, lm, codes, scratch, n_max, first, n_steps):
    """Q4_K and Q5_K: 6-bit scales and minimums, rounded by the largest."""
    for j in range(8):
        at = 512 * j
        total = vf(0.0)
        for i in range(32):
            v = load(x, at + 16 * i)
            total += v * v
        mean = root(total / vf(32.0))
        for i in range(32):
            store(w, at + 16 * i, mean + absolute(load(x, at + 16 * i)))
        scale, minimum = asymmetric(x, w, at, 32, n_max, first, 0.1, n_steps, False, codes)
        store(scratch, 16 * j, scale)
        store(scratch, 128 + 16 * j, minimum)
    scale, minimum = _largest(scratch, 0, 8), _largest(scratch, 128, 8)
    inverse_scale = select(scale > vf(0.0), vf(63.0) / scale, vf(0.0))
    inverse_minimum = select(minimum > vf(0.0), vf(63.0) / minimum, vf(0.0))
    for j in range(8):
        store(ls, 16 * j, clip(nearest(inverse_scale * load(scratch, 16 * j)) & vi(255), 0, 63))
        store(lm, 16 * j, clip(nearest(inverse_minimum * load(scratch, 128 + 16 * j)) & vi(255), 0, 63))
    store(d, 0, rounded(scale / vf(63.0)))
    store(m, 0, rounded(minimum / vf(63.0)))
    recode(x, d, m, ls, lm, codes, 8, 32, 0, n_max)


@inline
def _weighted_k4(x, w, d, m, ls, lm, codes, scratch, n_max):
    for j in range(8):
        scale, minimum = asymmetric(x, w, 512 * j, 32, n_max, -0.9, 0.05, 36, False, codes)
        total = vf(0.0)
        for i in range(32):
            total += load(w, 512 * j + 16 * i)
        store(scratch, 16 * j, scale)
        store(scratch, 128 + 16 * j, minimum)
        store(scratch, 256 + 16 * j, total)
    store(d, 0, rounded(positive(scratch, scratch[256:], 8, 63, ls)))
    store(m, 0, rounded(positive(scratch[128:], scratch[256:], 8, 63, lm)))
    recode(x, d, m, ls, lm, codes, 8, 32, 0, n_max)


@inline
def plain_q4_k(x, w, d, m, ls, lm, codes, scratch):
    _plain_k4(x, w, d, m, ls, lm, codes, scratch, 15, -1.0, 20)


@inline
def plain_q5_k(x, w, d, m, ls, lm, codes, scratch):
    _plain_k4(x, w, d, m, ls, lm, codes, scratch, 31, -0.5, 15)


@inline
def weighted_q4_k(x, w, d, m, ls, lm, codes, scratch):
    _weighted_k4(x, w, d, m, ls, lm, codes, scratch, 15)


@inline
def weighted_q5_k(x, w, d, m, ls, lm, codes, scratch):
    _weighted_k4(x, w, d, m, ls, lm, codes, scratch, 31)


@inline
def _nibbles(ls, lm, j, scale, minimum):
    """Q2_K keeps both integers of a sub-block in one byte."""
    byte = (scale | (minimum << vi(4))) & vi(255)
    store(ls, 16 * j, byte & vi(15))
    store(lm, 16 * j, byte >> vi(4))


@inline
def plain_q2_k(x, w, d, m, ls, lm, codes, scratch):
    for j in range(16):
        at = 256 * j
        for i in range(16):
            store(w, at + 16 * i, absolute(load(x, at + 16 * i)))
        scale, minimum = asymmetric(x, w, at, 16, 3, -0.5, 0.1, 15, True, codes)
        store(scratch, 16 * j, scale)
        store(scratch, 256 + 16 * j, minimum)
    scale, minimum = _largest(scratch, 0, 16), _largest(scratch, 256, 16)
    inverse_scale = select(scale > vf(0.0), vf(15.0) / scale, vf(0.0))
    inverse_minimum = select(minimum > vf(0.0), vf(15.0) / minimum, vf(0.0))
    for j in range(16):
        _nibbles(ls, lm, j, nearest(inverse_scale * load(scratch, 16 * j)),
                 nearest(inverse_minimum * load(scratch, 256 + 16 * j)))  # fmt: skip
    store(d, 0, rounded(scale / vf(15.0)))
    store(m, 0, rounded(minimum / vf(15.0)))
    recode(x, d, m, ls, lm, codes, 16, 16, 0, 3)


@inline
def weighted_q2_k(x, w, d, m, ls, lm, codes, scratch):
    for j in range(16):
        total = vf(0.0)
        for i in range(16):
            total += load(w, 256 * j + 16 * i)
        scale, minimum = asymmetric(x, w, 256 * j, 16, 3, -0.9, 0.05, 36, False, codes)
        store(scratch, 16 * j, scale)
        store(scratch, 256 + 16 * j, minimum)
        store(scratch, 512 + 16 * j, total)
    store(d, 0, rounded(positive(scratch, scratch[512:], 16, 15, ls)))
    store(m, 0, rounded(positive(scratch[256:], scratch[512:], 16, 15, lm)))
    for j in range(16):
        _nibbles(ls, lm, j, load(ls, 16 * j), load(lm, 16 * j))
    recode(x, d, m, ls, lm, codes, 16, 16, 0, 3)


@inline
def plain_q3_k(x, w, d, m, ls, lm, codes, scratch):
    for j in range(16):
        store(scratch, 16 * j, settled(x, 256 * j, 16, 4, codes))
    value, _ = extreme(scratch, 0, 16)
    inverse = vf(-32.0) / value
    zero = value == vf(0.0)
    for j in range(16):
        whole = (nearest(inverse * load(scratch, 16 * j)) << vi(24)) >> vi(24)
        store(ls, 16 * j, select(zero, vi(-32), clip(whole, -32, 31)))
        store(lm, 16 * j, vi(0))
    store(d, 0, rounded(select(zero, vf(0.0), vf(1.0) / inverse)))
    store(m, 0, vf(0.0))
    recode(x, d, m, ls, lm, codes, 16, 16, -4, 3)


@inline
def weighted_q3_k(x, w, d, m, ls, lm, codes, scratch):
    for j in range(16):
        total = vf(0.0)
        for i in range(16):
            total += load(w, 256 * j + 16 * i)
        store(scratch, 16 * j, symmetric(x, w, 256 * j, 16, 4, codes))
        store(scratch, 256 + 16 * j, total)
        store(lm, 16 * j, vi(0))
    store(d, 0, rounded(symmetric(scratch, scratch[256:], 0, 16, 32, ls)))
    store(m, 0, vf(0.0))
    recode(x, d, m, ls, lm, codes, 16, 16, -4, 3)


@inline
def weighted_q6_k(x, w, d, m, ls, lm, codes, scratch):
    for j in range(16):
        store(scratch, 16 * j, symmetric(x, w, 256 * j, 16, 32, codes))
    value, magnitude = extreme(scratch, 0, 16)
    zero = magnitude < vf(TINY)
    inverse = vf(-128.0) / value
    for j in range(16):
        whole = nearest(inverse * load(scratch, 16 * j))
        store(ls, 16 * j, select(zero, vi(0), select(whole > vi(127), vi(127), whole)))
        store(lm, 16 * j, vi(0))
    for i in range(256):
        store(codes, 16 * i, select(zero, vi(-32), load(codes, 16 * i)))
    store(d, 0, rounded(select(zero, vf(0.0), vf(1.0) / inverse)))
    store(m, 0, vf(0.0))
    recode(x, d, m, ls, lm, codes, 16, 16, -32, 31)


@inline
def _squares(x, w, n):
    for i in range(n):
        v = load(x, 16 * i)
        store(w, 16 * i, v * v)


@inline
def plain_q6_k(x, w, d, m, ls, lm, codes, scratch):
    _squares(x, w, 256)
    weighted_q6_k(x, w, d, m, ls, lm, codes, scratch)


@inline
def weighted_iq4_nl(x, w, d, m, ls, lm, codes, scratch):
    scale = levelled(x, w, 0, 32)
    inverse = _reciprocal(scale)
    for i in range(32):
        store(codes, 16 * i, level(inverse * load(x, 16 * i))[0])
    _single(d, m, ls, lm, scale, vf(0.0))


@inline
def plain_iq4_nl(x, w, d, m, ls, lm, codes, scratch):
    _squares(x, w, 32)
    weighted_iq4_nl(x, w, d, m, ls, lm, codes, scratch)


@inline
def weighted_iq4_xs(x, w, d, m, ls, lm, codes, scratch):
    for j in range(8):
        store(scratch, 16 * j, levelled(x, w, 512 * j, 32))
    value, _ = extreme(scratch, 0, 8)
    scale = -value / vf(32.0)
    inverse = _reciprocal(scale)
    for j in range(8):
        whole = clip(nearest(inverse * load(scratch, 16 * j)), -32, 31)
        inverse_j = _reciprocal(scale * to_float(whole))
        for i in range(32 * j, 32 * j + 32):
            store(codes, 16 * i, level(inverse_j * load(x, 16 * i))[0])
        store(ls, 16 * j, whole)
        store(lm, 16 * j, vi(0))
    store(d, 0, rounded(scale))
    store(m, 0, vf(0.0))


@inline
def plain_iq4_xs(x, w, d, m, ls, lm, codes, scratch):
    _squares(x, w, 256)
    weighted_iq4_xs(x, w, d, m, ls, lm, codes, scratch)
