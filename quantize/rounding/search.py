"""A wider search than ggml's for the numbers that a block stores, under the weights of the squared error alone.

Starts from ggml's result and from a fine scan of real scales, takes the better start block by block, then moves the
stored numbers themselves (integers of the sub-blocks, f16 scale and minimum) as long as the error falls. Codes are
always the nearest under the stored numbers, so that the error never exceeds that of ggml's blocks.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from edgert.quantize.jit import inline
from edgert.quantize.jit.lanes import load, select, store, to_float, to_int, vf, vi
from edgert.quantize.rounding import fits, ggml
from edgert.quantize.rounding.grids import GRIDS, Grid
from edgert.quantize.rounding.numbers import clip, from_half, half_bits, level, nearest, rounded

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
_ROUNDS = 3  # of moving the integers and the f16 numbers
_MAGIC = 12582912.0
_LESS = np.float32(1 - 1e-5)  # an error must fall by more than the rounding of its sum


@inline
def _inverse(scale):
    return select(scale == vf(0.0), vf(0.0), vf(1.0) / scale)


@inline
def _reweighted(w, size, target):
    """Weights that no column is without, since dead ones would leave scales undetermined; too small to weigh else."""
    total = vf(0.0)
    for i in range(size):
        total += load(w, 16 * i)
    least = select(total > vf(0.0), total * vf(1e-9 / size), vf(1.0))
    for i in range(size):
        store(target, 16 * i, load(w, 16 * i) + least)


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
            store(ls, 16 * j, clip(nearest(load(scales, 16 * j) * _inverse(d)), low, high))
            shift = clip(nearest(load(shifts, 16 * j) * _inverse(m)), 0, minimum_high) if minimum_high else vi(0)
            store(lm, 16 * j, shift)
        return d, m

    return stored


def searcher(grid: Grid) -> Any:
    """The inlined function search(x, w, w_ggml, d, m, ls, lm, codes, scratch) of a format (arrays as in ggml.py).

    w:       the weights of the error that is made small
    w_ggml:  the weights that ggml's search would take
    """
    n, n_sub, size = grid.sub_size, grid.n_sub, grid.block_size
    low, high, levelled = grid.low, grid.high, grid.levelled
    first_level, last_level = float(grid.levels[0]), float(grid.levels[-1])
    with_minimum, single = grid.minimums is not None, grid.scales == (1, 1)
    scale_low, scale_high = grid.scales
    minimum_high = grid.minimums[1] if grid.minimums else 0
    start, stop, steps = _SCANS.get(grid.name, (0.0, 0.0, 1))
    t_start, t_stop, t_steps, u_stop, u_steps = _RANGES.get(grid.name, (0.0, 0.0, 1, 0.0, 1))
    sides = 1 if grid.name == "Q8_0" else 2
    stored = storer(grid.name)
    ggmls = getattr(ggml, f"weighted_{grid.name.lower()}", None) or getattr(ggml, f"plain_{grid.name.lower()}")

    @inline
    def code(ratio):
        """The code nearest to value / scale, as a number."""
        if levelled:
            return to_float(level(ratio)[1])
        ratio = select(ratio > vf(high), vf(high), ratio)
        ratio = select(ratio < vf(low), vf(low), ratio)
        return (ratio + vf(_MAGIC)) - vf(_MAGIC)

    @inline
    def error_of(x, w, at, scale, shift):
        """The error of a sub-block whose numbers are scale * code - shift."""
        inverse, total = _inverse(scale), vf(0.0)
        for i in range(n):
            v = load(x, at + 16 * i) + shift
            difference = scale * code(v * inverse) - v
            total += load(w, at + 16 * i) * difference * difference
        return total

    @inline
    def block_error(x, w, d, m, ls, lm):
        total = vf(0.0)
        for j in range(n_sub):
            scale, shift = d * to_float(load(ls, 16 * j)), m * to_float(load(lm, 16 * j))
            total += error_of(x, w, 16 * n * j, scale, shift)
        return total

    @inline
    def scan_scale(x, w, at):
        """A real scale near the best, and its curvature."""
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

    @inline
    def scan_pair(x, w, at):
        """A real scale and shift (x = scale * code - shift) near the best, and the scale's curvature."""
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

    @inline
    def scanned(x, w, ls, lm, scratch):
        """A start from real scales: stores ls and lm, returns d and m."""
        weights = np.empty(16 * n_sub, np.float32)
        for j in range(n_sub):
            if with_minimum:
                scale, shift, curvature = scan_pair(x, w, 16 * n * j)
                store(scratch, 16 * j, scale)
                store(scratch, 256 + 16 * j, curvature)
                store(scratch, 512 + 16 * j, shift)
            else:
                scale, curvature = scan_scale(x, w, 16 * n * j)
                store(scratch, 16 * j, scale)
                store(scratch, 256 + 16 * j, curvature)
        if with_minimum:
            for j in range(n_sub):
                total = vf(0.0)
                for i in range(n):
                    total += load(w, 16 * (n * j + i))
                store(weights, 16 * j, total)
        return stored(scratch, scratch[512:], scratch[256:], weights, ls, lm)

    @inline
    def move_integers(x, w, d, m, ls, lm):
        """Each sub-block's integers to their best neighbours; returns the block's error."""
        total = vf(0.0)
        for j in range(n_sub):
            at = 16 * n * j
            a, b = load(ls, 16 * j), load(lm, 16 * j)
            best_a, best_b = a, b
            best = error_of(x, w, at, d * to_float(a), m * to_float(b))
            for k in range(9 if with_minimum else 3):
                if (k == 4 and with_minimum) or (k == 1 and not with_minimum):
                    continue
                new_a = clip(a + vi(k % 3 - 1), scale_low, scale_high)
                new_b = clip(b + vi(k // 3 - 1), 0, minimum_high) if with_minimum else b
                error = error_of(x, w, at, d * to_float(new_a), m * to_float(new_b))
                better = error < best * vf(_LESS)
                best = select(better, error, best)
                best_a = select(better, new_a, best_a)
                best_b = select(better, new_b, best_b)
            store(ls, 16 * j, best_a)
            store(lm, 16 * j, best_b)
            total += best
        return total

    @inline
    def solved(x, w, d, m, ls, lm):
        """The d and m that are best for the present codes and integers."""
        sum_aa, sum_ab, sum_bb, sum_xa, sum_xb = vf(0.0), vf(0.0), vf(0.0), vf(0.0), vf(0.0)
        for j in range(n_sub):
            a, b = to_float(load(ls, 16 * j)), to_float(load(lm, 16 * j))
            scale, shift = d * a, m * b
            inverse = _inverse(scale)
            for i in range(n * j, n * j + n):
                v, weight = load(x, 16 * i), load(w, 16 * i)
                q = a * code((v + shift) * inverse)
                sum_aa += weight * q * q
                sum_xa += weight * q * v
                if with_minimum:
                    sum_ab += weight * q * b
                    sum_bb += weight * b * b
                    sum_xb += weight * v * b
        alone = sum_xa * _inverse(sum_aa)
        if not with_minimum:
            return alone, vf(0.0)
        determinant = sum_aa * sum_bb - sum_ab * sum_ab
        firm = determinant > sum_aa * sum_bb * vf(1e-6)
        new_d = (sum_bb * sum_xa - sum_ab * sum_xb) / determinant
        new_m = (sum_ab * sum_xa - sum_aa * sum_xb) / determinant
        return select(firm, new_d, alone), select(firm, new_m, m)

    @inline
    def neighbour(value, step):
        return from_half((half_bits(value) + vi(step)) & vi(0xFFFF))

    @inline
    def search(x, w_given, w_ggml, d, m, ls, lm, codes, scratch):
        w, other_ls, other_lm = np.empty_like(x), np.empty_like(ls), np.empty_like(lm)
        _reweighted(w_given, size, w)
        ggmls(x, w_ggml, d, m, ls, lm, codes, scratch)
        best_d, best_m = load(d, 0), load(m, 0)
        best = block_error(x, w, best_d, best_m, ls, lm)
        new_d, new_m = scanned(x, w, other_ls, other_lm, scratch)
        error = block_error(x, w, new_d, new_m, other_ls, other_lm)
        better = error < best * vf(_LESS)
        best = select(better, error, best)
        best_d, best_m = select(better, new_d, best_d), select(better, new_m, best_m)
        for j in range(n_sub):
            store(ls, 16 * j, select(better, load(other_ls, 16 * j), load(ls, 16 * j)))
            store(lm, 16 * j, select(better, load(other_lm, 16 * j), load(lm, 16 * j)))
        for _ in range(_ROUNDS):
            if not single:
                best = move_integers(x, w, best_d, best_m, ls, lm)
            new_d, new_m = solved(x, w, best_d, best_m, ls, lm)
            new_d, new_m = rounded(new_d), rounded(new_m)
            error = block_error(x, w, new_d, new_m, ls, lm)
            better = error < best * vf(_LESS)
            best = select(better, error, best)
            best_d, best_m = select(better, new_d, best_d), select(better, new_m, best_m)
        for step in range(-2, 3):
            new_d = neighbour(best_d, step)
            for other in range(-1, 2 if with_minimum else 0):
                new_m = neighbour(best_m, other) if with_minimum else best_m
                error = block_error(x, w, new_d, new_m, ls, lm)
                better = error < best * vf(_LESS)
                best = select(better, error, best)
                best_d, best_m = select(better, new_d, best_d), select(better, new_m, best_m)
        store(d, 0, best_d)
        store(m, 0, best_m)
        for j in range(n_sub):
            scale, shift = best_d * to_float(load(ls, 16 * j)), best_m * to_float(load(lm, 16 * j))
            inverse = _inverse(scale)
            for i in range(n * j, n * j + n):
                ratio = (load(x, 16 * i) + shift) * inverse
                store(codes, 16 * i, level(ratio)[0] if levelled else to_int(code(ratio)))

    return search
