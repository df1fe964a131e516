"""The compiled loops of error feedback, on sixteen rows at a time, and the matrix products between them.

A slab of rows lies turned: element (row r, column c) at [c, r], so that sixteen rows are one vector and that what a
strip of columns adds to all later ones is one matrix product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.quantize.jit.compiled import inline, jit
from edgert.quantize.jit.lanes import load, select, store, to_float, to_int, vf
from edgert.quantize.rounding import packing
from edgert.quantize.rounding.grids import GRIDS, Grid
from edgert.quantize.rounding.kernels import method_of
from edgert.quantize.rounding.numbers import level

Floats = NDArray[np.float32]
STEP = 16  # columns that pass their errors on together
_MAGIC = np.float32(12582912.0)  # adding it rounds to an integer


class Slab:
    """Rows on their way to a format.

    values:  float32 (n_cols, n), the true ones, turned; n is the number of rows, filled up to sixteens with zeros
    target:  float32 (n_cols, n), what the codes have to meet: the values and what feedback added
    codes:   int8 (n_cols, n)
    d, m:    float32 (n_blocks, n); ls, lm: int8 (n_cols / sub_size, n): what blocks store, see rounding.grids
    """

    def __init__(self, values: Floats, grid: Grid, pool: Executor, n_threads: int) -> None:
        rows, n_cols = values.shape
        n = -(-rows // 16) * 16
        self.grid, self.rows, self.n_cols, self._pool, self._n_threads = grid, rows, n_cols, pool, n_threads
        self.values = np.zeros((n_cols, n), np.float32)
        self.values[:, :rows] = values.T
        self.target = self.values.copy()
        self.codes = np.zeros((n_cols, n), np.int8)
        n_blocks = n_cols // grid.block_size
        self.d, self.m = np.zeros((n_blocks, n), np.float32), np.zeros((n_blocks, n), np.float32)
        self.ls = np.zeros((n_cols // grid.sub_size, n), np.int8)
        self.lm = np.zeros_like(self.ls)

    def _units(self, run: Callable[[int, int], object]) -> None:
        """Calls run(first, last) for ranges of units of sixteen rows, in threads."""
        n_units = self.values.shape[1] // 16
        step = max(1, -(-n_units // (4 * self._n_threads)))
        run(0, min(step, n_units))  # compiles, once
        list(self._pool.map(lambda first: run(first, min(first + step, n_units)), range(step, n_units, step)))

    def _strips(self, width: int) -> list[tuple[int, int]]:
        width = max(width, self.grid.block_size)
        return [(start, min(start + width, self.n_cols)) for start in range(0, self.n_cols, width)]

    def feed(self, gains: Floats | None, weights: Floats, width: int) -> None:
        """Fits blocks and chooses codes from the first column to the last. Afterwards `target` is used up.

        gains:  None: no column makes up for others
        """
        kernel = feeder(self.grid.name)
        strips = self._strips(width)
        longest = max(stop - start for start, stop in strips)
        local = np.zeros((longest, longest), np.float32) if gains is None else gains
        for start, stop in strips:
            errors = np.empty((stop - start, self.values.shape[1]), np.float32)
            corner = 0 if gains is None else start

            def run(first: int, last: int, start: int = start, corner: int = corner, errors: Floats = errors) -> None:
                kernel(self.values, self.target, local, corner, weights, start, errors, self.codes, self.d, self.m,
                       self.ls, self.lm, first, last)  # fmt: skip

            self._units(run)
            if stop < self.n_cols and gains is not None:
                self.target[stop:] += gains[start:stop, stop:].T @ errors

    def sweep(self, hessian: Floats, width: int) -> bool:
        """Moves each code to the best one given all others; whether any moved."""
        numbers = number_kernel(self.grid.name)
        off = self.target  # not needed any more: the rounded values less the true ones
        self._units(lambda first, last: numbers(self.values, off, self.codes, self.d, self.m, self.ls, self.lm, first,
                                                last))  # fmt: skip
        gradient = hessian @ off
        kernel = sweeper(self.grid.name)
        moved = False
        for start, stop in self._strips(width):
            steps = np.empty((stop - start, self.values.shape[1]), np.float32)

            def run(first: int, last: int, start: int = start, steps: Floats = steps) -> None:
                kernel(self.values, gradient, hessian, start, steps, self.codes, self.d, self.m, self.ls, self.lm,
                       first, last)  # fmt: skip

            self._units(run)
            if steps.any():
                moved = True
                if stop < self.n_cols:
                    gradient[stop:] += hessian[stop:, start:stop] @ steps
        return moved

    def pack(self, out: NDArray[np.uint8]) -> None:
        """Writes the blocks: uint8 (rows, row_bytes)."""
        kernel = row_packer(self.grid.name)
        self._units(lambda first, last: kernel(self.codes, self.d, self.m, self.ls, self.lm, out, first, last))


@inline
def _pass_on(errors, done, taken, local, gains, row, start, stop):
    """local[k] += errors[i] gains[row + i, start + k] for i in [done, taken), k in [taken, stop): lanes throughout."""
    k = taken
    while k + 4 <= stop:
        a, b, c, e = load(local, 16 * k), load(local, 16 * k + 16), load(local, 16 * k + 32), load(local, 16 * k + 48)
        for i in range(done, taken):
            error = load(errors, 16 * i)
            a += error * vf(gains[row + i, start + k])
            b += error * vf(gains[row + i, start + k + 1])
            c += error * vf(gains[row + i, start + k + 2])
            e += error * vf(gains[row + i, start + k + 3])
        store(local, 16 * k, a)
        store(local, 16 * k + 16, b)
        store(local, 16 * k + 32, c)
        store(local, 16 * k + 48, e)
        k += 4
    while k < stop:
        a = load(local, 16 * k)
        for i in range(done, taken):
            a += load(errors, 16 * i) * vf(gains[row + i, start + k])
        store(local, 16 * k, a)
        k += 1


@functools.cache
def _coder(name: str) -> Any:
    """The inlined function code(value, scale, shift) -> (code, number), all lanes: number = scale * code - shift."""
    grid = GRIDS[name]
    low, high, levelled = grid.low, grid.high, grid.levelled

    @inline
    def code(value, scale, shift):
        inverse = select(scale == vf(0.0), vf(0.0), vf(1.0) / scale)
        ratio = (value + shift) * inverse
        if levelled:
            index, found = level(ratio)
            return index, scale * to_float(found)
        ratio = select(ratio > vf(high), vf(high), ratio)
        ratio = select(ratio < vf(low), vf(low), ratio)
        ratio = (ratio + vf(_MAGIC)) - vf(_MAGIC)
        return to_int(ratio), scale * ratio - shift

    return code


@functools.cache
def _number(name: str) -> Any:
    """The inlined function number(code, scale, shift): what a code stands for."""
    grid = GRIDS[name]
    levelled, levels = grid.levelled, grid.levels

    @inline
    def number(code, scale, shift):
        if levelled:
            found = vf(levels[0])
            for k in range(1, 16):
                found = select(to_float(code) == vf(k), vf(levels[k]), found)
            return scale * found
        return scale * to_float(code) - shift

    return number


@functools.cache
def feeder(name: str) -> Any:
    """The kernel of Slab.feed for the columns from `start` on, as many as `errors` has.

    corner: the row and column of `gains` that belong to the first of them
    """
    grid = GRIDS[name]
    fit, code = method_of(name, "search"), _coder(name)
    size, n, n_sub = grid.block_size, grid.sub_size, grid.n_sub

    @jit(f"feed.{name}")
    def kernel(values, target, gains, corner, weights, start, errors, codes, d, m, ls, lm, first, last):
        width = len(errors)
        local, wrong, w = np.empty(16 * width, np.float32), np.empty(16 * width, np.float32), np.empty(
            16 * width, np.float32)  # fmt: skip
        d_, m_ = np.empty(16, np.float32), np.empty(16, np.float32)
        ls_, lm_ = np.empty(16 * n_sub, np.int32), np.empty(16 * n_sub, np.int32)
        codes_, scratch = np.empty(16 * size, np.int8), np.empty(16 * 48, np.float32)
        flat, true = target.reshape(-1), values.reshape(-1)
        all_errors, all_codes = errors.reshape(-1), codes.reshape(-1)
        all_d, all_m, all_ls, all_lm = d.reshape(-1), m.reshape(-1), ls.reshape(-1), lm.reshape(-1)
        rows = values.shape[1]
        for i in range(width):
            store(w, 16 * i, vf(weights[start + i]))
        for unit in range(first, last):
            for i in range(width):
                store(local, 16 * i, load(flat, (start + i) * rows + 16 * unit))
            for at in range(0, width, size):
                block = (start + at) // size
                fit(local[16 * at :], w[16 * at :], w[16 * at :], d_, m_, ls_, lm_, codes_, scratch)
                store(all_d, block * rows + 16 * unit, load(d_, 0))
                store(all_m, block * rows + 16 * unit, load(m_, 0))
                for j in range(n_sub):
                    place = (block * n_sub + j) * rows + 16 * unit
                    store(all_ls, place, load(ls_, 16 * j))
                    store(all_lm, place, load(lm_, 16 * j))
                    scale, shift = load(d_, 0) * to_float(load(ls_, 16 * j)), load(m_, 0) * to_float(load(lm_, 16 * j))
                    for done in range(at + j * n, at + j * n + n, STEP):
                        for i in range(done, done + STEP):
                            place = (start + i) * rows + 16 * unit
                            chosen, number = code(load(local, 16 * i), scale, shift)
                            store(all_codes, place, chosen)
                            error = load(true, place) - number
                            store(wrong, 16 * i, error)
                            store(all_errors, i * rows + 16 * unit, error)
                            for k in range(i + 1, done + STEP):
                                store(local, 16 * k, load(local, 16 * k) + error * vf(gains[corner + i, corner + k]))
                        _pass_on(wrong, done, done + STEP, local, gains, corner, corner, width)

    return kernel


@functools.cache
def number_kernel(name: str) -> Any:
    """The kernel that writes to `off` how far the rounded values are from the true ones."""
    grid = GRIDS[name]
    number, size, n = _number(name), grid.block_size, grid.sub_size

    @jit(f"numbers.{name}")
    def kernel(values, off, codes, d, m, ls, lm, first, last):
        true, flat, all_codes = values.reshape(-1), off.reshape(-1), codes.reshape(-1)
        all_d, all_m, all_ls, all_lm = d.reshape(-1), m.reshape(-1), ls.reshape(-1), lm.reshape(-1)
        n_cols, rows = values.shape
        for c in range(n_cols):
            for unit in range(first, last):
                at = c * rows + 16 * unit
                block, sub = c // size * rows + 16 * unit, c // n * rows + 16 * unit
                scale = load(all_d, block) * to_float(load(all_ls, sub))
                shift = load(all_m, block) * to_float(load(all_lm, sub))
                store(flat, at, number(load(all_codes, at), scale, shift) - load(true, at))

    return kernel


@functools.cache
def sweeper(name: str) -> Any:
    """The kernel of Slab.sweep for the columns from `start` on, as many as `steps` has."""
    grid = GRIDS[name]
    code, number, size, n = _coder(name), _number(name), grid.block_size, grid.sub_size

    @jit(f"sweep.{name}")
    def kernel(values, gradient, hessian, start, steps, codes, d, m, ls, lm, first, last):
        width = len(steps)
        local, moves = np.empty(16 * width, np.float32), np.empty(16 * width, np.float32)
        slopes, all_steps, all_codes = gradient.reshape(-1), steps.reshape(-1), codes.reshape(-1)
        all_d, all_m, all_ls, all_lm = d.reshape(-1), m.reshape(-1), ls.reshape(-1), lm.reshape(-1)
        rows = values.shape[1]
        for unit in range(first, last):
            for i in range(width):
                store(local, 16 * i, load(slopes, (start + i) * rows + 16 * unit))
            for done in range(0, width, STEP):
                for i in range(done, done + STEP):
                    c = start + i
                    at, block, sub = c * rows + 16 * unit, c // size * rows + 16 * unit, c // n * rows + 16 * unit
                    scale = load(all_d, block) * to_float(load(all_ls, sub))
                    shift = load(all_m, block) * to_float(load(all_lm, sub))
                    old = number(load(all_codes, at), scale, shift)
                    best, new = code(old - load(local, 16 * i) * vf(np.float32(1) / hessian[c, c]), scale, shift)
                    store(all_codes, at, best)
                    move = new - old
                    store(moves, 16 * i, move)
                    store(all_steps, i * rows + 16 * unit, move)
                    for k in range(i + 1, done + STEP):
                        store(local, 16 * k, load(local, 16 * k) + move * vf(hessian[c, start + k]))
                _pass_on(moves, done, done + STEP, local, hessian, start, start, width)

    return kernel


@functools.cache
def row_packer(name: str) -> Any:
    """The kernel of Slab.pack."""
    grid = GRIDS[name]
    pack = getattr(packing, name.lower())
    size, type_size, n_sub = grid.block_size, grid.format.type_size, grid.n_sub

    @jit(f"pack_rows.{name}")
    def kernel(codes, d, m, ls, lm, out, first, last):
        d_, m_ = np.empty(16, np.float32), np.empty(16, np.float32)
        ls_, lm_ = np.empty(16 * n_sub, np.int32), np.empty(16 * n_sub, np.int32)
        codes_, packed = np.empty(16 * size, np.int8), np.empty(16 * type_size, np.uint8)
        for unit in range(first, last):
            at, n = 16 * unit, min(16, len(out) - 16 * unit)
            for block in range(len(d)):
                for k in range(16):
                    d_[k], m_[k] = d[block, at + k], m[block, at + k]
                    for j in range(n_sub):
                        ls_[16 * j + k] = ls[block * n_sub + j, at + k]
                        lm_[16 * j + k] = lm[block * n_sub + j, at + k]
                for i in range(size):
                    for k in range(16):
                        codes_[16 * i + k] = codes[block * size + i, at + k]
                pack(codes_, d_, m_, ls_, lm_, packed, 0, type_size)
                for k in range(n):
                    for i in range(type_size):
                        out[at + k, block * type_size + i] = packed[k * type_size + i]

    return kernel
