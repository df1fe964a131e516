"""The inner loop of every product: one panel of packed weights times a few tokens' int8 activations.

Activations (see `rows.py`): int8 (n_tokens, n_cols), and for each block of 32 four float32 words: the scale d, then
d * sum of its integers, -8 * d * sum of the first 16, -8 * d * sum of all. The last two serve codes with an offset.
"""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from edgert.backends.cpu.kernels.sums import Dots, MatrixDots, PairedDots
from edgert.backends.cpu.layouts import BLOCK, WORDS_BYTES, Codec
from edgert.backends.cpu.simd import F32, Emitter, Value

AHEAD = 8192  # bytes: asking for weights two pages ahead gained 20 % alone and 40 % with six tokens


def is_signed(e: Emitter, codec: Codec) -> bool:
    """Byte codes stay signed where the dot product does not want unsigned ones."""
    return e.isa.dot != "vnni" and (codec.bits == 8 or bool(codec.table))


def largest(e: Emitter, codec: Codec) -> int:
    """The largest magnitude of the codes that `unpack` gives."""
    shift = 0 if is_signed(e, codec) else codec.offset
    if codec.table:
        return max(abs(value + shift) for value in codec.table)
    return 128 if is_signed(e, codec) else 2**codec.bits - 1


def unpack(e: Emitter, codec: Codec, block: Value) -> Iterator[tuple[int, Value]]:
    """Yields (quad, bytes): the codes of weights 4*quad..4*quad+3 of each row, as they are needed."""
    width = 4 * e.lanes
    if codec.bits == 8:
        for quad in range(8):
            yield quad, e.load(e.vb, block, quad * width)
        return
    low_mask = e.const(e.vb, 15)
    words = ir.VectorType(ir.IntType(16), width // 2)
    high = [e.b.bitcast(e.load(e.vb, block, (4 + i) * width), words) for i in range(codec.bits - 4)]
    table = _table(e, codec) if codec.table else None

    def finish(quad: int, codes: Value) -> Value:
        if table is not None:
            return e.look_up(table, codes)
        if codec.bits == 5:
            codes = e.b.or_(codes, _bits_to(e, high[0], quad, 4, 0x10))
        elif codec.bits == 6:
            codes = e.b.or_(codes, _bits_to(e, high[quad // 4], 2 * (quad % 4), 4, 0x30))
        return codes

    for vector in range(4):
        both = e.load(e.vb, block, vector * width)
        yield vector, finish(vector, e.b.and_(both, low_mask))
        yield 4 + vector, finish(4 + vector, e.b.and_(e.b.lshr(both, e.const(e.vb, 4)), low_mask))


def _bits_to(e: Emitter, words: Value, source: int, target: int, mask: int) -> Value:
    """The bits of each byte that start at `source`, moved to `target`; words shift, since bytes cannot."""
    if source > target:
        words = e.b.lshr(words, e.const(words.type, source - target))
    elif source < target:
        words = e.b.shl(words, e.const(words.type, target - source))
    return e.b.and_(e.b.bitcast(words, e.vb), e.const(e.vb, mask))


def _table(e: Emitter, codec: Codec) -> Value:
    shift = 0 if is_signed(e, codec) else codec.offset
    values = [value + shift for value in codec.table] * (4 * e.lanes // 16)
    return ir.Constant(e.vb, [ir.Constant(ir.IntType(8), value & 255) for value in values])


def panel_product(
    e: Emitter,
    codec: Codec,
    n_tokens: int,
    panel: Value,
    x: Value,
    words: Value,
    n_blocks: Value,
    x_stride: Value,
    words_stride: Value,
    paired: bool = False,
) -> list[Value]:
    """One panel times `n_tokens` tokens: for each token a vector (lanes,) of float32.

    paired:  the activations are of the form "pairs"

    The order of additions for a token does not depend on how many tokens run beside it.
    """
    block_bytes = codec.block_bytes(e.lanes)
    signed = is_signed(e, codec)
    scales_at = block_bytes - 2 * e.lanes * (BLOCK // codec.group + codec.has_min)
    offset = 0 if signed else codec.offset
    # Alone, a token needs two chains of dot products to hide their latency; several tokens hide it for one another.
    chains = 2 if codec.group == 16 or n_tokens < 4 else 1
    way = MatrixDots if paired else PairedDots if e.isa.dot == "maddubs" else Dots
    totals = [e.var(e.zero(e.vf)) for _ in range(n_tokens)]
    with e.loop(0, n_blocks) as k:
        block = e.add(panel, e.mul(k, block_bytes))
        for line in range(0, block_bytes, 64):
            e.prefetch(block, AHEAD + line)
        words_k = e.add(words, e.mul(k, WORDS_BYTES))
        words_t = [e.add(words_k, e.mul(words_stride, t)) for t in range(n_tokens)]
        dots = way(e, n_tokens, chains, signed, largest(e, codec), x, x_stride, k)
        for quad, codes in unpack(e, codec, block):
            dots.add(quad, codes)
        sums = dots.results()
        scales = [e.load_half(block, scales_at + 2 * e.lanes * i) for i in range(BLOCK // codec.group)]
        minima = e.load_half(block, scales_at + 2 * e.lanes) if codec.has_min else None
        for t in range(n_tokens):
            d = e.broadcast(F32, words_t[t], 0)
            total = totals[t].get()
            parts = sums[t] if codec.group == 16 or chains == 1 else [e.b.add(*sums[t])]
            for scale, part, shift in zip(scales, parts, _shifts(e, codec, offset, words_t[t]), strict=True):
                value = e.b.fmul(e.to_float(part), d) if shift is None else e.fma(e.to_float(part), d, shift)
                total = e.fma(value, scale, total)
            if minima is not None:
                total = e.fma(minima, e.broadcast(F32, words_t[t], 4), total)
            totals[t].set(total)
    return [total.get() for total in totals]


def _shifts(e: Emitter, codec: Codec, offset: int, words: Value) -> list[Value | None]:
    """For each scale of a block, what the codes' offset adds to d * sum: -offset * d * (sum of the activations)."""
    if not offset:
        return [None] * (BLOCK // codec.group)
    whole = e.load(F32, words, 12)
    parts = [whole]
    if codec.group == 16:
        first = e.load(F32, words, 8)
        parts = [first, e.b.fsub(whole, first)]
    if offset != 8:
        parts = [e.b.fmul(part, e.const(F32, offset / 8)) for part in parts]
    return [e.splat(part) for part in parts]


def float_panel_product(
    e: Emitter, codec: Codec, n_tokens: int, panel: Value, x: Value, n_cols: Value, x_stride: Value
) -> list[Value]:
    """The same for float weights and float32 activations (n_tokens, n_cols)."""
    load = {"f16": e.load_half, "bf16": e.load_bfloat, "f32": lambda a, o=0: e.load(e.vf, a, o)}[codec.name]
    step = e.lanes * codec.bits // 8
    totals = [e.var(e.zero(e.vf)) for _ in range(n_tokens)]
    with e.loop(0, n_cols) as k:
        weights = load(e.add(panel, e.mul(k, step)))
        for t in range(n_tokens):
            value = e.broadcast(F32, e.add(x, e.mul(x_stride, t), e.mul(k, 4)))
            totals[t].set(e.fma(weights, value, totals[t].get()))
    return [total.get() for total in totals]
