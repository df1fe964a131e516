"""Reading packed pages (laid out by `cache_write.py`): int8 dot products for keys and for values, or bf16 tiles.

Codes stay unsigned with their offset, and what the offset adds is a constant of each query (or sum of weights)
that is taken off again. Queries are rounded to 8 bits a block of 32. Weights are multiplied by the values' scales
and rounded to 14 bits, in two bytes: a dot product for each.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from edgert.backends.cpu.kernels.cache_write import inverse
from edgert.backends.cpu.layouts import BLOCK, PAGE, CacheType
from edgert.backends.cpu.simd import F32, I8, I16, I32, I64, Emitter, Value, bfloat_pairs

LARGEST = 8191.0  # a weight times a value's scale, rounded, with its sign
MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000  # 1.5 * 2**23: adding it leaves the rounded number in the low bits


def _space(e: Emitter, n_bytes: int) -> Value:
    return e.b.ptrtoint(cgutils.alloca_once(e.b, I8, size=n_bytes), I64)


def _unpack(e: Emitter, kind: CacheType, address: Value, offset: int | Value = 0) -> tuple[Value, ...]:
    """The code vectors of `4 * lanes` stored bytes: one, or low and high nibbles."""
    codes = e.load(e.vb, address, offset)
    if kind.bits == 8:
        return (codes,) if e.isa.dot == "vnni" else (e.b.xor(codes, e.const(e.vb, -128)),)
    words = ir.VectorType(I32, e.lanes)
    high = e.b.bitcast(e.b.lshr(e.b.bitcast(codes, words), e.const(words, 4)), e.vb)
    return e.b.and_(codes, e.const(e.vb, 15)), e.b.and_(high, e.const(e.vb, 15))


def _offset(e: Emitter, kind: CacheType) -> int:
    """What is to be taken off the codes that `_unpack` gives: where sums want signed bytes, nothing."""
    return kind.offset if kind.bits == 4 or e.isa.dot == "vnni" else 0


def round_block(e: Emitter, kind: CacheType, query: Value, codes: Value, words: Value, factor: float = 1.0) -> None:
    """32 values of a query -> int8; its words are their scale, times `factor`, and -offset * their sum."""
    values = [e.load(e.vf, query, 4 * i) for i in range(0, BLOCK, e.lanes)]
    largest = e.zero(e.vf)
    for value in values:
        largest = e.maximum(largest, e.fabs(value))
    scale = e.b.fmul(e.reduce(largest, e.maximum), e.const(F32, 1.0 / 127.0))
    shares = e.splat(inverse(e, scale))
    total = e.zero(e.vi)
    for i, value in enumerate(values):
        integers = e.round(e.b.fmul(value, shares))
        total = e.b.add(total, integers)
        e.store(e.b.trunc(integers, ir.VectorType(I8, e.lanes)), codes, i * e.lanes)
    e.store(scale if factor == 1.0 else e.b.fmul(scale, e.const(F32, factor)), words)
    e.store(e.b.mul(e.reduce(total, e.b.add), ir.Constant(I32, -_offset(e, kind))), words, 4)


class PackedKeys:
    """Scores of a few queries with the keys of a page.

    Each query is held as int8 (dim), then for each block its scale, and -offset * its sum.
    """

    def __init__(self, e: Emitter, kind: CacheType, dim: int, queries: list[Value]) -> None:
        self._kind, self._dim = kind, dim
        self._n_blocks = dim // BLOCK
        self._stride = dim + 8 * self._n_blocks
        self._at = _space(e, self._stride * len(queries))
        self._n = len(queries)
        for r, query in enumerate(queries):
            out = e.add(self._at, r * self._stride)
            with e.loop(0, self._n_blocks) as block:
                round_block(e, kind, e.add(query, e.mul(block, 4 * BLOCK)), e.add(out, e.mul(block, BLOCK)),
                            e.add(out, dim, e.mul(block, 8)))  # fmt: skip

    def scores(self, e: Emitter, page: Value, vector: int, ahead: Value | None = None) -> list[Value]:
        """q . k with `lanes` positions of the page, from vector * lanes on: a vector for each query.

        ahead:  how far away the page is that is asked for meanwhile
        """
        kind, place = self._kind, 4 * vector * e.lanes
        scales_at = self._dim * PAGE * kind.bits // 8 + 2 * vector * e.lanes
        totals = [e.var(e.zero(e.vf)) for _ in range(self._n)]
        signed = kind.bits == 8 and e.isa.dot != "vnni"
        with e.loop(0, self._n_blocks) as block:
            codes = e.add(page, e.mul(block, BLOCK * PAGE * kind.bits // 8))
            words = e.add(self._at, self._dim, e.mul(block, 8))
            queries = e.add(self._at, e.mul(block, BLOCK))
            sums = [e.broadcast(I32, words, r * self._stride + 4) for r in range(self._n)]
            for row in range(kind.bits):
                if ahead is not None:
                    e.prefetch(e.add(codes, ahead), row * 4 * PAGE)
                for half, quads in enumerate(_unpack(e, kind, codes, row * 4 * PAGE + place)):
                    for r in range(self._n):
                        query = e.broadcast_quad(e.add(queries, r * self._stride), 4 * half + row)
                        sums[r] = e.dot(sums[r], quads, query, signed)
            if ahead is not None:
                e.prefetch(e.add(page, ahead, e.mul(block, 2 * PAGE), scales_at), 0)
            scale = e.load_half(page, e.add(e.mul(block, 2 * PAGE), scales_at))
            for r in range(self._n):
                part = e.b.fmul(e.to_float(sums[r]), e.broadcast(F32, words, r * self._stride))
                totals[r].set(e.fma(part, scale, totals[r].get()))
        return [total.get() for total in totals]


class PackedValues:
    """Adds the weighted values of up to n_pages pages to the results of a few queries."""

    def __init__(self, e: Emitter, kind: CacheType, dim: int, outs: list[Value], n_pages: int) -> None:
        self._kind, self._dim, self._outs = kind, dim, outs
        self._step = n_pages * PAGE
        self._at = _space(e, 2 * self._step * len(outs))  # for each query the high bytes, then the low ones
        self._scales_at = dim * PAGE * kind.bits // 8
        self._n_vectors = BLOCK // e.lanes
        rows = max(1, (24 if e.isa.registers == 32 else 8) // (2 * len(outs)))
        self._together = 1 << min(rows, self._n_vectors).bit_length() - 1

    def add(
        self,
        e: Emitter,
        weights: list[Value],
        largest: list[Value],
        found: Value,
        n_pages: Value,
        factors: list[Value],
        place: Value,
        bounds: tuple[Value, Value],
    ) -> None:
        """out = out * factor + weights . values of each query.

        weights:  addresses of float32 (n_pages * PAGE); largest: their maxima, scalars
        found:    address of the pages' addresses, and of how far from each the page is that is asked for meanwhile
        place:    position of the first page; bounds: int32 vectors, positions [low, high) that some query sees
        """
        n = len(self._outs)
        shares = []  # what weights are multiplied by, so that the largest becomes LARGEST
        for most in largest:
            shares.append(e.splat(e.b.fmul(inverse(e, most), e.const(F32, LARGEST))))
        with e.loop(0, self._dim // BLOCK) as block:
            at = e.add(e.mul(block, 2 * PAGE), self._scales_at)
            scale = self._largest_scale(e, found, n_pages, at, place, bounds)
            sums = self._round(e, weights, shares, inverse(e, scale), found, n_pages, at)
            units = [e.b.fmul(e.b.fmul(most, scale), e.const(F32, 1 / LARGEST)) for most in largest]
            for first in range(0, self._n_vectors, self._together):
                self._add_block(e, block, first, found, n_pages, sums, [e.splat(units[r]) for r in range(n)], factors)

    def _ahead(self, e: Emitter, found: Value, j: Value) -> Value:
        return e.load(I64, found, e.add(e.mul(j, 8), 8 * self._step // PAGE))

    def _largest_scale(
        self, e: Emitter, found: Value, n_pages: Value, at: Value, place: Value, bounds: tuple[Value, Value]
    ) -> Value:
        """Of positions that are seen, lest what stands beside them changes how weights are rounded."""
        most = e.var(e.zero(e.vf))
        lane = ir.Constant(e.vi, list(range(e.lanes)))
        with e.loop(0, n_pages) as j:
            page = e.load(I64, found, e.mul(j, 8))
            e.prefetch(e.add(page, at, self._ahead(e, found, j)), 0)
            for i in range(0, PAGE, e.lanes):
                places = e.b.add(e.splat(e.b.trunc(e.add(place, e.mul(j, PAGE), i), I32)), lane)
                seen = e.b.and_(
                    e.b.icmp_signed(">=", places, bounds[0]),
                    e.b.icmp_signed("<", places, bounds[1]),
                )
                scale = e.fabs(e.load_half(page, e.add(at, 2 * i)))
                most.set(e.maximum(most.get(), e.b.select(seen, scale, e.zero(e.vf))))
        return e.reduce(most.get(), e.maximum)

    def _round(
        self,
        e: Emitter,
        weights: list[Value],
        shares: list[Value],
        unit: Value,
        found: Value,
        n_pages: Value,
        at: Value,
    ) -> list[Value]:
        """Fills the bytes of weights times scales; returns for each query -offset * their sum as an int32 vector."""
        totals = [e.var(e.zero(e.vi)) for _ in weights]
        unit = e.splat(unit)
        bytes_ = ir.VectorType(I8, e.lanes)
        with e.loop(0, n_pages) as j:
            page = e.load(I64, found, e.mul(j, 8))
            for i in range(0, PAGE, e.lanes):
                scale = e.b.fmul(e.load_half(page, e.add(at, 2 * i)), unit)
                place = e.add(e.mul(j, PAGE), i)
                for r, weight_at in enumerate(weights):
                    weight = e.b.fmul(e.load(e.vf, weight_at, e.mul(place, 4)), shares[r])
                    bits = e.b.bitcast(e.fma(weight, scale, e.const(e.vf, MAGIC)), e.vi)
                    totals[r].set(e.b.add(totals[r].get(), bits))
                    out = e.add(self._at, e.add(place, 2 * self._step * r))
                    e.store(e.b.trunc(e.b.lshr(bits, e.const(e.vi, 7)), bytes_), out)
                    e.store(e.b.trunc(e.b.and_(bits, e.const(e.vi, 127)), bytes_), out, self._step)
        offset = _offset(e, self._kind)
        results = []
        surplus = e.b.mul(
            e.b.trunc(n_pages, I32), ir.Constant(I32, (PAGE * MAGIC_BITS + (1 << 31)) % (1 << 32) - (1 << 31))
        )
        for total in totals:
            whole = e.b.sub(e.reduce(total.get(), e.b.add), surplus)
            results.append(e.splat(e.b.mul(whole, ir.Constant(I32, -offset))))
        return results

    def _add_block(
        self,
        e: Emitter,
        block: Value,
        first: int,
        found: Value,
        n_pages: Value,
        sums: list[Value],
        units: list[Value],
        factors: list[Value],
    ) -> None:
        kind, together = self._kind, self._together
        signed = kind.bits == 8 and e.isa.dot != "vnni"
        row_bytes = self._dim * 4 * kind.bits // 8  # of four positions
        start = e.mul(block, 4 * BLOCK * kind.bits // 8)
        totals = [[(e.var(e.zero(e.vi)), e.var(e.zero(e.vi))) for _ in range(together)] for _ in self._outs]
        half = self._n_vectors // 2  # vectors of low nibbles
        with e.loop(0, n_pages) as j:
            page = e.add(e.load(I64, found, e.mul(j, 8)), start)
            weights = e.add(self._at, e.mul(j, PAGE))
            ahead = self._ahead(e, found, j)
            for quad in range(PAGE // 4):
                codes: dict[int, Value] = {}
                for i in range(first, first + together):
                    if i not in codes:
                        stored = i if kind.bits == 8 else i % half
                        place = quad * row_bytes + 4 * e.lanes * stored
                        if place % 64 == 0:
                            e.prefetch(e.add(page, ahead), place)
                        vectors = _unpack(e, kind, page, place)
                        codes.update(zip((stored, stored + half), vectors, strict=False))
                for r, total in enumerate(totals):
                    at = e.add(weights, 2 * self._step * r)
                    parts = e.broadcast_quad(at, quad), e.broadcast_quad(e.add(at, self._step), quad)
                    for i in range(together):
                        for part, x in zip(total[i], parts, strict=True):
                            part.set(e.dot(part.get(), codes[first + i], x, signed))
        for r, out in enumerate(self._outs):
            for i in range(together):
                high, low = (part.get() for part in totals[r][i])
                whole = e.b.add(e.b.add(e.b.shl(high, e.const(e.vi, 7)), low), sums[r])
                at = e.add(e.mul(block, 4 * BLOCK), 4 * e.lanes * (first + i))
                before = e.b.fmul(e.load(e.vf, out, at), e.splat(factors[r]))
                e.store(e.fma(e.to_float(whole), units[r], before), out, at)


def key_tiles(e: Emitter, kind: CacheType, dim: int, key: Value, out: Value, rest: Value | None = None) -> None:
    """A page's keys, and another's added to them, as rows of bf16 tiles (see `attention_tiles.py`)."""
    pages = [key] if rest is None else [key, rest]
    with e.loop(0, dim // BLOCK) as block:
        codes = [e.add(page, e.mul(block, BLOCK * PAGE * kind.bits // 8)) for page in pages]
        scales_at = e.add(e.mul(block, 2 * PAGE), dim * PAGE * kind.bits // 8)
        scales = [e.load_half(page, scales_at) for page in pages]
        rows = e.add(out, e.mul(block, BLOCK // 2 * 64))
        for row in range(kind.bits):
            words = [e.load(e.vi, at, row * 64) for at in codes]
            for half in range(8 // kind.bits):
                parts = [_floats(e, kind, word, half, [scale] * 4) for word, scale in zip(words, scales, strict=True)]
                a, b, c, d = parts[0] if rest is None else map(e.b.fadd, *parts)
                place = (row + 4 * half) * 128
                e.store(bfloat_pairs(e, a, b), rows, place)
                e.store(bfloat_pairs(e, c, d), rows, place + 64)


def value_tiles(e: Emitter, kind: CacheType, dim: int, value: Value, out: Value, tile: int) -> None:
    """A page's values as rows of bf16 tiles of `tile` bytes (see `attention_tiles.py`)."""
    row_bytes = dim * 4 * kind.bits // 8
    with e.loop(0, dim // BLOCK) as block:
        codes = e.add(value, e.mul(block, 4 * BLOCK * kind.bits // 8))
        scales = e.add(value, e.mul(block, 2 * PAGE), dim * PAGE * kind.bits // 8)
        tiles = e.add(out, e.mul(block, 2 * tile))
        for quad in range(PAGE // 4):
            # one scale for each position, which is for each byte of a quad
            found = [e.splat(_half(e, scales, 2 * (4 * quad + i))) for i in range(4)]
            words = [e.load(e.vi, codes, quad * row_bytes + 64 * i) for i in range(kind.bits // 4)]
            for i in range(2):
                half, word = (i, words[0]) if kind.bits == 4 else (0, words[i])
                a, b, c, d = _floats(e, kind, word, half, found)
                e.store(bfloat_pairs(e, a, b), tiles, i * tile + 128 * quad)
                e.store(bfloat_pairs(e, c, d), tiles, i * tile + 128 * quad + 64)


def _half(e: Emitter, address: Value, offset: int) -> Value:
    """A float16 as a scalar float32."""
    bits = e.splat(e.load(I16, address, offset), 8)
    return e.b.extract_element(e.from_half(bits), ir.Constant(I32, 0))


def _floats(e: Emitter, kind: CacheType, words: Value, half: int, scales: list[Value]) -> list[Value]:
    """The four bytes of each 32 bits (or their low or high halves), less the offset, times a scale each: float32.

    A code that is put into the mantissa of 256 makes it larger by itself.
    """
    parts = []
    for i, scale in enumerate(scales):
        place = 15 - 8 * i - kind.bits * half
        moved = e.b.shl(words, e.const(e.vi, place)) if place > 0 else e.b.lshr(words, e.const(e.vi, -place))
        code = e.b.and_(moved, e.const(e.vi, (1 << kind.bits) - 1 << 15))
        number = e.b.bitcast(e.b.or_(code, e.const(e.vi, 0x43800000)), e.vf)
        parts.append(e.fma(number, scale, e.b.fmul(scale, e.const(e.vf, -256.0 - kind.offset))))
    return parts
