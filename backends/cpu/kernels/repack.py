"""GGUF rows -> panels (see `layouts.py`), one kernel for each GGUF type, shared out over the threads by panels.

Codes move four at a time, as 32-bit words: word v of a row's block goes to place `lane` of vector v.
Source of the block formats: ggml-common.h of ggml; the same as in `quantize/formats.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.layouts import BLOCK, CODEC_OF, CODECS
from edgert.backends.cpu.simd import byte_at, half_at, put_half, put_u16, put_u32, u16_at, u32_at, word

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
    if codec.is_float:
        pack = _float_packer(codec.bits // 8, lanes)
    else:
        flip = 0x80808080 if isa.dot == "vnni" and codec.bits == 8 else 0
        scales_at = codec.block_bytes(lanes) - 2 * lanes * (BLOCK // codec.group + codec.has_min)
        pack = _PACKERS[format](lanes, codec.block_bytes(lanes), scales_at, flip)

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


def _simple_packer(
    has_min: bool, has_high: bool, is_byte: bool, lanes: int, block_bytes: int, scales_at: int, flip: int
) -> Any:
    """Formats of 32 weights: float16 scale (and minimum), 32 high bits, then the codes."""
    codes_at = 2 + 2 * has_min + 4 * has_high
    words = 8 if is_byte else 4
    size = codes_at + 4 * words

    @njit
    def pack(row, panel, lane, n_cols):
        for k in range(n_cols // BLOCK):
            source, out = row + k * size, panel + k * block_bytes
            for v in range(words):
                put_u32(out + (v * lanes + lane) * 4, u32_at(source + codes_at + 4 * v) ^ flip)
            if has_high:
                bits = u32_at(source + codes_at - 4)
                plane = 0
                for quad in range(8):  # four bits -> the lowest bits of four bytes
                    plane |= (((bits >> (4 * quad)) & 15) * 0x00204081 & 0x01010101) << quad
                put_u32(out + (4 * lanes + lane) * 4, plane)
            put_u16(out + scales_at + 2 * lane, u16_at(source))
            if has_min:
                put_u16(out + scales_at + 2 * (lanes + lane), u16_at(source + 2))

    return pack


def _k4_packer(has_high: bool, lanes: int, block_bytes: int, scales_at: int, _flip: int) -> Any:
    """Q4_K and Q5_K: 256 weights, float16 scale and minimum of eight 6-bit scales and minima."""
    size = 176 if has_high else 144
    codes_at = 48 if has_high else 16
    low = 0x0F0F0F0F

    @njit
    def pack(row, panel, lane, n_cols):
        for k in range(n_cols // BLOCK):
            source, out, j = row + k // 8 * size, panel + k * block_bytes, k % 8
            scales = source + 4
            if j < 4:
                scale, minimum = byte_at(scales + j) & 63, byte_at(scales + j + 4) & 63
            else:
                both = byte_at(scales + j + 4)
                scale = both & 15 | byte_at(scales + j - 4) >> 6 << 4
                minimum = both >> 4 | byte_at(scales + j) >> 6 << 4
            put_half(out + scales_at + 2 * lane, half_at(source) * scale)
            put_half(out + scales_at + 2 * (lanes + lane), -(half_at(source + 2) * minimum))
            codes, shift = source + codes_at + j // 2 * 32, 4 * (j % 2)
            for v in range(4):
                first = u32_at(codes + 4 * v) >> shift & low
                second = u32_at(codes + 16 + 4 * v) >> shift & low
                put_u32(out + (v * lanes + lane) * 4, first | second << 4)
            if has_high:
                plane = 0
                for quad in range(8):
                    plane |= (u32_at(source + 16 + 4 * quad) >> j & 0x01010101) << quad
                put_u32(out + (4 * lanes + lane) * 4, plane)

    return pack


def _q6_k_packer(lanes: int, block_bytes: int, scales_at: int, _flip: int) -> Any:
    """Q6_K: 256 weights; low four bits, high two bits, sixteen int8 scales, a float16 scale of these."""

    @njit
    def pack(row, panel, lane, n_cols):
        for k in range(n_cols // BLOCK):
            source, out, j = row + k // 8 * 210, panel + k * block_bytes, k % 8
            low = source + j // 4 * 64 + j % 2 * 32
            high = source + 128 + j // 4 * 32
            shift, pairs = 4 * (j % 4 // 2), 2 * (j % 4)
            for v in range(4):
                first = u32_at(low + 4 * v) >> shift & 0x0F0F0F0F
                second = u32_at(low + 16 + 4 * v) >> shift & 0x0F0F0F0F
                put_u32(out + (v * lanes + lane) * 4, first | second << 4)
            for half in range(2):
                plane = 0
                for v in range(4):
                    plane |= (u32_at(high + 16 * half + 4 * v) >> pairs & 0x03030303) << 2 * v
                put_u32(out + ((4 + half) * lanes + lane) * 4, plane)
                scale = byte_at(source + 192 + 2 * j + half)
                scale = scale - 256 if scale > 127 else scale
                put_half(out + scales_at + 2 * (half * lanes + lane), half_at(source + 208) * scale)

    return pack


def _simple(has_min: bool = False, has_high: bool = False, is_byte: bool = False) -> Callable[..., Any]:
    return lambda *layout: _simple_packer(has_min, has_high, is_byte, *layout)


_PACKERS: dict[str, Callable[..., Any]] = {
    "Q4_0": _simple(),
    "Q4_1": _simple(has_min=True),
    "Q5_0": _simple(has_high=True),
    "Q5_1": _simple(has_min=True, has_high=True),
    "Q8_0": _simple(is_byte=True),
    "IQ4_NL": _simple(),
    "Q4_K": lambda *layout: _k4_packer(False, *layout),
    "Q5_K": lambda *layout: _k4_packer(True, *layout),
    "Q6_K": _q6_k_packer,
}
