"""The compiled loops over units of sixteen blocks; one kernel for each format and method, compiled at first use."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from edgert.quantize.jit.compiled import inline, jit
from edgert.quantize.jit.lanes import array_at, load, local, root, some, store, turn, types, vf
from edgert.quantize.rounding import ggml, packing, search
from edgert.quantize.rounding.grids import GRIDS


@inline
def lanes_of(values, at, size, target):
    """float32 (16, size) from values[at] on -> lanes."""
    for i in range(0, size, 16):
        turn(values, at + i, size, target, 16 * i)


@inline
def weigh(x, w, size, sigma2, target):
    """ggml's weights: the importance times the root of a mean square plus the element's own square."""
    for i in range(size):
        v = load(x, 16 * i)
        store(target, 16 * i, load(w, 16 * i) * root(sigma2 + v * v))


@inline
def mean_square(x, size):
    total = vf(0.0)
    for i in range(size):
        v = load(x, 16 * i)
        total += v * v
    return total / vf(size)


def method_of(name: str, method: str) -> Any:
    """The fit(x, w, w_ggml, d, m, ls, lm, codes, scratch) of a format: plain, weighted or search.

    w: the weights of the error, which search makes small; w_ggml: what ggml weighs with (Q8_0: nothing)
    """
    if method == "search":
        return search.searcher(name)
    fit = getattr(ggml, f"{method}_{name.lower()}", None) or getattr(ggml, f"plain_{name.lower()}")

    @inline
    def ggmls(x, w, w_ggml, d, m, ls, lm, codes, scratch):
        fit(x, w_ggml, d, m, ls, lm, codes, scratch)

    return ggmls


@inline
def _finite(x, size, d, m):
    """Whether the values and the stored scales of a unit are all finite."""
    total = (load(d, 0) - load(d, 0)) + (load(m, 0) - load(m, 0))
    for i in range(size):
        total += load(x, 16 * i) - load(x, 16 * i)
    return not some(total != vf(0.0))


def _loop(name: str, method: str) -> Any:
    """The function (values, importance, sigma2, out, block, row_blocks, n_units) -> unit of a format.

    method:      plain, weighted (ggml's use of importance) or search
    values:      float32 (16 * n_units * block_size,)
    importance:  float32 (row_blocks * block_size,); not read by plain
    sigma2:      float32 (rows,), the mean squares of the rows, where the format's weights need them
    out:         uint8 (16 * n_units * type_size,)
    block:       the index in the tensor of the first block
    Returns the first unit whose values, or whose scales in f16, are not finite; n_units where there is none.
    """
    grid = GRIDS[name]
    fit, pack = method_of(name, method), getattr(packing, name.lower())
    size, type_size, n_sub = grid.block_size, grid.format.type_size, grid.n_sub
    weighted = method != "plain"
    spread, times = grid.spread or ("", 0)

    x_, w_, ggml_ = (local(16 * size, types.float32) for _ in range(3))
    d_, m_, scratch_ = (local(n, types.float32) for n in (16, 16, 16 * 48))
    ls_, lm_, codes_ = local(16 * n_sub, types.int32), local(16 * n_sub, types.int32), local(16 * size, types.int8)

    def kernel(values, importance, sigma2, out, block, row_blocks, n_units):
        x, w, w_ggml, d, m, ls, lm, codes, scratch = x_(), w_(), ggml_(), d_(), m_(), ls_(), lm_(), codes_(), scratch_()
        bad = n_units
        for unit in range(n_units):
            lanes_of(values, 16 * unit * size, size, x)
            if weighted:
                for k in range(16):
                    row, column = divmod(block + 16 * unit + k, row_blocks)
                    for i in range(0, size, 16):
                        store(w_ggml, k * size + i, load(importance, column * size + i))
                    if spread == "row":
                        scratch[k] = sigma2[row]
                lanes_of(w_ggml, 0, size, w)
                if spread == "row":
                    weigh(x, w, size, load(scratch, 0), w_ggml)
                elif spread == "block":
                    weigh(x, w, size, vf(times) * mean_square(x, size), w_ggml)
                else:
                    for i in range(size):
                        store(w_ggml, 16 * i, load(w, 16 * i))
            fit(x, w, w_ggml, d, m, ls, lm, codes, scratch)
            pack(codes, d, m, ls, lm, out, 16 * unit * type_size, type_size)
            if bad == n_units and not _finite(x, size, d, m):
                bad = unit
        return bad

    return kernel


@functools.cache
def quantizer(name: str, method: str) -> Any:
    """The kernel of a format and of what takes importance, as `_loop` has it."""
    return jit(f"{method}.{name}")(_loop(name, method))


def build(name: str) -> Any:
    """The kernel `plain.FORMAT` for `jit.objects`."""
    loop = inline(_loop(name.removeprefix("plain."), "plain"))
    words, floats, bytes_ = (array_at(kind) for kind in (types.int64, types.float32, types.uint8))

    def kernel(address):
        a, n = words(address, 7), 1 << 40  # places are not checked
        return loop(floats(a[0], n), floats(a[1], n), floats(a[2], n), bytes_(a[3], n), a[4], a[5], a[6])

    return kernel


@jit("mean_squares")
def mean_squares(values, out):
    """float32 (rows, n_cols) -> the mean square of each row, summed in order, eight rows at a time."""
    rows, n_cols = values.shape
    for row in range(0, rows, 8):
        r0, r1, r2, r3, r4, r5, r6, r7 = (min(row, rows - 1), min(row + 1, rows - 1), min(row + 2, rows - 1),
            min(row + 3, rows - 1), min(row + 4, rows - 1), min(row + 5, rows - 1), min(row + 6, rows - 1),
            min(row + 7, rows - 1))  # fmt: skip
        s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
        for i in range(n_cols):
            s0 += values[r0, i] * values[r0, i]
            s1 += values[r1, i] * values[r1, i]
            s2 += values[r2, i] * values[r2, i]
            s3 += values[r3, i] * values[r3, i]
            s4 += values[r4, i] * values[r4, i]
            s5 += values[r5, i] * values[r5, i]
            s6 += values[r6, i] * values[r6, i]
            s7 += values[r7, i] * values[r7, i]
        sums = (s0, s1, s2, s3, s4, s5, s6, s7)
        for k in range(min(8, rows - row)):
            out[row + k] = sums[k] / np.float32(n_cols)
