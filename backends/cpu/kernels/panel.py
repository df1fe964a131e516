"""The inner loop of every product: one panel of packed weights times a few tokens' int8 activations.

Activations (see `rows.py`): int8 (n_tokens, n_cols), and for each block of 32 four float32 words: the scale d, then
d * sum of its integers, -8 * d * sum of the first 16, -8 * d * sum of all. The last two serve codes with an offset.
"""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from edgert.backends.cpu.kernels.sums import MatrixDots, PartialDots
from edgert.backends.cpu.layouts import BLOCK, LINE, SUPER, WORDS_BYTES, Codec
from edgert.backends.cpu.simd import F32, I8, Emitter, Value

AHEAD = 8192  # bytes from what is multiplied to what is asked for
NEAR = 4096  # the same, where what follows has been asked for into the second-level cache
# Tokens from which on `ask_for` pays: alone it made a step of two threads a tenth slower. Vectors of 8 wait for their
# products rather than for memory: six tokens lost 3 to 7 % by it.
OVERLAPPING = 3


def is_signed(e: Emitter, codec: Codec) -> bool:
    """Large codes stay signed where a dot product of unsigned ones would overflow on the way."""
    return e.isa.dot != "vnni" and codec.offset > 64


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
    words = ir.VectorType(ir.IntType(16), width // 2)
    high = [e.load(words, block, (codec.low + i) * width) for i in range(codec.high)]
    table = _table(e, codec) if codec.table else None
    for vector in range(codec.low):
        packed = e.load(e.vb, block, vector * width)
        for field in range(8 // codec.low):
            quad = vector + codec.low * field
            codes = e.b.lshr(packed, e.const(e.vb, codec.low * field)) if field else packed
            codes = e.b.and_(codes, e.const(e.vb, 2**codec.low - 1))
            if codec.high:
                plane, place = divmod(quad * codec.high, 8)
                codes = e.b.or_(codes, _bits_to(e, high[plane], place, codec.low, (2**codec.high - 1) << codec.low))
            yield quad, codes if table is None else e.look_up(table, codes)


def _bits_to(e: Emitter, words: Value, source: int, target: int, mask: int) -> Value:
    """The bits of each byte that start at `source`, moved to `target`; words shift, since bytes cannot."""
    if source > target:
        words = e.b.lshr(words, e.const(words.type, source - target))
    elif source < target:
        words = e.b.shl(words, e.const(words.type, target - source))
    return e.b.and_(e.b.bitcast(words, e.vb), e.const(e.vb, mask))


def _table(e: Emitter, codec: Codec) -> Value:
    shift = 0 if is_signed(e, codec) else codec.offset
    values = [value + shift for value in codec.table] * (4 * e.lanes // len(codec.table))
    return ir.Constant(e.vb, [ir.Constant(ir.IntType(8), value & 255) for value in values])


def supers(e: Emitter, codec: Codec, head: Value) -> list[Value]:
    """What the integer scales (and minima) of 256 weights are multiples of."""
    found = [e.load_half(head, 2 * e.lanes * i) for i in range(1 + codec.has_min)]
    return found if codec.unit == 1 else [e.b.fmul(value, e.const(e.vf, codec.unit)) for value in found]


def scales(e: Emitter, codec: Codec, block: Value, above: list[Value]) -> tuple[list[Value], list[Value]]:
    """The scales of a block's groups, and their minima where the codec has them; `above` comes from `supers`."""
    n, at = codec.n_groups, codec.scales_at(e.lanes)
    if codec.scale == "super":
        return above * n, []
    if codec.scale == "f16":
        found = [e.load_half(block, at + 2 * e.lanes * i) for i in range(n * (1 + codec.has_min))]
        return found[:n], found[n:]
    n_bytes = (codec.block_bytes(e.lanes) - at) // e.lanes
    held = [e.load(ir.VectorType(I8, e.lanes), block, at + e.lanes * i) for i in range(n_bytes)]
    if codec.scale == "e8m0":  # the bits of float32's exponent
        exponents = [e.b.shl(e.b.zext(byte, e.vi), e.const(e.vi, 23)) for byte in held]
        return [e.b.fmul(e.b.bitcast(one, e.vf), e.const(e.vf, codec.unit)) for one in exponents], []
    if codec.scale == "nibbles":
        pairs = [e.b.zext(byte, e.vi) for byte in held]
        integers = [e.b.and_(pair, e.const(e.vi, 15)) for pair in pairs]
        integers += [e.b.lshr(pair, e.const(e.vi, 4)) for pair in pairs]
    else:
        integers = [e.b.sext(byte, e.vi) for byte in held]
    found = [e.b.fmul(e.to_float(one), above[i // n]) for i, one in enumerate(integers)]
    return found[:n], found[n:]


def each_block(e: Emitter, codec: Codec, panel: Value, n_blocks: Value) -> Iterator[tuple[Value, Value, list[Value]]]:
    """Loops over the blocks of a panel: (number, address, what their scales are multiples of)."""
    block_bytes, super_bytes = codec.block_bytes(e.lanes), codec.super_bytes(e.lanes)
    if not codec.has_super:
        with e.loop(0, n_blocks) as k:
            yield k, e.add(panel, e.mul(k, block_bytes)), []
        return
    n = SUPER // BLOCK
    with e.loop(0, e.b.sdiv(n_blocks, e.i64(n))) as s:
        head = e.add(panel, e.mul(s, super_bytes + n * block_bytes))
        above = supers(e, codec, head)
        with e.loop(0, n) as j:
            yield e.add(e.mul(s, n), j), e.add(head, super_bytes, e.mul(j, block_bytes)), above


def ask(e: Emitter, codec: Codec, block: Value, locality: int = 2, ahead: int = AHEAD) -> None:
    """Asks for weights that are read soon after a block."""
    for line in range(0, codec.block_bytes(e.lanes), LINE):
        e.prefetch(block, ahead + line, locality)


def ask_for(e: Emitter, codec: Codec, panel: Value, n_blocks: Value, k: Value) -> None:
    """Asks for the k-th of n_blocks shares of a panel, from several places of it at once.

    Memory is read as fast as requests are under way, of which the first-level cache keeps few. The second keeps many
    more, but follows each place where lines are read one after the other for some lines only: when a share has a line
    from each of several places, all requests are in use. Six tokens gained 25 % so.
    """
    share = codec.panel_bytes(BLOCK, e.lanes)
    n_places = -(-share // LINE)
    apart = e.b.udiv(e.mul(n_blocks, share), e.i64(n_places))
    first = e.add(panel, e.b.lshr(e.mul(k, (share << 16) // n_places), e.i64(16)))
    for i in range(n_places):
        e.prefetch(e.add(first, e.mul(apart, i)), 0)


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
    following: Value,
    paired: bool = False,
) -> list[Value]:
    """One panel times `n_tokens` tokens: for each token a vector (lanes,) of float32.

    following:  address of a panel that is read soon
    paired:     the activations are of the form "pairs"

    The order of additions for a token does not depend on how many tokens run beside it.
    """
    signed = is_signed(e, codec)
    offset = 0 if signed else codec.offset
    # Alone, a token needs two chains of dot products to hide their latency; several tokens hide it for one another.
    chains = 2 if codec.group == 16 or n_tokens < 4 else 1
    way = MatrixDots if paired else PartialDots
    totals = [e.var(e.zero(e.vf)) for _ in range(n_tokens)]
    for k, block, above in each_block(e, codec, panel, n_blocks):
        if n_tokens >= OVERLAPPING and e.lanes == 16:
            ask_for(e, codec, following, n_blocks, k)
            ask(e, codec, block, 3, NEAR)
        else:
            ask(e, codec, block)
        words_k = e.add(words, e.mul(k, WORDS_BYTES))
        words_t = [e.add(words_k, e.mul(words_stride, t)) for t in range(n_tokens)]
        dots = way(e, n_tokens, chains, signed, largest(e, codec), x, x_stride, k)
        for quad, codes in unpack(e, codec, block):
            dots.add(quad, codes)
        sums = dots.results()
        factors, minima = scales(e, codec, block, above)
        for t in range(n_tokens):
            parts = sums[t] if codec.group == 16 or chains == 1 else [e.b.add(*sums[t])]
            totals[t].set(add_block(e, codec, offset, totals[t].get(), parts, factors, minima, words_t[t]))
    return [total.get() for total in totals]


def add_block(
    e: Emitter,
    codec: Codec,
    offset: int,
    total: Value,
    parts: list[Value],
    factors: list[Value],
    minima: list[Value],
    words: Value,
) -> Value:
    """A token's total with a block more: integer sums of its groups, by scales, minima and the activations' words."""
    d = e.broadcast(F32, words, 0)
    for scale, part, shift in zip(factors, parts, _shifts(e, codec, offset, words), strict=True):
        value = e.b.fmul(e.to_float(part), d) if shift is None else e.fma(e.to_float(part), d, shift)
        total = e.fma(value, scale, total)
    for minimum, whole in zip(minima, _wholes(e, codec, words), strict=True):
        total = e.fma(minimum, whole, total)
    return total


def _wholes(e: Emitter, codec: Codec, words: Value) -> list[Value]:
    """For each minimum of a block, d * the sum of the activations that it is added to."""
    if not codec.has_min:
        return []
    if codec.group == BLOCK:
        return [e.broadcast(F32, words, 4)]
    first = e.b.fmul(e.load(F32, words, 8), e.const(F32, -1 / 8))
    return [e.splat(first), e.splat(e.b.fsub(e.load(F32, words, 4), first))]


def _shifts(e: Emitter, codec: Codec, offset: int, words: Value) -> list[Value | None]:
    """For each scale of a block, what the codes' offset adds to d * sum: -offset * d * (sum of the activations)."""
    if not offset:
        return [None] * codec.n_groups
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
