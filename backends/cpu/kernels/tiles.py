"""Product of packed weights and many tokens by bf16 tile instructions (AMX): weights are unpacked once per step.

Activations lie in tiles of 16 tokens by 32 columns: bf16 (n_tokens / 16, n_cols / 32, 16, 32). A unit of work is two
panels (32 rows): their weights become bf16 tiles in the thread's scratch, then pass over all tokens, 32 at a time.
bf16 keeps 8 bits of mantissa of each activation, where int8 blocks keep 7 of the block's largest, and sums in
float32 inside the tile: it is both faster and nearer to the exact product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
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
from edgert.backends.cpu.simd import F32, GATED, I16, I64, Emitter, Value, bfloat_pairs, emitted, to_bfloat, word

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
    panel_row = CODECS[codec].panel_bytes(BLOCK, isa.lanes)
    gated, has_bias = epilogue in GATED, bias == "yes"
    configure = emitted(isa, 1, configure_tiles)
    release = emitted(isa, 0, release_tiles)
    multiply = unit_product(isa, CODECS[codec])
    finish = emitted(isa, 7, finisher(epilogue, has_bias))

    def product(thread, n_threads, a):
        x, y, y_stride = word(a, 1), word(a, 2), word(a, 3)
        n_blocks = word(a, 4) // BLOCK
        n_units = word(a, 5) // 2
        n_tokens = word(word(a, 6), 0)
        scratch = word(a, 7) + thread * word(a, 8)
        unit_bytes = 2 * n_blocks * panel_row
        configure(scratch)
        for unit in range(n_units * thread // n_threads, n_units * (thread + 1) // n_threads):
            results = multiply(word(a, 0) + unit * unit_bytes, x, scratch + 64, n_blocks, n_tokens)
            added = word(a, 9) + unit * 128 if has_bias else 0
            for t in range(0, n_tokens, TILE_TOKENS):
                result = results + t // TILE_TOKENS * 4 * TILE
                if gated:
                    # columns 16*unit.. of the result are half of a tile's 32 columns
                    place = y + (t // 16 * (n_units // 2) + unit // 2) * TILE + unit % 2 * 32
                    finish(result, place, n_units // 2 * TILE, TILE_TOKENS, 0, 0, added)
                else:
                    finish(result, y + t * y_stride + unit * 128, y_stride, TILE_TOKENS, 0, 0, added)
        release()

    return product


def unit_product(isa: Isa, codec: Codec) -> Any:
    """A Numba function: two panels times a run of tokens. It returns the address of the results.

    panels:    address of the first of the two
    x:         bf16 tiles of the tokens (n_tokens / 16, n_blocks, 16, 32)
    scratch:   the unpacked weights, then the results: float32 (n_tokens / 32, token half, panel, 16, 16)
    n_blocks:  of a panel
    n_tokens:  the last pass takes all 32 even where fewer are left
    """
    panel_row = codec.panel_bytes(BLOCK, isa.lanes)
    unpack = emitted(isa, 3, _unpacker(codec))
    multiply = emitted(isa, 6, _multiply)

    def product(panels, x, scratch, n_blocks, n_tokens):
        results = scratch + 2 * TILE_CHUNK * TILE
        row_of_tiles = n_blocks * TILE
        for k in range(0, n_blocks, TILE_CHUNK):
            n = min(TILE_CHUNK, n_blocks - k)
            unpack(panels + k * panel_row, scratch, n)
            unpack(panels + (n_blocks + k) * panel_row, scratch + TILE_CHUNK * TILE, n)
            for t in range(0, n_tokens, TILE_TOKENS):
                x_t = x + t // 16 * row_of_tiles + k * TILE
                multiply(x_t, scratch, results + t // TILE_TOKENS * 4 * TILE, n, row_of_tiles, k)
        return results

    return numba.njit(error_model="numpy", inline="always")(product)


def _multiply(
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


def finisher(epilogue: str, has_bias: bool) -> Callable[..., None]:
    """Emits what is done with the results of one pass, of two panels and up to 32 tokens.

    epilogue:  as in `product.py` and `experts.py`
    results:   as `unit_product` leaves them
    y:         where the first token's result goes; gated ones are bf16 tiles
    stride:    bytes in y between tokens; of gated results between rows of tiles
    count:     tokens
    rows:      with "scatter" int64 (count): tokens go to these rows of y instead
    shares:    with "scatter" float32 (count): what is multiplied before it is added
    bias:      float32 (2, 16), where there is one
    """

    def finish(
        e: Emitter, results: Value, y: Value, stride: Value, count: Value, rows: Value, shares: Value, bias: Value
    ) -> None:
        biases = [e.load(e.vf, bias, 64 * i) for i in range(2)] if has_bias else []
        with e.loop(0, count) as token:
            half, line = e.b.lshr(token, e.i64(4)), e.mul(e.b.and_(token, e.i64(15)), 64)
            result = e.add(results, e.mul(half, 2 * TILE), line)
            values = [e.load(e.vf, result, i * TILE) for i in range(2)]
            if has_bias:
                values = [e.b.fadd(value, added) for value, added in zip(values, biases, strict=True)]
            if epilogue in GATED:
                values = [to_bfloat(e, e.glu(epilogue, *values))]
                place = e.add(y, e.b.mul(stride, half), line)
            else:
                row = e.load(I64, rows, e.mul(token, 8)) if epilogue == "scatter" else token
                place = e.add(y, e.b.mul(stride, row))
            if epilogue == "add":
                values = [e.b.fadd(value, e.load(e.vf, place, 64 * i)) for i, value in enumerate(values)]
            elif epilogue == "scatter":
                share = e.broadcast(F32, shares, e.mul(token, 4))
                values = [e.fma(value, share, e.load(e.vf, place, 64 * i)) for i, value in enumerate(values)]
            for i, value in enumerate(values):
                e.store(value, place, 64 * i)

    return finish


def _unpacker(codec: Codec) -> Callable[..., None]:
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
