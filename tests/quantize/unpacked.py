"""Blocks taken apart, for tests that look at what a block stores."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.quantize.blocks import k4_scales, planes
from edgert.quantize.rounding.grids import GRIDS

Blocks = tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32], NDArray[np.int32], NDArray[np.int32]]


def unpack(name: str, data: NDArray[np.uint8]) -> Blocks:
    """uint8 (n, type_size) -> codes int8 (n, block_size), d, m float32 (n,), ls, lm int32 (n, n_sub); see grids.py.

    Block k holds d[k] ls[k, j] q - m[k] lm[k, j], q = codes[k, i] or its level, j = i // sub_size.
    """
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
