"""Looks up the rows of a table for a step's tokens or positions, in whatever layout its panels have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.layouts import BLOCK, CODECS, SUPER, Codec
from edgert.backends.cpu.simd import byte_at, half_at, put_real, real_of_bits, u16_at, u32_at, word

PER_SUPER = SUPER // BLOCK  # blocks

ARGUMENTS = (
    "tokens",  # int64 (n_tokens), or their positions
    "n_tokens_at",
    "weights",  # panels of the embedding
    "n_cols",
    "x",  # float32 (n_tokens, n_cols)
    "scale",  # float32 bits
)


def build(isa: Isa, codec: str, adds: str = "no") -> Callable[[int, int, int], None]:
    """Units of work are (token, block of 32).

    adds:  "yes": rows are added to what is in x
    """
    kind = CODECS[codec]
    put = _add if adds == "yes" else put_real
    lanes = isa.lanes
    row_bytes = kind.panel_bytes(BLOCK, lanes)
    unpack = _float_unpacker(kind, lanes, put) if kind.is_float else _code_unpacker(kind, isa, put)

    def embed(thread, n_threads, a):
        n_blocks = word(a, 3) // BLOCK
        n_units = word(word(a, 1), 0) * n_blocks
        scale = real_of_bits(word(a, 5))
        for unit in range(n_units * thread // n_threads, n_units * (thread + 1) // n_threads):
            token = unit // n_blocks
            k = unit - token * n_blocks
            row = word(word(a, 0), token)
            panel = word(a, 2) + row // lanes * n_blocks * row_bytes
            unpack(panel, k, row % lanes, word(a, 4) + unit * BLOCK * 4, scale)

    return embed


@numba.njit(error_model="numpy", forceinline=True)
def _add(address, index, value):
    put_real(address, index, real_of_bits(u32_at(address + 4 * index)) + value)


def _float_unpacker(codec: Codec, lanes: int, put: Any) -> Any:
    is_f32, is_bf16 = codec.name == "f32", codec.name == "bf16"

    @numba.njit(error_model="numpy", forceinline=True)
    def unpack(panel, k, lane, out, scale):
        for i in range(BLOCK):
            at = (k * BLOCK + i) * lanes + lane
            if is_f32:
                value = real_of_bits(u32_at(panel + at * 4))
            elif is_bf16:
                value = real_of_bits(u16_at(panel + at * 2) << 16)
            else:
                value = half_at(panel + at * 2)
            put(out, i, value * scale)

    return unpack


def _code_unpacker(codec: Codec, isa: Isa, put: Any) -> Any:
    lanes, low, high, group = isa.lanes, codec.low, codec.high, codec.group
    has_min, offset = codec.has_min, codec.offset
    table = np.array(codec.table or (0,), np.float32)
    has_table, has_super = bool(codec.table), codec.has_super
    kind, unit, n_groups = codec.scale, np.float32(codec.unit), codec.n_groups
    scales_at, scale_bytes = codec.scales_at(lanes), codec.scale_bytes
    block_bytes, super_bytes = codec.block_bytes(lanes), codec.super_bytes(lanes)
    flip = 128 if codec.bits == 8 and isa.dot != "vnni" else 0

    @numba.njit(error_model="numpy", forceinline=True)
    def scale_at(block, lane, i):
        """Scale i of a block; its minima follow its scales."""
        if kind == "super":
            return np.float32(1)
        if kind == "nibbles":
            return np.float32(byte_at(block + scales_at + i % n_groups * lanes + lane) >> (i // n_groups * 4) & 15)
        place = block + scales_at + (i * lanes + lane) * scale_bytes
        if kind == "f16":
            return half_at(place)
        if kind == "e8m0":
            return real_of_bits(byte_at(place) << 23)
        return np.float32((byte_at(place) ^ 128) - 128)

    @numba.njit(error_model="numpy", forceinline=True)
    def unpack(panel, k, lane, out, scale):
        block = panel + k * block_bytes
        d, m = unit, np.float32(1)
        if has_super:
            head = panel + k // PER_SUPER * (PER_SUPER * block_bytes + super_bytes)
            block += (k // PER_SUPER + 1) * super_bytes
            d *= half_at(head + 2 * lane)
            if has_min:
                m = half_at(head + 2 * (lanes + lane))
        for i in range(BLOCK):
            quad, byte, part = i // 4, 4 * lane + i % 4, i // group
            code = byte_at(block + quad % low * 4 * lanes + byte) >> (quad // low * low) & ((1 << low) - 1)
            if high:
                apart = byte_at(block + (low + quad * high // 8) * 4 * lanes + byte) >> (quad * high % 8)
                code |= (apart & ((1 << high) - 1)) << low
            code ^= flip
            value = d * scale_at(block, lane, part) * (table[code] if has_table else np.float32(code - offset))
            if has_min:
                value += m * scale_at(block, lane, n_groups + part)
            put(out, i, value * scale)

    return unpack
