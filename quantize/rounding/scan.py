"""Where a search for the numbers of a block begins: a fine scan of real scales, sub-block by sub-block.

The best real numbers are then put into what the format stores: integers of the sub-blocks under f16 numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from edgert.quantize.jit.compiled import inline
from edgert.quantize.jit.lanes import load, select, store, to_float, vf, vi
from edgert.quantize.rounding import fits
from edgert.quantize.rounding.grids import GRIDS
from edgert.quantize.rounding.numbers import clip, level, nearest, rounded

# The scan of scales without a minimum: the largest value goes to the lowest code, and to the highest, times 1 + r.
# name -> first r, last r, steps
_SCANS = {
    "Q4_0": (-0.15, 0.40, 44), "Q5_0": (-0.10, 0.20, 48), "Q8_0": (-0.02, 0.02, 24), "Q3_K": (-0.25, 0.60, 34),
    "Q6_K": (-0.05, 0.08, 32), "IQ4_NL": (-0.15, 0.40, 44), "IQ4_XS": (-0.15, 0.40, 44),
}  # fmt: skip
# The scan with a minimum: the range of the values covers n_max + t codes, and starts u codes above the lowest value.
# name -> first t, last t, steps of t, last u, steps of u
_RANGES = {
    "Q4_1": (-1.2, 3.6, 16, 1.5, 4), "Q5_1": (-1.5, 4.5, 16, 1.5, 4), "Q2_K": (-0.6, 1.6, 16, 0.75, 4),
    "Q4_K": (-1.2, 3.6, 16, 1.5, 4), "Q5_K": (-1.5, 4.5, 16, 1.5, 4),
}  # fmt: skip
_MAGIC = 12582912.0


@inline
def inverse_of(scale):
    return select(scale == vf(0.0), vf(0.0), vf(1.0) / scale)


@functools.cache
def coder(name: str) -> Any:
    """The inlined function code(ratio) of a format: the code nearest to value / scale, as a number."""
    grid = GRIDS[name]
    low, high, levelled = grid.low, grid.high, grid.levelled

    @inline
    def code(ratio):
        if levelled:
            return to_float(level(ratio)[1])
        ratio = select(ratio > vf(high), vf(high), ratio)
        ratio = select(ratio < vf(low), vf(low), ratio)
        return (ratio + vf(_MAGIC)) - vf(_MAGIC)

    return code


@functools.cache
def storer(name: str) -> Any:
    """The inlined function stored(scales, shifts, curvatures, weights, ls, lm) -> (d, m) of a format.

    scales, shifts:       float32 (16 n_sub), in lanes: real numbers of which x = scale * code - shift
    curvatures, weights:  float32 (16 n_sub), of the squared error of a scale and of a shift
    Stores the integers nearest to them under the d and m that suit them best.
    """
    grid = GRIDS[name]
    n_sub, (low, high) = grid.n_sub, grid.scales
    single, minimum_high = grid.scales == (1, 1), grid.minimums[1] if grid.minimums else 0

    @inline
    def stored(scales, shifts, curvatures, weights, ls, lm):
        if single:
            store(ls, 0, vi(1))
            store(lm, 0, vi(1))
            return rounded(load(scales, 0)), -rounded(-load(shifts, 0)) if minimum_high else vf(0.0)
        if minimum_high:
            d = rounded(fits.positive(scales, curvatures, n_sub, high, ls))
            m = rounded(fits.positive(shifts, weights, n_sub, minimum_high, lm))
        else:
            d, m = rounded(fits.symmetric(scales, curvatures, 0, n_sub, -low, ls)), vf(0.0)
        for j in range(n_sub):
            store(ls, 16 * j, clip(nearest(load(scales, 16 * j) * inverse_of(d)), low, high))
            shift = clip(nearest(load(shifts, 16 * j) * inverse_of(m)), 0, minimum_high) if minimum_high else vi(0)
            store(lm, 16 * j, shift)
        return d, m

    return stored


@functools.cache
def scale_scanner(name: str) -> Any:
    """The inlined function scan(x, w, at) -> (scale, curvature) of a format without minimums, for one sub-block.

    A real scale near the best, and the curvature of the error there.
    """
    grid = GRIDS[name]
    code, n = coder(name), grid.sub_size
    first_level, last_level = float(grid.levels[0]), float(grid.levels[-1])
    start, stop, steps = _SCANS[name]
    sides = 1 if name == "Q8_0" else 2

    @inline
    def scan(x, w, at):
        value, magnitude = fits.extreme(x, at, n)
        best, scale, curvature = vf(0.0), vf(0.0), vf(0.0)
        for side in range(sides):
            end = first_level if side == 0 else last_level
            for k in range(steps):
                inverse = vf(end * (1 + start + k * ((stop - start) / (steps - 1)))) / value
                sum_xl, sum_l2 = vf(0.0), vf(0.0)
                for i in range(n):
                    v = load(x, at + 16 * i)
                    q = code(v * inverse)
                    weighted = load(w, at + 16 * i) * q
                    sum_xl += weighted * v
                    sum_l2 += weighted * q
                better = sum_xl * sum_xl > best * sum_l2
                scale = select(better, sum_xl / sum_l2, scale)
                best = select(better, scale * sum_xl, best)
                curvature = select(better, sum_l2, curvature)
        return select(magnitude < vf(fits.TINY), vf(0.0), scale), curvature

    return scan


@functools.cache
def pair_scanner(name: str) -> Any:
    """The inlined function scan(x, w, at) -> (scale, shift, curvature) of a format with minimums, for one sub-block.

    A real scale and shift near the best (x = scale * code - shift), and the curvature of the error along the scale.
    """
    grid = GRIDS[name]
    code, n, high, single = coder(name), grid.sub_size, grid.high, grid.scales == (1, 1)
    t_start, t_stop, t_steps, u_stop, u_steps = _RANGES[name]

    @inline
    def scan(x, w, at):
        least = load(x, at)
        most = least
        sum_w, sum_x, sum_xx = vf(0.0), vf(0.0), vf(0.0)
        for i in range(n):
            v, weight = load(x, at + 16 * i), load(w, at + 16 * i)
            least = select(v < least, v, least)
            most = select(v > most, v, most)
            sum_w += weight
            sum_x += weight * v
            sum_xx += weight * v * v
        if not single:
            least = select(least > vf(0.0), vf(0.0), least)
        span = most - least
        flat = span <= vf(0.0)
        best, scale, low_end, curvature = sum_xx * vf(4.0) + vf(1e-30), vf(0.0), least, vf(0.0)
        for k in range(t_steps * u_steps):
            t = t_start + (k // u_steps) * ((t_stop - t_start) / (t_steps - 1))
            u = (k % u_steps) * (u_stop / max(u_steps - 1, 1))
            inverse = vf(high + t) / span
            offset = least * inverse + vf(u)
            sum_l, sum_l2, sum_xl = vf(0.0), vf(0.0), vf(0.0)
            for i in range(n):
                v, weight = load(x, at + 16 * i), load(w, at + 16 * i)
                q = code(v * inverse - offset)
                weighted = weight * q
                sum_l += weighted
                sum_l2 += weighted * q
                sum_xl += weighted * v
            determinant = sum_w * sum_l2 - sum_l * sum_l
            new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
            new_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
            if not single:
                above = new_low > vf(0.0)
                new_scale = select(above, sum_xl / sum_l2, new_scale)
                new_low = select(above, vf(0.0), new_low)
            error = (
                sum_xx
                - vf(2.0) * (new_scale * sum_xl + new_low * sum_x)
                + new_scale * new_scale * sum_l2
                + vf(2.0) * new_scale * new_low * sum_l
                + new_low * new_low * sum_w
            )
            better = (determinant > vf(0.0)) & (error < best)
            best = select(better, error, best)
            scale = select(better, new_scale, scale)
            low_end = select(better, new_low, low_end)
            curvature = select(better, sum_l2, curvature)
        return select(flat, vf(0.0), scale), -low_end, curvature

    return scan


@functools.cache
def starter(name: str) -> Any:
    """The inlined function start(x, w, ls, lm, scratch) -> (d, m) of a format (arrays as in ggml.py)."""
    grid = GRIDS[name]
    n, n_sub, with_minimum = grid.sub_size, grid.n_sub, grid.minimums is not None
    stored, scan = storer(name), (pair_scanner if with_minimum else scale_scanner)(name)

    @inline
    def start(x, w, ls, lm, scratch):
        weights = np.empty(16 * n_sub, np.float32)
        for j in range(n_sub):
            if with_minimum:
                scale, shift, curvature = scan(x, w, 16 * n * j)
                store(scratch, 16 * j, scale)
                store(scratch, 256 + 16 * j, curvature)
                store(scratch, 512 + 16 * j, shift)
            else:
                scale, curvature = scan(x, w, 16 * n * j)
                store(scratch, 16 * j, scale)
                store(scratch, 256 + 16 * j, curvature)
        if with_minimum:
            for j in range(n_sub):
                total = vf(0.0)
                for i in range(n):
                    total += load(w, 16 * (n * j + i))
                store(weights, 16 * j, total)
        return stored(scratch, scratch[512:], scratch[256:], weights, ls, lm)

    return start
