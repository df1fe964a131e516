"""GGUF rows -> panels (see `layouts.py`), one kernel for each GGUF type, shared out over the threads by panels.

What a type's blocks hold is told by a `Reader` (see `readers.py`); here it is put into its places. Codes move four at
a time, as 32-bit words: a quad of a row's block goes to place `lane` of its vector. Rows of a panel move together where
their reader can, as `planes.py` has it, and those of the next panel are fetched meanwhile.

The panels' memory may be fresh: then the kernel has the system bring it, a little at a time, while the cache still
holds the zeros that it comes with, and tells how long that took.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.planes import any_has, byte_at, put_byte, put_u16, put_u32, u32_at, weave
from edgert.backends.cpu.kernels.readers import READERS, Reader
from edgert.backends.cpu.kernels.walk import ticks
from edgert.backends.cpu.layouts import BLOCK, CODEC_OF, CODECS, Codec
from edgert.backends.cpu.simd import I32, I64, put_word, word

ARGUMENTS = (
    "source",  # raw GGUF rows, one after the other
    "row_bytes",
    "n_rows",
    "n_cols",
    "out",  # panels
    "first_panel",  # where the first panel goes, and
    "panel_step",  # how far apart the next (2: gate and up alternate)
    "bring",  # address of madvise; 0: the memory of the panels is there
    "unit",  # bytes that are brought at a time, a power of two
    # what the kernel tells:
    "flaws",  # set to 1 where a scale, a minimum or a float is NaN or infinite
    "waited",  # set to the ticks in which memory was brought
    "took",  # set to the ticks of the whole, where memory is brought
)

FLAWS, WAITED, TOOK = (ARGUMENTS.index(name) for name in ("flaws", "waited", "took"))
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14 and later
njit = numba.njit(error_model="numpy", forceinline=True)

# Of a kind of float: the bits of its exponent, and what added to them reaches which bit where it is not finite.
_EXPONENTS = {
    "f16": (0x7C00, 0x0400, 0x8000),
    "bf16": (0x7F80, 0x0080, 0x8000),
    "f32": (0x7F800000, 0x00800000, 0x80000000),
    "e8m0": (0xFF, 0x100 - 253, 0x100),  # times the largest E2M1 value, 2**126 overflows
}


def build(isa: Isa, format: str) -> Callable[[int, int, int], None]:
    """A kernel that packs one tensor; rows that fill up the last panel become weights of zero."""
    codec = CODECS[CODEC_OF[format]]
    lanes = isa.lanes
    if codec.is_float:
        columns, size, single, pack = BLOCK, BLOCK * codec.bits // 8, False, _float_packer(codec, lanes)
    else:
        reader = READERS[format]
        columns, size, single, pack = reader.block_size, reader.type_size, reader.single, _packer(reader, codec, isa)
    block_bytes = codec.panel_bytes(columns, lanes)
    top = _exponent(codec)[2]
    planes = weave(isa, size)
    now = ticks(isa)

    @njit
    def one_by_one(rows, row_bytes, n, panel, n_blocks):
        flaws = False
        for lane in range(n):
            for k in range(n_blocks):
                found = pack(rows + lane * row_bytes + k * size, panel + k * block_bytes, lane)
                flaws |= any_has(found, top)
        return flaws

    @njit
    def together(rows, row_bytes, n, panel, n_blocks):
        flaws = False
        for k in range(n_blocks):
            ahead = rows + lanes * (row_bytes + k * size)
            flaws |= any_has(pack(planes(rows + k * size, row_bytes, n, ahead), panel + k * block_bytes, 0), top)
        return flaws

    pack_panel = one_by_one if single else together

    def repack(thread, n_threads, a):
        row_bytes, n_rows, n_blocks = word(a, 1), word(a, 2), word(a, 3) // columns
        n_panels = (n_rows + lanes - 1) // lanes
        flaws = False
        bring, unit = word(a, 7), word(a, 8)
        brought = (word(a, 4) + word(a, 5) * n_blocks * block_bytes) & -unit
        waited, begun = 0, now()
        for p in range(n_panels * thread // n_threads, n_panels * (thread + 1) // n_threads):
            panel = word(a, 4) + (word(a, 5) + p * word(a, 6)) * n_blocks * block_bytes
            n = min(lanes, n_rows - p * lanes)
            if bring and brought < panel + n_blocks * block_bytes:
                since = now()
                while brought < panel + n_blocks * block_bytes:
                    _advise(bring, brought, unit, POPULATE_WRITE)
                    brought += unit
                waited += now() - since
            flaws |= pack_panel(word(a, 0) + p * lanes * row_bytes, row_bytes, n, panel, n_blocks)
        if flaws:
            put_word(a + 8 * FLAWS, 1)
        if bring:
            put_word(a + 8 * WAITED, waited)
            put_word(a + 8 * TOOK, now() - begun)

    return repack


@intrinsic
def _advise(_context: Any, function: Any, address: Any, n_bytes: Any, advice: Any) -> Any:
    def generate(context: Any, builder: Any, _s: Any, values: Any) -> Any:
        kind = ir.FunctionType(I32, [I64, I64, I32])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [*values[1:3], builder.trunc(values[3], I32)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def _exponent(codec: Codec) -> tuple[int, int, int]:
    """Of the floats that a codec holds: see _EXPONENTS."""
    return _EXPONENTS[codec.name if codec.is_float else "e8m0" if codec.scale == "e8m0" else "f16"]


def _float_packer(codec: Codec, lanes: int) -> Any:
    exponent, more, _ = _exponent(codec)
    halves, n_words = codec.bits == 16, BLOCK * codec.bits // 32

    @njit
    def pack(block, out, lane):
        flaws = byte_at(block) & 0
        for k in range(n_words):
            bits = u32_at(block + 4 * k)
            flaws |= (bits & exponent) + more
            if halves:
                flaws |= (bits >> 16 & exponent) + more
                put_u16(out + (2 * k * lanes + lane) * 2, bits)
                put_u16(out + ((2 * k + 1) * lanes + lane) * 2, bits >> 16)
            else:
                put_u32(out + (k * lanes + lane) * 4, bits)
        return flaws

    return pack


def _packer(reader: Reader, codec: Codec, isa: Isa) -> Any:
    """A function (block, panel, lane) that packs a row's block, or those of all rows of a panel.

    It tells the exponents of the floats that it met, as _EXPONENTS has them.
    """
    lanes = isa.lanes
    per, quad, scale, minimum, above = (
        reader.block_size // BLOCK, reader.quad, reader.scale, reader.minimum, reader.above
    )  # fmt: skip
    low, high, n_groups, scale_bytes, has_super = (
        codec.low, codec.high, codec.n_groups, codec.scale_bytes, codec.has_super
    )  # fmt: skip
    scales_at, block_bytes, super_bytes = codec.scales_at(lanes), codec.block_bytes(lanes), codec.super_bytes(lanes)
    n_supers = (1 + codec.has_min) * has_super
    has_minima = codec.has_min and codec.scale != "nibbles"
    flip = 0x80808080 if isa.dot == "vnni" and codec.bits == 8 else 0
    low_mask = 0x01010101 * ((1 << low) - 1)
    high_mask = 0x01010101 * ((1 << high) - 1)
    exponent, more, _ = _exponent(codec)

    @njit
    def put(place, value):
        if scale_bytes == 2:
            put_u16(place, value)
        else:
            put_byte(place, value)

    @njit
    def pack(block, panel, lane):
        flaws = byte_at(block) & 0
        if has_super:
            for i in range(n_supers):
                bits = above(block, i)
                flaws |= (bits & exponent) + more
                put_u16(panel + 2 * (i * lanes + lane), bits)
        for j in range(per):
            out = panel + super_bytes + j * block_bytes
            for v in range(low):
                fields = quad(block, j, v) & low_mask
                for f in range(1, 8 // low):
                    fields |= (quad(block, j, v + low * f) & low_mask) << (low * f)
                put_u32(out + (v * lanes + lane) * 4, fields ^ flip)
            for plane in range(high):
                fields = quad(block, j, plane * (8 // high)) >> low & high_mask
                for f in range(1, 8 // high):
                    fields |= (quad(block, j, plane * (8 // high) + f) >> low & high_mask) << (high * f)
                put_u32(out + ((low + plane) * lanes + lane) * 4, fields)
            if scale_bytes:
                for i in range(n_groups):
                    bits = scale(block, j, i)
                    if not has_super:
                        flaws |= (bits & exponent) + more
                    put(out + scales_at + (i * lanes + lane) * scale_bytes, bits)
                    if has_minima:
                        bits = minimum(block, j, i)
                        if not has_super:
                            flaws |= (bits & exponent) + more
                        put(out + scales_at + ((n_groups + i) * lanes + lane) * scale_bytes, bits)
        return flaws

    return pack
