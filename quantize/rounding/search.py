"""A wider search than ggml's for the numbers that a block stores, under the weights of the squared error alone.

Starts from ggml's result and from a fine scan of real scales, takes the better start block by block, then moves the
stored numbers themselves (integers of the sub-blocks, f16 scale and minimum) as long as the error falls. Codes are
always the nearest under the stored numbers, so that the error never exceeds that of ggml's blocks.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from edgert.quantize.jit.compiled import inline
from edgert.quantize.jit.lanes import load, select, store, to_float, to_int, vf, vi
from edgert.quantize.rounding import ggml
from edgert.quantize.rounding.grids import GRIDS
from edgert.quantize.rounding.numbers import clip, from_half, half_bits, level, rounded
from edgert.quantize.rounding.scan import coder, inverse_of, starter

_ROUNDS = 3  # of moving the integers and the f16 numbers
_LESS = np.float32(1 - 1e-5)  # an error must fall by more than the rounding of its sum


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
def judge(name: str) -> tuple[Any, Any]:
    """The inlined functions error_of(x, w, at, scale, shift) and block_error(x, w, d, m, ls, lm) of a format.

    The weighted squared error of a sub-block whose numbers are scale * code - shift, and of a block.
    """
    grid = GRIDS[name]
    code, n, n_sub = coder(name), grid.sub_size, grid.n_sub

    @inline
    def error_of(x, w, at, scale, shift):
        inverse, total = inverse_of(scale), vf(0.0)
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

    return error_of, block_error


@functools.cache
def mover(name: str) -> Any:
    """The inlined function move_integers(x, w, d, m, ls, lm) -> error of the block, of a format.

    Moves the integers of each sub-block to their best neighbours.
    """
    grid = GRIDS[name]
    error_of, n, n_sub, with_minimum = judge(name)[0], grid.sub_size, grid.n_sub, grid.minimums is not None
    scale_low, scale_high = grid.scales
    minimum_high = grid.minimums[1] if grid.minimums else 0

    @inline
    def move_integers(x, w, d, m, ls, lm):
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

    return move_integers


@functools.cache
def solver(name: str) -> Any:
    """The inlined function solved(x, w, d, m, ls, lm) -> (d, m), the best for the present codes and integers."""
    grid = GRIDS[name]
    code, n, n_sub, with_minimum = coder(name), grid.sub_size, grid.n_sub, grid.minimums is not None

    @inline
    def solved(x, w, d, m, ls, lm):
        sum_aa, sum_ab, sum_bb, sum_xa, sum_xb = vf(0.0), vf(0.0), vf(0.0), vf(0.0), vf(0.0)
        for j in range(n_sub):
            a, b = to_float(load(ls, 16 * j)), to_float(load(lm, 16 * j))
            scale, shift = d * a, m * b
            inverse = inverse_of(scale)
            for i in range(n * j, n * j + n):
                v, weight = load(x, 16 * i), load(w, 16 * i)
                q = a * code((v + shift) * inverse)
                sum_aa += weight * q * q
                sum_xa += weight * q * v
                if with_minimum:
                    sum_ab += weight * q * b
                    sum_bb += weight * b * b
                    sum_xb += weight * v * b
        alone = sum_xa * inverse_of(sum_aa)
        if not with_minimum:
            return alone, vf(0.0)
        determinant = sum_aa * sum_bb - sum_ab * sum_ab
        firm = determinant > sum_aa * sum_bb * vf(1e-6)
        new_d = (sum_bb * sum_xa - sum_ab * sum_xb) / determinant
        new_m = (sum_ab * sum_xa - sum_aa * sum_xb) / determinant
        return select(firm, new_d, alone), select(firm, new_m, m)

    return solved


@inline
def _neighbour(value, step):
    return from_half((half_bits(value) + vi(step)) & vi(0xFFFF))


@functools.cache
def searcher(name: str) -> Any:
    """The inlined function search(x, w, w_ggml, d, m, ls, lm, codes, scratch) of a format (arrays as in ggml.py).

    w:       the weights of the error that is made small
    w_ggml:  the weights that ggml's search would take
    """
    grid = GRIDS[name]
    n, n_sub, size = grid.sub_size, grid.n_sub, grid.block_size
    with_minimum, single, levelled = grid.minimums is not None, grid.scales == (1, 1), grid.levelled
    code, start, move_integers, solved = coder(name), starter(name), mover(name), solver(name)
    block_error = judge(name)[1]
    ggmls = getattr(ggml, f"weighted_{name.lower()}", None) or getattr(ggml, f"plain_{name.lower()}")

    @inline
    def search(x, w_given, w_ggml, d, m, ls, lm, codes, scratch):
        w, other_ls, other_lm = np.empty_like(x), np.empty_like(ls), np.empty_like(lm)
        _reweighted(w_given, size, w)
        ggmls(x, w_ggml, d, m, ls, lm, codes, scratch)
        best_d, best_m = load(d, 0), load(m, 0)
        best = block_error(x, w, best_d, best_m, ls, lm)
        new_d, new_m = start(x, w, other_ls, other_lm, scratch)
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
            new_d = _neighbour(best_d, step)
            for other in range(-1, 2 if with_minimum else 0):
                new_m = _neighbour(best_m, other) if with_minimum else best_m
                error = block_error(x, w, new_d, new_m, ls, lm)
                better = error < best * vf(_LESS)
                best = select(better, error, best)
                best_d, best_m = select(better, new_d, best_d), select(better, new_m, best_m)
        store(d, 0, best_d)
        store(m, 0, best_m)
        for j in range(n_sub):
            scale, shift = best_d * to_float(load(ls, 16 * j)), best_m * to_float(load(lm, 16 * j))
            inverse = inverse_of(scale)
            for i in range(n * j, n * j + n):
                ratio = (load(x, 16 * i) + shift) * inverse
                store(codes, 16 * i, level(ratio)[0] if levelled else to_int(code(ratio)))

    return search
