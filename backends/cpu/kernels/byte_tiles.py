"""Product of packed weights and many tokens' int8 activations by int8 tile instructions (AMX).

What `panel.py` sums four bytes at a time, a tile sums for 16 rows and 16 tokens at once, as exactly. Scales follow in
the same order, so that a token's result is bit for bit that of `product.py`, however many run beside it.

A panel is unpacked once for up to BYTE_TILE_TOKENS tokens, a chunk of blocks at a time. A thread's scratch holds, in
this order:

    the tiles' configuration (64 bytes)
    codes    (BYTE_TILE_CHUNK, 8, lanes, 4) bytes: quads as they are unpacked
    scales   float32 (BYTE_TILE_CHUNK, 4, lanes): of the groups, then their minima
    sums     int32 (BYTE_TILE_CHUNK * n_groups, 16 tokens, lanes)
    totals   float32 (2, BYTE_TILE_TOKENS tokens, lanes): of a panel, or of gate and up
"""

from __future__ import annotations

from collections.abc import Callable

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.amx import (
    configure_bytes,
    load_tile,
    multiply_bytes,
    release_tiles,
    store_tile,
    zero_tile,
)
from edgert.backends.cpu.kernels.panel import add_block, ask, each_block, scales, unpack
from edgert.backends.cpu.kernels.product import finish_token
from edgert.backends.cpu.layouts import (
    BLOCK,
    BYTE_TILE_CHUNK,
    BYTE_TILE_TOKENS,
    CODECS,
    TILE,
    TOGETHER,
    WORDS_BYTES,
    Codec,
)
from edgert.backends.cpu.simd import GATED, Emitter, Value, emitted, word

ROWS = 16  # tokens of a tile
SCALES_BYTES = 4 * 64  # of a block
SCALES = BYTE_TILE_CHUNK * BLOCK * 16
SUMS = SCALES + BYTE_TILE_CHUNK * SCALES_BYTES
TOTALS = SUMS + BYTE_TILE_CHUNK * 2 * TILE + TOGETHER * 64
ARGUMENTS = (
    "weights",  # panels
    "x",  # int8 activations (n_tokens, n_cols)
    "words",  # four words for each block of the activations
    "y",  # float32 (n_tokens, y_stride / 4)
    "y_stride",  # bytes
    "n_cols",
    "n_panels",
    "n_tokens_at",  # address of the int64 number of tokens of this step
    "private",  # 0
    "first_row_at",  # address of the int64 row of y at which the tokens start
    "bias",  # float32 (n_panels, lanes), where there is one
    "scratch",
    "scratch_stride",  # bytes between the threads' scratches
)


