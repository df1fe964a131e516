"""Blocks in rows for whoever chooses codes or scales himself: fit, store, pack, unpack.

Arrays of n blocks, here and in all functions:
codes:   int8 (n, block_size)
d, m:    float32 (n,), the numbers that the stored f16 give back
ls, lm:  int32 (n, n_sub)
so that block k holds d[k] ls[k, j] q - m[k] lm[k, j], q = codes[k, i] or its level, j = i // sub_size (see grids.py).
The kernels can be called from Python and from other kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.quantize.blocks import k4_scales, planes
from edgert.quantize.jit import inline, jit
from edgert.quantize.jit.lanes import store, vf
from edgert.quantize.rounding import packing, search
from edgert.quantize.rounding.grids import GRIDS
from edgert.quantize.rounding.kernels import lanes_of, mean_square, method_of, weigh


@inline
def _head_out(d, m, ls, lm, first, n, n_sub, d_lanes, m_lanes, ls_lanes, lm_lanes):
    for k in range(n):
        d[first + k], m[first + k] = d_lanes[k], m_lanes[k]
        for j in range(n_sub):
            ls[first + k, j], lm[first + k, j] = ls_lanes[16 * j + k], lm_lanes[16 * j + k]


@functools.cache
def fitter(name: str, method: str) -> Any:
    """The kernel fit(values, weights, codes, d, m, ls, lm) that chooses what a block stores, and its codes.

    method:   plain (ggml's without weights), weighted (ggml's search under the weights) or search (see search.py)
    values:   float32 (n, block_size)
    weights:  float32 (n, block_size), of the squared error of each element; must not be negative
    """
    grid = GRIDS[name]
    fit = method_of(name, method)
    size, n_sub, searching = grid.block_size, grid.n_sub, method == "search"

    @jit(f"fit.{method}.{name}")
    def kernel(values, weights, codes, d, m, ls, lm):
        staged = np.zeros(16 * size, np.float32)
        x, w, w_ggml = np.empty(16 * size, np.float32), np.empty(16 * size, np.float32), np.empty(16 * size, np.float32)
        d_lanes, m_lanes = np.empty(16, np.float32), np.empty(16, np.float32)
        ls_lanes, lm_lanes = np.empty(16 * n_sub, np.int32), np.empty(16 * n_sub, np.int32)
        codes_lanes, scratch = np.empty(16 * size, np.int8), np.empty(16 * 48, np.float32)
        for first in range(0, len(values), 16):
            n = min(16, len(values) - first)
            for k in range(n):
                staged[k * size : k * size + size] = weights[first + k]
            lanes_of(staged, 0, size, w)
            for k in range(n):
                staged[k * size : k * size + size] = values[first + k]
            lanes_of(staged, 0, size, x)
            if searching:
                weigh(x, w, size, vf(2.0) * mean_square(x, size), w_ggml)
            fit(x, w, w_ggml if searching else w, d_lanes, m_lanes, ls_lanes, lm_lanes, codes_lanes, scratch)
            _head_out(d, m, ls, lm, first, n, n_sub, d_lanes, m_lanes, ls_lanes, lm_lanes)
            for k in range(n):
                for i in range(size):
                    codes[first + k, i] = codes_lanes[16 * i + k]

    return kernel


@functools.cache
def storer(name: str) -> Any:
    """The kernel store(scales, minimums, curvatures, weights, d, m, ls, lm): real scales -> what a block can store.

    scales, minimums:     float32 (n, n_sub), so that x = scale * q - minimum; of formats without one it is not read
    curvatures, weights:  float32 (n, n_sub), of the squared errors of scale and minimum: for codes q and weights w of
                          the elements these are the sums of w q q and of w
    """
    stored, n_sub = search.storer(name), GRIDS[name].n_sub

    @jit(f"store.{name}")
    def kernel(scales, minimums, curvatures, weights, d, m, ls, lm):
        d_lanes, m_lanes = np.empty(16, np.float32), np.empty(16, np.float32)
        ls_lanes, lm_lanes = np.empty(16 * n_sub, np.int32), np.empty(16 * n_sub, np.int32)
        lanes = np.zeros((4, 16 * n_sub), np.float32)
        for first in range(0, len(scales), 16):
            n = min(16, len(scales) - first)
            for k in range(n):
                for j in range(n_sub):
                    lanes[0, 16 * j + k], lanes[1, 16 * j + k] = scales[first + k, j], minimums[first + k, j]
                    lanes[2, 16 * j + k], lanes[3, 16 * j + k] = curvatures[first + k, j], weights[first + k, j]
            new_d, new_m = stored(lanes[0], lanes[1], lanes[2], lanes[3], ls_lanes, lm_lanes)
            store(d_lanes, 0, new_d)
            store(m_lanes, 0, new_m)
            _head_out(d, m, ls, lm, first, n, n_sub, d_lanes, m_lanes, ls_lanes, lm_lanes)

    return kernel


@functools.cache
def packer(name: str) -> Any:
    """The kernel pack(codes, d, m, ls, lm, out) that writes blocks: out uint8 (n, type_size)."""
    grid = GRIDS[name]
    pack = getattr(packing, name.lower())
    size, type_size, n_sub = grid.block_size, grid.format.type_size, grid.n_sub

    @jit(f"pack.{name}")
    def kernel(codes, d, m, ls, lm, out):
        d_lanes, m_lanes = np.zeros(16, np.float32), np.zeros(16, np.float32)
        ls_lanes, lm_lanes = np.zeros(16 * n_sub, np.int32), np.zeros(16 * n_sub, np.int32)
        codes_lanes, packed = np.zeros(16 * size, np.int8), np.empty(16 * type_size, np.uint8)
        for first in range(0, len(codes), 16):
            n = min(16, len(codes) - first)
            for k in range(n):
                d_lanes[k], m_lanes[k] = d[first + k], m[first + k]
                for j in range(n_sub):
                    ls_lanes[16 * j + k], lm_lanes[16 * j + k] = ls[first + k, j], lm[first + k, j]
                for i in range(size):
                    codes_lanes[16 * i + k] = codes[first + k, i]
            pack(codes_lanes, d_lanes, m_lanes, ls_lanes, lm_lanes, packed, 0, type_size)
            for k in range(n):
                out[first + k] = packed[k * type_size : (k + 1) * type_size]

    return kernel


Blocks = tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32], NDArray[np.int32], NDArray[np.int32]]


def unpack(name: str, data: NDArray[np.uint8]) -> Blocks:
    """uint8 (n, type_size) -> codes, d, m, ls, lm."""
    data = np.ascontiguousarray(data).reshape(-1, GRIDS[name].format.type_size)
    n, n_sub = len(data), GRIDS[name].n_sub

    def half(offset: int) -> NDArray[np.float32]:
        return np.ascontiguousarray(data[:, offset : offset + 2]).view("<f2")[:, 0].astype(np.float32)

    def nibbles(start: int, stop: int, run: int) -> NDArray[np.uint8]:
        return planes(data[:, start:stop].reshape(n, -1, run), 4).reshape(n, -1)

    def pairs(start: int) -> NDArray[np.uint8]:
        return planes(data[:, start : start + 64].reshape(n, 2, 32), 2).reshape(n, 256)

    def fifth(offset: int) -> NDArray[np.uint8]:
        return np.unpackbits(data[:, offset : offset + 4], axis=1, bitorder="little") << np.uint8(4)

    codes: NDArray[Any]
    ls: NDArray[Any]
    lm: NDArray[Any]
    ones, zeros = np.ones((n, n_sub), np.int32), np.zeros((n, n_sub), np.int32)
    none = np.zeros(n, np.float32)
    match name:
        case "Q4_0":
            codes, d, m, ls, lm = nibbles(2, 18, 16), half(0), none, ones, ones
        case "Q4_1":
            codes, d, m, ls, lm = nibbles(4, 20, 16), half(0), -half(2), ones, ones
        case "Q5_0":
            codes, d, m, ls, lm = nibbles(6, 22, 16) | fifth(2), half(0), none, ones, ones
        case "Q5_1":
            codes, d, m, ls, lm = nibbles(8, 24, 16) | fifth(4), half(0), -half(2), ones, ones
        case "Q8_0":
            return data[:, 2:].view(np.int8), half(0), none, ones, ones
        case "Q2_K":
            codes, d, m, ls, lm = pairs(16), half(80), half(82), data[:, :16] & 15, data[:, :16] >> 4
        case "Q3_K":
            high = planes(data[:, :32], 1).reshape(n, 256)
            low, top = planes(data[:, 96:104], 4).reshape(n, 16), planes(data[:, 104:108], 2).reshape(n, 16)
            codes, d, m, ls, lm = pairs(32) | high << 2, half(108), none, (low | top << 4).astype(np.int32) - 32, zeros
        case "Q4_K" | "Q5_K":
            scales, minimums = k4_scales(data[:, 4:16])
            codes = nibbles(data.shape[1] - 128, data.shape[1], 32)
            if name == "Q5_K":
                codes = codes | planes(data[:, 16:48], 1).reshape(n, 256) << np.uint8(4)
            d, m, ls, lm = half(0), half(2), scales, minimums
        case "Q6_K":
            codes = nibbles(0, 128, 64) | pairs(128) << np.uint8(4)
            d, m, ls, lm = half(208), none, data[:, 192:208].view(np.int8), zeros
        case "IQ4_NL":
            codes, d, m, ls, lm = nibbles(2, 18, 16), half(0), none, ones, ones
        case "IQ4_XS":
            low, top = planes(data[:, 4:8, None], 4).reshape(n, 8), planes(data[:, 2:4, None], 2).reshape(n, 8)
            codes, d, m, ls, lm = nibbles(8, 136, 16), half(0), none, (low | top << 4).astype(np.int32) - 32, zeros
    return (codes.astype(np.int16) + min(GRIDS[name].low, 0)).astype(np.int8), d, m, ls.astype(np.int32), lm.astype(
        np.int32)  # fmt: skip
