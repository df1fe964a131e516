"""Product of packed weights and many tokens by bf16 tile instructions (AMX): weights are unpacked once per step.

Activations lie in tiles of 16 tokens by 32 columns: bf16 (n_tokens / 16, n_cols / 32, 16, 32). A unit of work is two
panels (32 rows): their weights become bf16 tiles in the thread's scratch, then pass over all tokens, 32 at a time.
bf16 keeps 8 bits of mantissa of each activation, where int8 blocks keep 7 of the block's largest, and sums in
float32 inside the tile: it is both faster and nearer to the exact product.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.amx import (
    configure_tiles,
    load_tile,
    multiply_tiles,
    release_tiles,
    store_tile,
    zero_tile,
)
from edgert.backends.cpu.kernels.panel import each_block, scales
from edgert.backends.cpu.layouts import BLOCK, CODECS, TILE, TILE_CHUNK, TILE_TOKENS, Codec
from edgert.backends.cpu.simd import GATED, I16, Emitter, Value, bfloat_pairs, emitted, to_bfloat, word

ARGUMENTS = (
    "weights",
    "x",  # bf16 tiles
    "y",  # float32 (n_tokens, y_stride / 4); for gated epilogues bf16 tiles of n_panels * 8 columns
    "y_stride",  # bytes
    "n_cols",
    "n_panels",  # even
    "n_tokens_at",  # address of the int64 number of tokens, a multiple of 32
    "scratch",
    "scratch_stride",  # bytes between the threads' scratches
    "bias",  # float32 (n_panels, 16), where there is one
)


def build(isa: Isa, codec: str, epilogue: str, bias: str = "no") -> Callable[[int, int, int], None]:
    """A product kernel over tiles; epilogues and bias as in `product.py`, gated ones write bf16 tiles."""
    kind = CODECS[codec]
    panel_row = kind.panel_bytes(BLOCK, isa.lanes)
    gated, has_bias = epilogue in GATED, bias == "yes"
    unpack = emitted(isa, 3, unpacker(kind))
    configure = emitted(isa, 1, configure_tiles)
    release = emitted(isa, 0, release_tiles)
    multiply_tokens = emitted(isa, 6, multiply)
    finish = emitted(isa, 4, _finisher(epilogue, has_bias))

    def product(thread, n_threads, a):
        weights, x, y, y_stride = word(a, 0), word(a, 1), word(a, 2), word(a, 3)
        n_cols = word(a, 4)
        n_units = word(a, 5) // 2
        n_tokens = word(word(a, 6), 0)
        scratch = word(a, 7) + thread * word(a, 8)
        panels = scratch + 64
        results = panels + 2 * TILE_CHUNK * TILE
        n_blocks = n_cols // BLOCK
        panel_bytes = n_blocks * panel_row
        row_of_tiles = n_blocks * TILE
        configure(scratch)
        for unit in range(n_units * thread // n_threads, n_units * (thread + 1) // n_threads):
            first = weights + 2 * unit * panel_bytes
            for k in range(0, n_blocks, TILE_CHUNK):
                n = min(TILE_CHUNK, n_blocks - k)
                unpack(first + k * panel_row, panels, n)
                unpack(first + panel_bytes + k * panel_row, panels + TILE_CHUNK * TILE, n)
                for t in range(0, n_tokens, TILE_TOKENS):
                    x_t = x + t // 16 * row_of_tiles + k * TILE
                    multiply_tokens(x_t, panels, results + t // TILE_TOKENS * 4 * TILE, n, row_of_tiles, k)
            for t in range(0, n_tokens, TILE_TOKENS):
                result = results + t // TILE_TOKENS * 4 * TILE
                if gated:
                    # columns 16*unit.. of the result are half of a tile's 32 columns
                    tile = y + (t // 16 * (n_units // 2) + unit // 2) * TILE + unit % 2 * 32
                    finish(result, tile, n_units // 2 * TILE, 0)
                else:
                    added = word(a, 9) + unit * 128 if has_bias else 0
                    finish(result, y + t * y_stride + unit * 128, y_stride, added)
        release()

    return product


def multiply(
    e: Emitter, x: Value, panels: Value, results: Value, n_blocks: Value, row_of_tiles: Value, done: Value
) -> None:
    """32 tokens times two panels: results[token half][panel] (16, 16) float32, added to when `done` is not 0."""
    with e.b.if_else(e.b.icmp_signed("==", done, e.i64(0))) as (fresh, resumed):
        with fresh:
            for register in range(4):
                zero_tile(e, register)
        with resumed:
            for register in range(4):
                load_tile(e, register, e.at(results, register * TILE))
    with e.loop(0, n_blocks) as k:
        offset = e.mul(k, TILE)
        tokens, weights = e.add(x, offset), e.add(panels, offset)
        load_tile(e, 6, e.at(weights))
        load_tile(e, 4, e.at(tokens))
        multiply_tiles(e, 0, 4, 6)
        load_tile(e, 7, e.at(weights, TILE_CHUNK * TILE))
        multiply_tiles(e, 1, 4, 7)
        load_tile(e, 5, e.at(e.add(tokens, row_of_tiles)))
        multiply_tiles(e, 2, 5, 6)
        multiply_tiles(e, 3, 5, 7)
    for register in range(4):
        store_tile(e, register, e.at(results, register * TILE))


def _finisher(epilogue: str, has_bias: bool) -> Callable[..., None]:
    def finish(e: Emitter, results: Value, y: Value, stride: Value, bias: Value) -> None:
        for half in range(2):
            with e.loop(0, 16) as token:
                line = e.add(results, e.mul(token, 64))
                first, second = (e.load(e.vf, line, (2 * half + i) * TILE) for i in range(2))
                if epilogue in GATED:
                    value = to_bfloat(e, e.glu(epilogue, first, second))
                    e.store(value, e.add(y, e.mul(stride, half), e.mul(token, 64)))
                    continue
                place = e.add(y, e.mul(stride, 16 * half), e.b.mul(stride, token))
                if has_bias:
                    first, second = e.b.fadd(first, e.load(e.vf, bias)), e.b.fadd(second, e.load(e.vf, bias, 64))
                if epilogue == "add":
                    first = e.b.fadd(first, e.load(e.vf, place))
                    second = e.b.fadd(second, e.load(e.vf, place, 64))
                e.store(first, place)
                e.store(second, place, 64)

    return finish


def unpacker(codec: Codec) -> Callable[..., None]:
    """One panel's blocks -> bf16 tiles: row k/2 of a tile holds for each of 16 weight rows the pair k, k+1."""

    def unpack(e: Emitter, panel: Value, tiles: Value, n_blocks: Value) -> None:
        for k, block, above in each_block(e, codec, panel, n_blocks):
            tile = e.add(tiles, e.mul(k, TILE))
            for line in range(0, codec.block_bytes(e.lanes), 64):
                e.prefetch(block, 2048 + line)
            if codec.name == "bf16":
                _unpack_bfloat(e, block, tile)
            else:
                _unpack_codes(e, codec, block, above, tile)

    return unpack


