"""GGUF rows -> panels (see `layouts.py`), one kernel for each GGUF type, shared out over the threads by panels.

What a type's blocks hold is told by a `Reader` (see `readers.py`); here it is put into its places. Codes move four at
a time, as 32-bit words: a quad of a row's block goes to place `lane` of its vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.readers import READERS, Reader
from edgert.backends.cpu.layouts import BLOCK, CODEC_OF, CODECS, SUPER, Codec
from edgert.backends.cpu.simd import put_byte, put_u16, put_u32, u16_at, u32_at, word

ARGUMENTS = (
    "source",  # raw GGUF rows, one after the other
    "row_bytes",
    "n_rows",
    "n_cols",
    "out",  # panels
    "first_panel",  # where the first panel goes, and
    "panel_step",  # how far apart the next (2: gate and up alternate)
)

njit = numba.njit(error_model="numpy", forceinline=True)


def build(isa: Isa, format: str) -> Callable[[int, int, int], None]:
    """A kernel that packs one tensor; rows that fill up the last panel stay as `out` had them (zeros)."""
    codec = CODECS[CODEC_OF[format]]
    lanes = isa.lanes
    panel_row = codec.panel_bytes(BLOCK, lanes)
    pack = _float_packer(codec.bits // 8, lanes) if codec.is_float else _packer(READERS[format], codec, isa)

    def repack(thread, n_threads, a):
        n_rows, n_cols = word(a, 2), word(a, 3)
        n_panels = (n_rows + lanes - 1) // lanes
        panel_bytes = n_cols * panel_row // BLOCK
        for p in range(n_panels * thread // n_threads, n_panels * (thread + 1) // n_threads):
            panel = word(a, 4) + (word(a, 5) + p * word(a, 6)) * panel_bytes
            for lane in range(lanes):
                row = p * lanes + lane
                if row < n_rows:
                    pack(word(a, 0) + row * word(a, 1), panel, lane, n_cols)

    return repack


def _float_packer(size: int, lanes: int) -> Any:
    @njit
    def pack(row, panel, lane, n_cols):
        for k in range(n_cols):
            if size == 2:
                put_u16(panel + (k * lanes + lane) * 2, u16_at(row + 2 * k))
            else:
                put_u32(panel + (k * lanes + lane) * 4, u32_at(row + 4 * k))

    return pack


def _packer(reader: Reader, codec: Codec, isa: Isa) -> Any:
    lanes = isa.lanes
    size, per, quad, scale, minimum, above = (
        reader.type_size, reader.block_size // BLOCK, reader.quad, reader.scale, reader.minimum, reader.above
    )  # fmt: skip
    low, high, n_groups, scale_bytes, has_super = (
        codec.low, codec.high, codec.n_groups, codec.scale_bytes, codec.has_super
    )  # fmt: skip
    scales_at, block_bytes, super_bytes = codec.scales_at(lanes), codec.block_bytes(lanes), codec.super_bytes(lanes)
    n_supers = 1 + codec.has_min
    has_minima = codec.has_min and codec.scale != "nibbles"
    flip = 0x80808080 if isa.dot == "vnni" and codec.bits == 8 else 0
    per_super = SUPER // BLOCK
    low_mask = 0x01010101 * ((1 << low) - 1)
    high_mask = 0x01010101 * ((1 << high) - 1)

    @njit
    def put(place, value):
        if scale_bytes == 2:
            put_u16(place, value)
        elif scale_bytes == 1:
            put_byte(place, value)

    @njit
    def pack(row, panel, lane, n_cols):
        for k in range(n_cols // BLOCK):
            source, j, out = row + k // per * size, k % per, panel + k * block_bytes
            if has_super:
                out += k // per_super * super_bytes
                if k % per_super == 0:
                    for i in range(n_supers):
                        put_u16(out + 2 * (i * lanes + lane), above(source, i))
                out += super_bytes
            for v in range(low):
                fields = 0
                for f in range(8 // low):
                    fields |= (quad(source, j, v + low * f) & low_mask) << (low * f)
                put_u32(out + (v * lanes + lane) * 4, fields ^ flip)
            for plane in range(high):
                fields = 0
                for f in range(8 // high):
                    fields |= (quad(source, j, plane * (8 // high) + f) >> low & high_mask) << (high * f)
                put_u32(out + ((low + plane) * lanes + lane) * 4, fields)
            for i in range(n_groups):
                put(out + scales_at + (i * lanes + lane) * scale_bytes, scale(source, j, i))
                if has_minima:
                    put(out + scales_at + ((n_groups + i) * lanes + lane) * scale_bytes, minimum(source, j, i))

    return pack
