"""ggml's searches for the scale of one sub-block, run on sixteen sub-blocks at once.

Arrays of a unit lie in lanes: element i of block k at [16 * i + k]. `at` is where a sub-block of n elements starts.
Each function rounds as ggml's function of the same job does, sum by sum, so that the results are equal bit for bit.
Source: ggml's ggml-quants.c, make_qx_quants, make_q3_quants, make_qkx2/3_quants, make_qp_quants, quantize_row_iq4_nl.
"""

from __future__ import annotations

import numpy as np

from edgert.quantize.jit.compiled import inline
from edgert.quantize.jit.lanes import absolute, load, select, some, store, to_float, vf, vi
from edgert.quantize.rounding.numbers import clip, level, nearest

TINY = np.float32(1e-15)  # below it a sub-block counts as zero


@inline
def extreme(x, at, n):
    """The element of the largest magnitude, with its sign (the first of equals), and that magnitude."""
    value, magnitude = vf(0.0), vf(0.0)
    for i in range(n):
        v = load(x, at + 16 * i)
        a = absolute(v)
        value = select(a > magnitude, v, value)
        magnitude = select(a > magnitude, a, magnitude)
    return value, magnitude


@inline
def symmetric(x, w, at, n, n_max, codes):
    """The best x = scale * code, code in [-n_max, n_max - 1], among nineteen scales; writes the codes."""
    value, magnitude = extreme(x, at, n)
    zero = magnitude < vf(TINY)
    inverse = vf(-n_max) / value
    sum_xl, sum_l2 = vf(0.0), vf(0.0)
    for i in range(n):
        v, weight = load(x, at + 16 * i), load(w, at + 16 * i)
        code = to_float(clip(nearest(inverse * v), -n_max, n_max - 1))
        sum_xl += weight * v * code
        sum_l2 += weight * code * code
    scale = select(sum_l2 != vf(0.0), sum_xl / sum_l2, vf(0.0))
    best = scale * sum_xl
    best_inverse = inverse
    for step in range(-9, 10):
        if step == 0:
            continue
        inverse = vf(-(np.float32(n_max) + np.float32(0.1) * np.float32(step))) / value
        sum_xl, sum_l2 = vf(0.0), vf(0.0)
        for i in range(n):
            v, weight = load(x, at + 16 * i), load(w, at + 16 * i)
            code = to_float(clip(nearest(inverse * v), -n_max, n_max - 1))
            sum_xl += weight * v * code
            sum_l2 += weight * code * code
        better = (sum_l2 > vf(0.0)) & (sum_xl * sum_xl > best * sum_l2)
        new = sum_xl / sum_l2
        scale = select(better, new, scale)
        best = select(better, new * sum_xl, best)
        best_inverse = select(better, inverse, best_inverse)
    for i in range(n):
        code = clip(nearest(best_inverse * load(x, at + 16 * i)), -n_max, n_max - 1)
        store(codes, at + 16 * i, select(zero, vi(-n_max), code))
    return select(zero, vf(0.0), scale)


@inline
def _square(x, _w, place):
    v = load(x, place)
    return v * v


@inline
def _given(_x, w, place):
    return load(w, place)