def _unpack_bfloat(e: Emitter, block: Value, tile: Value) -> None:
    halves = ir.VectorType(I16, 16)
    for pair in range(16):
        low, high = (e.b.zext(e.load(halves, block, (2 * pair + i) * 32), e.vi) for i in range(2))
        e.store(e.b.or_(low, e.b.shl(high, e.const(e.vi, 16))), tile, pair * 64)


def _unpack_codes(e: Emitter, codec: Codec, block: Value, above: list[Value], tile: Value) -> None:
    factors, base = scales(e, codec, block, above)
    if codec.offset and codec.bits > 4:  # smaller codes have their offset in a table
        base = [e.b.fmul(scale, e.const(e.vf, -codec.offset)) for scale in factors]
    for pair in range(16):
        quad = pair // 2
        group = quad // 4 if codec.group == 16 else 0
        values = []
        for i in (2 * (pair % 2), 2 * (pair % 2) + 1):
            value = _code(e, codec, block, quad, i)
            if base:
                value = e.fma(value, factors[group], base[group])
            else:
                value = e.b.fmul(value, factors[group])
            values.append(value)
        e.store(bfloat_pairs(e, *values), tile, pair * 64)


def _code(e: Emitter, codec: Codec, block: Value, quad: int, i: int) -> Value:
    """The codes of weight 4*quad + i of 16 rows as float32; those of few bits by table, offset included."""
    field, vector = divmod(quad, codec.low)
    codes = e.b.lshr(e.load(e.vi, block, vector * 64), e.const(e.vi, 8 * i + codec.low * field))
    if codec.high:
        plane, place = divmod(quad * codec.high, 8)
        apart = e.b.lshr(e.load(e.vi, block, (codec.low + plane) * 64), e.const(e.vi, 8 * i + place))
        apart = e.b.shl(e.b.and_(apart, e.const(e.vi, 2**codec.high - 1)), e.const(e.vi, codec.low))
        codes = e.b.or_(e.b.and_(codes, e.const(e.vi, 2**codec.low - 1)), apart)
    if codec.bits <= 4:  # the instruction looks at the lowest four bits
        values = codec.table or range(-codec.offset, 2**codec.bits - codec.offset)
        table = ir.Constant(e.vf, [ir.Constant(e.vf.element, float(value)) for value in values] * (16 // len(values)))
        return e.call("llvm.x86.avx512.permvar.sf.512", e.vf, table, codes)
    return e.to_float(codes if codec.high else e.b.and_(codes, e.const(e.vi, 255)))
