"""Looks up the rows of a table for a step's tokens or positions, in whatever layout its panels have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.layouts import BLOCK, CODECS, Codec
from edgert.backends.cpu.simd import byte_at, half_at, put_real, real_of_bits, u16_at, u32_at, word

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
            block = word(a, 2) + (row // lanes * n_blocks + k) * row_bytes
            unpack(block, row % lanes, word(a, 4) + unit * BLOCK * 4, scale)

    return embed


@numba.njit(error_model="numpy", forceinline=True)
def _add(address, index, value):
    put_real(address, index, real_of_bits(u32_at(address + 4 * index)) + value)


def _float_unpacker(codec: Codec, lanes: int, put: Any) -> Any:
    is_f32, is_bf16 = codec.name == "f32", codec.name == "bf16"

    @numba.njit(error_model="numpy", forceinline=True)
    def unpack(block, lane, out, scale):
        for i in range(BLOCK):
            at = i * lanes + lane
            if is_f32:
                value = real_of_bits(u32_at(block + at * 4))
            elif is_bf16:
                value = real_of_bits(u16_at(block + at * 2) << 16)
            else:
                value = half_at(block + at * 2)
            put(out, i, value * scale)

    return unpack


def _code_unpacker(codec: Codec, isa: Isa, put: Any) -> Any:
    lanes, bits, group, has_min, offset = isa.lanes, codec.bits, codec.group, codec.has_min, codec.offset
    table = np.array(codec.table or (0,), np.float32)
    has_table = bool(codec.table)
    scales_at = codec.block_bytes(lanes) - 2 * lanes * (BLOCK // group + has_min)
    signed = bits == 8 and isa.dot != "vnni"

    @numba.njit(error_model="numpy", forceinline=True)
    def unpack(block, lane, out, scale):
        for i in range(BLOCK):
            quad, byte = i // 4, 4 * lane + i % 4
            if bits == 8:
                code = byte_at(block + quad * 4 * lanes + byte)
                if signed:
                    code = (code ^ 128) & 255
            else:
                code = byte_at(block + quad % 4 * 4 * lanes + byte) >> (4 * (quad // 4)) & 15
                if bits == 5:
                    code |= (byte_at(block + 16 * lanes + byte) >> quad & 1) << 4
                if bits == 6:
                    plane = byte_at(block + (4 + quad // 4) * 4 * lanes + byte)
                    code |= (plane >> (2 * (quad % 4)) & 3) << 4
            part = i // group
            d = half_at(block + scales_at + 2 * (part * lanes + lane))
            value = d * (table[code] if has_table else np.float32(code - offset))
            if has_min:
                value += half_at(block + scales_at + 2 * (lanes + lane))
            put(out, i, value * scale)

    return unpack