@inline
def _swept(x, w, weight_at, at, n, low, high, mask, least, active, sum_xl, sum_l2, codes):
    """Moves each code to the best one given all others, in up to five rounds, as long as the error falls.

    weight_at:  weight_at(x, w, place) is the weight of an element
    low, high:  of the codes; mask: the bits of them that are stored
    least:      what the other codes' sum_l2 must exceed
    active:     the lanes that take part
    Returns the weighted sums of x * code and code * code, sum_xl and sum_l2, as they are in the end.
    """
    for _ in range(5):
        changed = active & ~active
        for i in range(n):
            v, weight = load(x, at + 16 * i), weight_at(x, w, at + 16 * i)
            old = load(codes, at + 16 * i)
            xl = sum_xl - weight * v * to_float(old)
            l2 = sum_l2 - weight * to_float(old) * to_float(old)
            new = clip(nearest(v * l2 / xl), low, high)
            moved = active & (xl > vf(0.0)) & (l2 > vf(least)) & (new != old)
            xl = xl + weight * v * to_float(new)
            l2 = l2 + weight * to_float(new) * to_float(new)
            moved = moved & (l2 > vf(0.0)) & (xl * xl * sum_l2 > sum_xl * sum_xl * l2)
            store(codes, at + 16 * i, select(moved, new & vi(mask), old))
            sum_xl = select(moved, xl, sum_xl)
            sum_l2 = select(moved, l2, sum_l2)
            changed = changed | moved
        active = active & changed
        if not some(active):
            break
    return sum_xl, sum_l2


@inline
def settled(x, at, n, n_max, codes):
    """x = scale * code as `symmetric`, weights x * x, improved code by code in up to five rounds."""
    value, magnitude = extreme(x, at, n)
    zero = magnitude < vf(TINY)
    inverse = vf(-n_max) / value
    sum_xl, sum_l2 = vf(0.0), vf(0.0)
    for i in range(n):
        v = load(x, at + 16 * i)
        code = clip(nearest(inverse * v), -n_max, n_max - 1)
        store(codes, at + 16 * i, code)
        sum_xl += v * v * v * to_float(code)
        sum_l2 += v * v * to_float(code) * to_float(code)
    sum_xl, sum_l2 = _swept(x, x, _square, at, n, -n_max, n_max - 1, -1, -np.inf, ~zero, sum_xl, sum_l2, codes)
    for i in range(n):
        store(codes, at + 16 * i, select(zero, vi(-n_max), load(codes, at + 16 * i)))
    return select(zero | (sum_l2 <= vf(0.0)), vf(0.0), sum_xl / sum_l2)


@inline
def asymmetric(x, w, at, n, n_max, first, step, n_steps, mad, codes):
    """The best x = scale * code - minimum, code in [0, n_max], minimum >= 0, of n_steps + 2 inverse scales.

    first, step: the inverse scales tried are (n_max + first + i * step) / (range of x)
    mad:         the error is the mean magnitude and not the mean square
    Returns scale and minimum; writes the codes.
    """
    low = load(x, at)
    high = low
    sum_w = load(w, at)
    sum_x = sum_w * low
    for i in range(1, n):
        v, weight = load(x, at + 16 * i), load(w, at + 16 * i)
        low = select(v < low, v, low)
        high = select(v > high, v, high)
        sum_w += weight
        sum_x += weight * v
    low = select(low > vf(0.0), vf(0.0), low)
    flat = high <= low
    inverse = vf(n_max) / (high - low)
    scale = vf(1.0) / inverse
    best = vf(0.0)
    for i in range(n):
        v, weight = load(x, at + 16 * i), load(w, at + 16 * i)
        difference = scale * to_float(clip(nearest(inverse * (v - low)), 0, n_max)) + low - v
        best += weight * (absolute(difference) if mad else difference * difference)
    best_inverse, best_low = inverse, low
    for k in range(n_steps + 1):
        # `low` is the shift of the best so far: ggml's search moves on from what it has found
        inverse = vf(np.float32(first) + np.float32(step) * np.float32(k) + np.float32(n_max)) / (high - low)
        sum_l, sum_l2, sum_xl = vf(0.0), vf(0.0), vf(0.0)
        for i in range(n):
            v, weight = load(x, at + 16 * i), load(w, at + 16 * i)
            code = to_float(clip(nearest(inverse * (v - low)), 0, n_max))
            sum_l += weight * code
            sum_l2 += weight * code * code
            sum_xl += weight * code * v
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        above = new_low > vf(0.0)
        new_scale = select(above, sum_xl / sum_l2, new_scale)
        new_low = select(above, vf(0.0), new_low)
        error = vf(0.0)
        for i in range(n):
            v, weight = load(x, at + 16 * i), load(w, at + 16 * i)
            difference = new_scale * to_float(clip(nearest(inverse * (v - low)), 0, n_max)) + new_low - v
            error += weight * (absolute(difference) if mad else difference * difference)
        better = (determinant > vf(0.0)) & (error < best)
        best_inverse = select(better, inverse, best_inverse)
        best_low = select(better, low, best_low)
        best = select(better, error, best)
        scale = select(better, new_scale, scale)
        low = select(better, new_low, low)
    for i in range(n):
        code = clip(nearest(best_inverse * (load(x, at + 16 * i) - best_low)), 0, n_max)
        store(codes, at + 16 * i, select(flat, vi(0), code))
    return select(flat, vf(0.0), scale), -low