def build(isa: Isa, codec: str, epilogue: str, bias: str = "no") -> Callable[[int, int, int], None]:
    """A product kernel for any number of tokens; epilogues and bias as in `product.py`.

    The last tokens' words are read past n_tokens, so words have TOGETHER - 1 rows to spare.
    """
    kind = CODECS[codec]
    pair = 2 if epilogue in GATED else 1
    has_bias = bias == "yes"
    panel_row = kind.panel_bytes(BLOCK, isa.lanes)
    configure = emitted(isa, 2, lambda e, place, rows: configure_bytes(e, place, rows, kind.group))
    release = emitted(isa, 0, release_tiles)
    spread = emitted(isa, 3, lambda e, *a: _spread(e, kind, *a))
    multiply = emitted(isa, 4, lambda e, *a: _multiply(e, kind, *a))
    add = emitted(isa, 7, lambda e, *a: _add(e, kind, *a))
    finish = emitted(isa, 3, lambda e, *a: _finish(e, epilogue, has_bias, *a))
    lanes = isa.lanes

    def product(thread, n_threads, a):
        y_stride, n_cols = word(a, 4), word(a, 5)
        n_units = word(a, 6) // pair
        n_tokens = word(word(a, 7), 0)
        scratch = word(a, 11) + thread * word(a, 12)
        codes = scratch + 64
        n_blocks = n_cols // BLOCK
        panel_bytes = n_blocks * panel_row
        words_stride = n_blocks * WORDS_BYTES
        configure(scratch, min(n_tokens, ROWS))
        for unit in range(n_units * thread // n_threads, n_units * (thread + 1) // n_threads):
            for begin in range(0, n_tokens, BYTE_TILE_TOKENS):
                stop = min(begin + BYTE_TILE_TOKENS, n_tokens)
                for part in range(pair):
                    panel = word(a, 0) + (unit * pair + part) * panel_bytes
                    totals = codes + TOTALS + part * BYTE_TILE_TOKENS * 64
                    for k in range(0, n_blocks, BYTE_TILE_CHUNK):
                        n = min(BYTE_TILE_CHUNK, n_blocks - k)
                        spread(panel + k * panel_row, codes, n)
                        for t in range(begin, stop, ROWS):
                            base = max(0, min(t, n_tokens - ROWS))  # a tile that would not be full begins before t
                            multiply(word(a, 1) + base * n_cols + k * BLOCK, n_cols, codes, n)
                            for i in range(t, min(t + ROWS, stop), TOGETHER):
                                add(codes, codes + SUMS + (i - base) * 64,
                                    word(a, 2) + i * words_stride + k * WORDS_BYTES, words_stride,
                                    totals + (i - begin) * 64, n, k)  # fmt: skip
                first = word(word(a, 9), 0)
                for t in range(begin, stop):
                    y = word(a, 3) + (first + t) * y_stride + unit * lanes * 4
                    finish(codes + TOTALS + (t - begin) * 64, y, word(a, 10) + unit * lanes * 4 if has_bias else 0)
        release()

    return product


def _spread(e: Emitter, codec: Codec, panel: Value, codes: Value, n_blocks: Value) -> None:
    """Some blocks of a panel: their codes and scales."""
    for k, block, above in each_block(e, codec, panel, n_blocks):
        ask(e, codec, block)
        place = e.add(codes, e.mul(k, BLOCK * e.lanes))
        for quad, values in unpack(e, codec, block):
            e.store(values, place, quad * 4 * e.lanes)
        factors, minima = scales(e, codec, block, above)
        held = e.add(codes, SCALES, e.mul(k, SCALES_BYTES))
        for i, value in enumerate([*factors, *minima]):
            e.store(value, held, i * 64)


def _multiply(e: Emitter, codec: Codec, x: Value, stride: Value, codes: Value, n_blocks: Value) -> None:
    """The tokens' sums of each group of some blocks."""
    width = codec.group
    with e.loop(0, e.mul(n_blocks, codec.n_groups)) as i:
        zero_tile(e, 0)
        load_tile(e, 1, e.at(e.add(codes, e.mul(i, width * e.lanes))))
        load_tile(e, 2, e.at(e.add(x, e.mul(i, width))), stride)
        multiply_bytes(e, 0, 2, 1)
        store_tile(e, 0, e.at(e.add(codes, SUMS, e.mul(i, TILE))))


def _add(
    e: Emitter,
    codec: Codec,
    codes: Value,
    sums: Value,
    words: Value,
    stride: Value,
    totals: Value,
    n_blocks: Value,
    done: Value,
) -> None:
    """The sums of some blocks by their scales, added to the totals of TOGETHER tokens when `done` is not 0."""
    fresh, n = e.b.icmp_signed("==", done, e.i64(0)), codec.n_groups
    held = [e.b.select(fresh, e.zero(e.vf), e.load(e.vf, totals, t * 64)) for t in range(TOGETHER)]
    held = [e.var(value) for value in held]
    with e.loop(0, n_blocks) as k:
        place = e.add(codes, SCALES, e.mul(k, SCALES_BYTES))
        found = [e.load(e.vf, place, i * 64) for i in range(n * (1 + codec.has_min))]
        sums_k, words_k = e.add(sums, e.mul(k, n * TILE)), e.add(words, e.mul(k, WORDS_BYTES))
        for t, total in enumerate(held):
            parts = [e.load(e.vi, sums_k, i * TILE + t * 64) for i in range(n)]
            words_t = e.add(words_k, e.mul(stride, t))
            total.set(add_block(e, codec, codec.offset, total.get(), parts, found[:n], found[n:], words_t))
    for t, total in enumerate(held):
        e.store(total.get(), totals, t * 64)


def _finish(e: Emitter, epilogue: str, has_bias: bool, totals: Value, y: Value, bias: Value) -> None:
    gate = e.load(e.vf, totals)
    up = e.load(e.vf, totals, BYTE_TILE_TOKENS * 64) if epilogue in GATED else None
    finish_token(e, epilogue, gate, up, y, bias if has_bias else None)
