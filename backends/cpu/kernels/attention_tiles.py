"""Attention of whole windows in bf16: scores and weighted values are products of pairs summed in float32.

Tile instructions multiply where the processor has them. Without, vectors of pairs do so with the values' tiles
(`bfloat_dots.py`), and keys, which must be int8, are multiplied as they are (`byte_scores.py`).

A unit of work is a window of 64 tokens and a key-value head. Keys and values are taken SPAN positions at a time,
turned into tiles once, and used by all the window's queries. A thread's scratch holds, in this order:

    keys     bf16 tiles (SPAN / 16, head_dim / 32): row d/2 holds for 16 positions the pair d, d+1
    values   bf16 tiles (SPAN / 32, head_dim / 16): row p/2 holds for 16 dimensions the pair of positions p, p+1
    scores   float32 tiles (SPAN / 16) of 16 queries
    weights  bf16 tiles (SPAN / 32) of the same
    then for each tile of 16 queries (group * 4): q as bf16 tiles (head_dim / 32), results as float32 tiles
    (head_dim / 16), and 16 maxima and 16 sums of float32
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
from edgert.backends.cpu.kernels.bfloat_dots import bfloat_halves, weigh_by_dots
from edgert.backends.cpu.kernels.byte_scores import round_queries, score_bytes
from edgert.backends.cpu.kernels.hadamard import hadamard
from edgert.backends.cpu.kernels.packed import key_tiles, value_tiles
from edgert.backends.cpu.layouts import ATTENTION_SPAN as SPAN
from edgert.backends.cpu.layouts import CACHE_TYPES, PAGE, TILE, WINDOW, CacheType
from edgert.backends.cpu.simd import F32, I16, I32, Emitter, Value, bfloat_pairs, emitted, int32_at, to_bfloat, word

ARGUMENTS = (
    "q",  # float32 rows: heads of q first
    "q_stride",  # bytes
    "n_rows_at",  # rows 0..n-1, windows of 64 tokens of one sequence
    "positions",
    "slots",
    "pages",
    "max_pages",
    "keys",
    "values",
    "page_stride",  # bytes from a page to the next
    "window",
    "out",  # bf16 tiles (n_rows / 16, n_head * head_dim / 32), or without tile instructions float32 rows
    "scratch",
    "scratch_stride",
    "softcap",  # float32 bits: what scores are capped at
    "sinks",  # float32 (n_head): scores of a position without value, where the family has one
)
LOG2_E = 1.4426950408889634
# 2**r for 0 <= r < 1, to 4e-6: far below what bf16 weights keep.
POWERS = (1.000007283, 0.692931289, 0.241710262, 0.051666877, 0.013676531)
MASKED, NOTHING = -1e30, -1e20


def build(
    isa: Isa,
    n_head: str,
    n_head_kv: str,
    head_dim: str,
    type_k: str,
    type_v: str,
    capped: str = "no",
    sinks: str = "no",
) -> Callable[[int, int, int], None]:
    """A kernel for one shape of heads; head_dim is a multiple of 32, and type_k without tile instructions of bytes."""
    heads, heads_kv, dim = int(n_head), int(n_head_kv), int(head_dim)
    group = heads // heads_kv
    q_tiles, v_tiles = dim // 32, dim // 16
    per_query_tile = (q_tiles + v_tiles) * TILE + 128
    # Bytes of the output from 16 tokens to the next, and from a head to the next.
    out_tokens, out_head = (heads * dim * 32, dim * 32) if isa.tiles else (heads * dim * 64, dim * 4)

    configure = emitted(isa, 1, configure_tiles if isa.tiles else lambda *_: None)
    release = emitted(isa, 0, release_tiles if isa.tiles else lambda *_: None)
    kinds = CACHE_TYPES[type_k], CACHE_TYPES[type_v]
    head_bytes = kinds[0].page_bytes(dim) + kinds[1].page_bytes(dim)
    convert_page = emitted(isa, 4, lambda e, *a: _convert_page(e, kinds, dim, *a))
    convert_first = emitted(isa, 3, lambda e, *a: key_tiles(e, kinds[0], dim, *a)) if kinds[0].refined else convert_page
    refined = kinds[0].refined
    most_parts = 1 if isa.tiles else group
    start = emitted(isa, 3, lambda e, *a: _start(e, kinds[0], dim, *a))
    score = emitted(isa, 4, lambda e, *a: _score(e, q_tiles, *a) if isa.tiles else score_bytes(e, dim, *a))
    soften = emitted(isa, 9, lambda e, *a: _soften(e, v_tiles, capped == "yes", *a))
    weigh = emitted(isa, 4, lambda e, *a: (_weigh if isa.tiles else weigh_by_dots)(e, v_tiles, *a))
    finish = emitted(isa, 3, lambda e, *a: _finish(e, dim, heads, kinds[1].rotated, sinks == "yes", *a))

    def attention(thread, n_threads, a):
        n_units = word(word(a, 2), 0) // WINDOW * heads_kv
        window = word(a, 10)
        keys_at = word(a, 12) + thread * word(a, 13) + 64
        values_at = keys_at + SPAN // 16 * q_tiles * TILE
        scores = values_at + SPAN // 32 * v_tiles * TILE
        weights = scores + SPAN // 16 * TILE
        queries = weights + SPAN // 32 * TILE
        configure(keys_at - 64)
        # Where there are few units the heads of a group are taken apart, though each part converts the keys again.
        parts = min(most_parts, (4 * n_threads - 1) // max(1, n_units) + 1)
        unit = n_units * parts - 1 - thread  # later windows see more keys: they start first
        while unit >= 0:
            row = unit // (heads_kv * parts) * WINDOW
            head = unit // parts % heads_kv
            part = unit % parts
            first_tile, last_tile = 4 * (group * part // parts), 4 * (group * (part + 1) // parts)
            position = word(word(a, 3), row)
            pages = word(a, 5) + word(word(a, 4), row) * word(a, 6) * 4
            inner = head * head_bytes
            for tile in range(first_tile, last_tile):
                g, t = tile // 4, row + tile % 4 * 16
                q = word(a, 0) + t * word(a, 1) + (head * group + g) * dim * 4
                start(q, word(a, 1), queries + tile * per_query_tile)
            end = position + WINDOW
            begin = max(0, position + 1 - window) // 32 * 32 if window else 0
            for base in range(begin, end, SPAN):
                n_pages = (min(SPAN, end - base) + PAGE - 1) // PAGE
                for j in range(n_pages):
                    offset = int32_at(pages, base // PAGE + j) * word(a, 9) + inner
                    convert_page(word(a, 7) + offset, word(a, 8) + offset, keys_at + j * q_tiles * TILE,
                                 values_at + j // 2 * v_tiles * TILE + j % 2 * 512)  # fmt: skip
                    if refined and base + j == 0:
                        rest = word(a, 7) + int32_at(pages, -1) * word(a, 9) + inner
                        convert_first(word(a, 7) + offset, keys_at, rest)
                for tile in range(first_tile, last_tile):
                    first = position + tile % 4 * 16  # the tile's first query
                    seen = min(n_pages, (first + 16 - base + 31) // 32 * 2)
                    if seen <= 0:
                        continue
                    query = queries + tile * per_query_tile
                    for j in range(0, seen, 4):
                        score(query, keys_at + j * q_tiles * TILE, scores + j * TILE, min(4, seen - j))
                    masks = base + seen * PAGE > first + 1 or (window and base < first + 16 - window)
                    soften(scores, weights, query + q_tiles * TILE, seen, base, first, window, 1 if masks else 0,
                           word(a, 14))  # fmt: skip
                    weigh(weights, values_at, query + q_tiles * TILE, seen // 2)
            for tile in range(first_tile, last_tile):
                g, t = tile // 4, row + tile % 4 * 16
                out = word(a, 11) + t // 16 * out_tokens + (head * group + g) * out_head
                finish(queries + tile * per_query_tile + q_tiles * TILE, out, word(a, 15) + (head * group + g) * 4)
            unit -= n_threads
        release()

    return attention


def _convert_page(
    e: Emitter,
    kinds: tuple[CacheType, CacheType],
    dim: int,
    key: Value,
    value: Value,
    key_rows: Value,
    value_rows: Value,
) -> None:
    """16 positions of a head -> their rows of the key tiles and of the value tiles."""
    if not e.isa.tiles:
        e.store(key, key_rows)
    elif kinds[0].is_packed:
        key_tiles(e, kinds[0], dim, key, key_rows)
    else:
        with e.loop(0, dim // 2) as pair:
            source = e.add(key, e.mul(pair, 4 * PAGE))
            both = bfloat_pairs(e, e.load_half(source), e.load_half(source, 2 * PAGE))
            e.store(both, key_rows, e.mul(pair, 64))
    if kinds[1].is_packed:
        value_tiles(e, kinds[1], dim, value, value_rows, TILE)
    else:
        with e.loop(0, dim // 16) as d:
            for pair in range(PAGE // 2):
                source = e.add(value, e.mul(d, 32), 4 * pair * dim)
                both = bfloat_pairs(e, e.load_half(source), e.load_half(source, 2 * dim))
                e.store(both, value_rows, e.add(e.mul(d, TILE), 64 * pair))


def _start(e: Emitter, kind: CacheType, dim: int, q: Value, stride: Value, query: Value) -> None:
    """16 queries, times log2(e), as bf16 tiles or int8; results, maxima and sums begin at nothing."""
    if e.isa.tiles:
        _query_tiles(e, dim, q, stride, query)
    else:
        round_queries(e, kind, dim, LOG2_E, q, stride, query)
    results = e.add(query, dim // 32 * TILE)
    with e.loop(0, dim // 16 * 16) as line:
        e.store(e.zero(e.vf), results, e.mul(line, 64))
    e.store(e.const(e.vf, NOTHING), results, dim // 16 * TILE)
    e.store(e.zero(e.vf), results, dim // 16 * TILE + 64)


def _query_tiles(e: Emitter, dim: int, q: Value, stride: Value, query: Value) -> None:
    factor = e.const(e.vf, LOG2_E)
    with e.loop(0, 16) as row:
        for k in range(dim // 16):
            value = e.b.fmul(e.load(e.vf, e.add(q, e.b.mul(stride, row)), 64 * k), factor)
            e.store(to_bfloat(e, value), query, e.add(e.mul(row, 64), k // 2 * TILE + k % 2 * 32))


def _score(e: Emitter, q_tiles: int, query: Value, keys: Value, scores: Value, n_pages: Value) -> None:
    """Scores of 16 queries with up to four pages."""
    for count in (4, 2):
        with e.b.if_then(e.b.icmp_signed("==", n_pages, e.i64(count))):
            for c in range(count):
                zero_tile(e, c)
            for k in range(q_tiles):
                load_tile(e, 4, e.at(query, k * TILE))
                for c in range(count):
                    load_tile(e, 5 + c % 3, e.at(keys, (c * q_tiles + k) * TILE))
                    multiply_tiles(e, c, 4, 5 + c % 3)
            for c in range(count):
                store_tile(e, c, e.at(scores, c * TILE))


def _power(e: Emitter, x: Value) -> Value:
    """2**x for x <= 0."""
    mask, rounding = ir.Constant(I16, -1), ir.Constant(I32, 4)
    floor = ir.Constant(I32, 9)  # x - floor(x), no exceptions
    r = e.call("llvm.x86.avx512.mask.reduce.ps.512", e.vf, x, floor, e.zero(e.vf), mask, rounding)
    p = e.const(e.vf, POWERS[4])
    for coefficient in (POWERS[3], POWERS[2], POWERS[1], POWERS[0]):
        p = e.fma(p, r, e.const(e.vf, coefficient))
    return e.call("llvm.x86.avx512.mask.scalef.ps.512", e.vf, p, x, e.zero(e.vf), mask, rounding)


def _soften(
    e: Emitter,
    v_tiles: int,
    capped: bool,
    scores: Value,
    weights: Value,
    results: Value,
    n_pages: Value,
    base: Value,
    first: Value,
    window: Value,
    masks: Value,
    softcap: Value,
) -> None:
    """Scores -> bf16 weights; earlier results are rescaled to the new maxima."""
    state = e.add(results, v_tiles * TILE)
    if capped:
        _cap(e, scores, n_pages, softcap)
    with e.b.if_then(e.b.icmp_signed("!=", masks, e.i64(0))):
        _mask(e, scores, n_pages, base, first, window)
    with e.loop(0, 16) as row:
        line = e.add(scores, e.mul(row, 64))
        largest = e.var(e.const(e.vf, NOTHING))
        with e.loop(0, n_pages) as j:
            largest.set(e.maximum(largest.get(), e.load(e.vf, line, e.mul(j, TILE))))
        at = e.mul(row, 4)
        before = e.load(F32, state, at)
        after = e.maximum(before, e.reduce(largest.get(), e.maximum))
        e.store(after, state, at)
        shift = e.splat(after)
        part = e.var(e.zero(e.vf))
        out = e.add(weights, e.mul(row, 64))
        with e.loop(0, n_pages, 2) as j:
            both = []
            for i in range(2):
                both.append(_power(e, e.b.fsub(e.load(e.vf, line, e.mul(e.add(j, i), TILE)), shift)))
                part.set(e.b.fadd(part.get(), both[i]))
                if e.isa.tiles:
                    e.store(to_bfloat(e, both[i]), out, e.add(e.mul(j, TILE // 2), 32 * i))
            if not e.isa.tiles:
                e.store(bfloat_halves(e, *both), out, e.mul(j, TILE // 2))
        factor = _power(e, e.splat(e.b.fsub(before, after)))
        scalar = e.b.extract_element(factor, ir.Constant(I32, 0))
        sum_at = e.add(at, 64)
        e.store(e.b.fadd(e.b.fmul(e.load(F32, state, sum_at), scalar), e.sum(part.get())), state, sum_at)
        with e.b.if_then(e.b.fcmp_ordered("!=", before, after)), e.loop(0, v_tiles) as d:
            place = e.add(e.mul(d, TILE), e.mul(row, 64))
            e.store(e.b.fmul(e.load(e.vf, results, place), factor), results, place)


def _cap(e: Emitter, scores: Value, n_pages: Value, softcap: Value) -> None:
    """Scores, which are in units of log2(e), to cap * tanh(score / cap)."""
    cap = e.splat(e.b.fmul(e.real(softcap), e.const(F32, LOG2_E)))
    inverse = e.b.fdiv(e.const(e.vf, 1.0), cap)
    with e.loop(0, e.mul(n_pages, 16)) as line:
        at = e.mul(line, 64)
        score = e.load(e.vf, scores, at)
        e.store(e.b.fmul(cap, e.tanh(e.b.fmul(score, inverse))), scores, at)


def _mask(e: Emitter, scores: Value, n_pages: Value, base: Value, first: Value, window: Value) -> None:
    """Hides positions after each query, and those before its window."""
    lane = ir.Constant(e.vi, list(range(16)))
    narrow = e.b.icmp_signed(">", window, e.i64(0))
    with e.loop(0, n_pages) as j:
        places = e.b.add(e.splat(e.b.trunc(e.add(base, e.mul(j, PAGE)), I32)), lane)
        with e.loop(0, 16) as row:
            query = e.add(first, row)
            low = e.b.select(narrow, e.b.sub(query, window), e.i64(-1))
            seen = e.b.and_(
                e.b.icmp_signed("<=", places, e.splat(e.b.trunc(query, I32))),
                e.b.icmp_signed(">", places, e.splat(e.b.trunc(low, I32))),
            )
            at = e.add(e.mul(j, TILE), e.mul(row, 64))
            e.store(e.b.select(seen, e.load(e.vf, scores, at), e.const(e.vf, MASKED)), scores, at)


def _weigh(e: Emitter, v_tiles: int, weights: Value, values: Value, results: Value, n_pairs: Value) -> None:
    """results += weights . values, four tiles of dimensions at a time (two where four do not divide)."""
    step = 4 if v_tiles % 4 == 0 else 2
    with e.loop(0, v_tiles, step) as d:
        at = e.mul(d, TILE)
        for c in range(step):
            load_tile(e, c, e.at(e.add(results, at), c * TILE))
        with e.loop(0, n_pairs) as k:
            load_tile(e, 4, e.at(e.add(weights, e.mul(k, TILE))))
            row = e.add(values, at, e.mul(k, v_tiles * TILE))
            for c in range(step):
                load_tile(e, 5 + c % 3, e.at(row, c * TILE))
                multiply_tiles(e, c, 4, 5 + c % 3)
        for c in range(step):
            store_tile(e, c, e.at(e.add(results, at), c * TILE))


def _finish(
    e: Emitter, dim: int, heads: int, rotated: bool, sinks: bool, results: Value, out: Value, sink: Value
) -> None:
    """results / sums -> the output, turned back where values are rotated."""
    state = e.add(results, dim // 16 * TILE)
    with e.loop(0, 16) as row:
        total = e.load(F32, state, e.add(e.mul(row, 4), 64))
        if sinks:
            score = e.b.fmul(e.load(F32, sink), e.const(F32, LOG2_E))
            more = _power(e, e.splat(e.b.fsub(score, e.load(F32, state, e.mul(row, 4)))))
            total = e.b.fadd(total, e.b.extract_element(more, ir.Constant(I32, 0)))
        inverse = e.b.fdiv(e.const(F32, 1.0), total)
        scale = e.splat(inverse)
        line = e.mul(row, 64)
        values = [e.b.fmul(e.load(e.vf, results, e.add(line, d * TILE)), scale) for d in range(dim // 16)]
        for d, value in enumerate(hadamard(e, values) if rotated else values):
            if e.isa.tiles:
                e.store(to_bfloat(e, value), out, e.add(line, d // 2 * TILE + d % 2 * 32))
            else:
                e.store(value, out, e.add(e.mul(row, heads * dim * 4), 64 * d))