@inline
def positive(x, w, n, n_max, codes):
    """The best x = scale * code, code in [0, n_max], for n numbers >= 0: nine scales, then code by code.

    x, w:  float32 (16 n), in lanes; codes: int32 (16 n)
    """
    largest = vf(0.0)
    for i in range(n):
        v = load(x, 16 * i)
        largest = select(largest > v, largest, v)
    zero = largest < vf(TINY)
    inverse = vf(n_max) / largest
    scale = vf(1.0) / inverse
    best = vf(0.0)
    for i in range(n):
        v = load(x, 16 * i)
        difference = v - scale * to_float(nearest(inverse * v) & vi(255))
        best += load(w, 16 * i) * difference * difference
    for step in range(-4, 5):
        if step == 0:
            continue
        new = vf(np.float32(0.1) * np.float32(step) + np.float32(n_max)) / largest
        scale = vf(1.0) / new
        error = vf(0.0)
        for i in range(n):
            v = load(x, 16 * i)
            code = nearest(new * v)
            difference = v - scale * to_float(select(code > vi(n_max), vi(n_max), code))
            error += load(w, 16 * i) * difference * difference
        better = error < best
        best = select(better, error, best)
        inverse = select(better, new, inverse)
    sum_xl, sum_l2 = vf(0.0), vf(0.0)
    for i in range(n):
        v, weight = load(x, 16 * i), load(w, 16 * i)
        code = nearest(inverse * v)
        code = select(code > vi(n_max), vi(n_max), code)
        store(codes, 16 * i, code & vi(255))
        sum_xl += weight * v * to_float(code)
        sum_l2 += weight * to_float(code) * to_float(code)
    sum_xl, sum_l2 = _swept(x, w, _given, 0, n, -(1 << 22), n_max, 255, 0.0, ~zero, sum_xl, sum_l2, codes)
    for i in range(n):
        store(codes, 16 * i, select(zero, vi(0), load(codes, 16 * i)))
    return select(zero | (sum_l2 <= vf(0.0)), vf(0.0), sum_xl / sum_l2)


@inline
def levelled(x, w, at, n):
    """The best x = scale * level, levels of IQ4, among sixteen scales."""
    value, magnitude = extreme(x, at, n)
    first = -value / vf(-127.0)
    inverse = vf(1.0) / first
    scale, best = vf(0.0), vf(0.0)
    for step in range(-8, 8):
        if step > -8:
            inverse = vf(step - 127) / value
        sum_qx, sum_q2 = vf(0.0), vf(0.0)
        for i in range(n):
            v, weight = load(x, at + 16 * i), load(w, at + 16 * i)
            q = to_float(level(inverse * v)[1])
            sum_qx += weight * q * v
            sum_q2 += weight * q * q
        found = sum_q2 > vf(0.0)
        if step > -8:
            found = found & (sum_qx * sum_qx > best * sum_q2)
        scale = select(found, sum_qx / sum_q2, scale)
        best = select(found, scale * sum_qx, best)
    return select(magnitude < vf(TINY), vf(0.0), scale)
