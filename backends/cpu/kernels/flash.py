"""Attention with online softmax over a paged cache: the emitter that all attention kernels share.

Several rows (query heads of one key-value head, of one or a few tokens) pass over the keys together, so that each
key and value is loaded and converted once for all of them. Nothing of size n_ctx is stored.

Beside each line of a page the same line of a later page is asked for: reading memory takes as long as computing, and
a page's lines asked for in one go would keep each other waiting. Of float keys a quarter each comes from four pages
at once, since processors fetch ahead by themselves within each of several streams.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir
from numba.core import cgutils

from edgert.backends.cpu.kernels.packed import PackedKeys, PackedValues
from edgert.backends.cpu.layouts import AHEAD, PAGE, CacheType
from edgert.backends.cpu.simd import F32, I32, I64, Emitter, Value

PAGES = 8  # pages between two updates of the running maximum
STEP = PAGES * PAGE
STREAMS = 4
assert PAGES + STREAMS - 1 <= AHEAD
MASKED, NOTHING = -1e30, -1e20  # a masked score, and a maximum below all scores but above that


MOST_ROWS = 16  # that pass over the keys together: more would not find room in registers


def parts_of(group: int) -> tuple[int, int]:
    """In how many parts a group of queries passes over the keys, and how many queries are in all but the last."""
    n = -(-group // MOST_ROWS)
    return n, -(-group // n)


@dataclass(frozen=True)
class Row:
    """One query: address of its float32 (head_dim), the positions [begin, end) that it sees, where its result goes.

    The result is float32 (head_dim) of unnormalised sums, then the maximum and the sum of the weights.
    """

    q: Value
    begin: Value
    end: Value
    out: Value


def attend(
    e: Emitter,
    dim: int,
    kinds: tuple[CacheType, CacheType],
    rows: list[Row],
    keys: Value,
    values: Value,
    stride: Value,
    pages: Value,
    begin: Value,
    end: Value,
    softcap: Value | None = None,
) -> None:
    """Runs the rows over positions [begin, end) of one sequence.

    kinds:         how keys and values are held
    softcap:       float32 bits of c: scores s become c * tanh(s / c)
    keys, values:  addresses of the head's part of page 0; a page's is `stride` bytes after the one before
    pages:         address of the sequence's int32 page numbers
    """
    n_rows, n_vectors = len(rows), PAGE // e.lanes
    kind_k, kind_v = kinds
    packed_keys = PackedKeys(e, kind_k, dim, [row.q for row in rows]) if kind_k.is_packed else None
    packed_values = PackedValues(e, kind_v, dim, [row.out for row in rows], PAGES) if kind_v.is_packed else None
    scores = cgutils.alloca_once(e.b, F32, size=n_rows * STEP)
    scores_at = e.b.ptrtoint(scores, I64)
    # addresses of the values of the pages at hand, and how far from each those of a step later are
    pages_at = e.b.ptrtoint(cgutils.alloca_once(e.b, I64, size=2 * PAGES), I64)
    maxima = [e.var(e.const(F32, NOTHING)) for _ in rows]
    sums = [e.var(e.zero(F32)) for _ in rows]
    for row in rows:
        with e.loop(0, dim, e.lanes) as k:
            e.store(e.zero(e.vf), row.out, e.mul(k, 4))
    lane = ir.Constant(e.vi, list(range(e.lanes)))
    masked = e.const(e.vf, MASKED)
    bounds = [
        tuple(e.splat(e.b.trunc(value, I32)) for value in (row.begin, row.end)) for row in rows
    ]  # as int32 vectors
    first_page = e.b.sdiv(begin, e.i64(PAGE))
    last_page = e.b.sdiv(e.add(end, PAGE - 1), e.i64(PAGE))

    def offset_of(entry: Value, later: int = 0) -> Value:
        return e.mul(stride, e.b.sext(e.load(I32, e.add(pages, e.mul(entry, 4)), 4 * later), I64))

    with e.loop(first_page, last_page, PAGES) as page:
        left = e.b.sub(last_page, page)
        n_pages = e.b.select(e.b.icmp_signed("<", left, e.i64(PAGES)), left, e.i64(PAGES))
        with e.loop(0, n_pages) as j:
            offset = offset_of(e.add(page, j))
            aheads = [e.b.sub(offset_of(e.add(page, j), PAGES + i), offset) for i in range(STREAMS)]
            e.store(e.add(values, offset), pages_at, e.mul(j, 8))
            e.store(aheads[0], pages_at, e.add(e.mul(j, 8), 8 * PAGES))
            key = e.add(keys, offset)
            for v in range(n_vectors):
                if packed_keys:
                    dots = packed_keys.scores(e, key, v, None if v else aheads[0])
                else:
                    dots = _scores(e, dim, rows, e.add(key, 2 * v * e.lanes), [] if v else aheads)
                position = e.add(e.mul(e.add(page, j), PAGE), v * e.lanes)
                places = e.b.add(e.splat(e.b.trunc(position, I32)), lane)
                for r, dot in enumerate(dots):
                    low, high = bounds[r]
                    seen = e.b.and_(e.b.icmp_signed(">=", places, low), e.b.icmp_signed("<", places, high))
                    at = e.add(e.mul(j, PAGE * 4), (r * STEP + v * e.lanes) * 4)
                    e.store(e.b.select(seen, dot, masked), scores_at, at)
            if packed_keys and kind_k.refined:
                with e.b.if_then(e.b.icmp_signed("==", e.add(page, j), e.i64(0))):
                    rest = e.add(keys, offset_of(e.i64(-1)))
                    for v in range(n_vectors):
                        for r, dot in enumerate(packed_keys.scores(e, rest, v)):
                            at = 4 * (r * STEP + v * e.lanes)
                            e.store(e.b.fadd(e.load(e.vf, scores_at, at), dot), scores_at, at)
        weights = [e.add(scores_at, r * STEP * 4) for r in range(n_rows)]
        if softcap is not None:
            for at in weights:
                _cap(e, at, e.mul(n_pages, PAGE), softcap)
        found = [
            _softmax(e, weights[r], e.mul(n_pages, PAGE), maxima[r], sums[r], bool(packed_values))
            for r in range(n_rows)
        ]
        corrections = [correction for correction, _ in found]
        if packed_values:
            largest = [most for _, most in found]
            seen = bounds[0][0], bounds[-1][1]  # rows stand in the order of their positions
            packed_values.add(e, weights, largest, pages_at, n_pages, corrections, e.mul(page, PAGE), seen)
        else:
            _add_values(e, dim, rows, scores_at, pages_at, n_pages, corrections)
    for r, row in enumerate(rows):
        e.store(maxima[r].get(), row.out, dim * 4)
        e.store(sums[r].get(), row.out, dim * 4 + 4)


def _scores(e: Emitter, dim: int, rows: list[Row], key: Value, aheads: list[Value]) -> list[Value]:
    """q . k of each row with `lanes` positions side by side; enough chains to hide the multiply's latency.

    aheads:  how far away the keys are that are asked for meanwhile, the farthest last
    """
    chains = 1
    while chains * 2 * len(rows) <= 8 and dim % (chains * 2) == 0:
        chains *= 2
    parts = len(aheads) if aheads and dim % (chains * len(aheads)) == 0 else 1
    totals = [[e.var(e.zero(e.vf)) for _ in range(chains)] for _ in rows]
    for part in range(parts):
        with e.loop(dim * part // parts, dim * (part + 1) // parts, chains) as d:
            for c in range(chains):
                at = e.mul(e.add(d, c), PAGE * 2)
                if aheads and c % 2 == 0:
                    e.prefetch(e.add(key, aheads[parts - 1 - part], at), 0)
                k = e.load_half(key, at)
                for row, total in zip(rows, totals, strict=True):
                    q = e.broadcast(F32, row.q, e.mul(e.add(d, c), 4))
                    total[c].set(e.fma(k, q, total[c].get()))
    results = []
    for total in totals:
        sums = [chain.get() for chain in total]
        while len(sums) > 1:
            sums = [e.b.fadd(sums[i], sums[i + 1]) for i in range(0, len(sums), 2)]
        results.append(sums[0])
    return results


def _cap(e: Emitter, scores: Value, count: Value, softcap: Value) -> None:
    """Caps scores in place; masked ones stay as they are."""
    cap = e.splat(e.real(softcap))
    inverse = e.b.fdiv(e.const(e.vf, 1.0), cap)
    with e.loop(0, count, e.lanes) as k:
        at = e.mul(k, 4)
        score = e.load(e.vf, scores, at)
        capped = e.b.fmul(cap, e.tanh(e.b.fmul(score, inverse)))
        masked = e.b.fcmp_ordered("<", score, e.const(e.vf, NOTHING))
        e.store(e.b.select(masked, score, capped), scores, at)


def _softmax(  # type: ignore[no-untyped-def]
    e: Emitter, scores: Value, count: Value, maximum, total, want_largest: bool
) -> tuple[Value, Value | None]:
    """Scores -> weights in place; returns what earlier sums are multiplied by, and the largest weight if wanted."""
    largest = e.var(e.const(e.vf, NOTHING))
    with e.loop(0, count, e.lanes) as k:
        largest.set(e.maximum(largest.get(), e.load(e.vf, scores, e.mul(k, 4))))
    before = maximum.get()
    most = e.reduce(largest.get(), e.maximum)
    after = e.maximum(before, most)
    maximum.set(after)
    part = e.var(e.zero(e.vf))
    with e.loop(0, count, e.lanes) as k:
        at = e.mul(k, 4)
        weight = e.exp(e.b.fsub(e.load(e.vf, scores, at), e.splat(after)))
        part.set(e.b.fadd(part.get(), weight))
        e.store(weight, scores, at)
    correction = _exp(e, e.b.fsub(before, after))
    total.set(e.b.fadd(e.b.fmul(total.get(), correction), e.sum(part.get())))
    return correction, _exp(e, e.b.fsub(most, after)) if want_largest else None


def sink_weight(e: Emitter, sinks: Value, offset: int, maximum: Value) -> Value:
    """What a head's sink adds to the sum of the weights, which are relative to the maximum."""
    return _exp(e, e.b.fsub(e.load(F32, sinks, offset), maximum))


def _exp(e: Emitter, x: Value) -> Value:
    """Of a scalar."""
    return e.b.extract_element(e.exp(e.splat(x)), ir.Constant(I32, 0))


def _add_values(
    e: Emitter, dim: int, rows: list[Row], scores: Value, found: Value, n_pages: Value, corrections: list[Value]
) -> None:
    """out = out * correction + weights . values, a few vectors of the head at a time in registers."""
    budget = 24 if e.isa.registers == 32 else 10
    width = max(1, budget // len(rows))
    while dim % (width * e.lanes):
        width -= 1
    with e.loop(0, dim, width * e.lanes) as d:
        at = e.mul(d, 4)
        totals = []
        for row, correction in zip(rows, corrections, strict=True):
            factor = e.splat(correction)
            totals.append(
                [e.var(e.b.fmul(e.load(e.vf, row.out, e.add(at, 4 * i * e.lanes)), factor)) for i in range(width)]
            )
        with e.loop(0, n_pages) as j:
            page = e.add(e.load(I64, found, e.mul(j, 8)), e.mul(d, 2))
            later = e.load(I64, found, e.add(e.mul(j, 8), 8 * PAGES))
            with e.loop(0, PAGE) as p:
                value = e.add(page, e.mul(p, dim * 2))
                vectors = [e.load_half(value, 2 * i * e.lanes) for i in range(width)]
                for line in range(0, 2 * width * e.lanes, 64):
                    e.prefetch(e.add(value, later), line)
                weight_at = e.mul(e.add(e.mul(j, PAGE), p), 4)
                for r, total in enumerate(totals):
                    weight = e.broadcast(F32, scores, e.add(weight_at, r * STEP * 4))
                    for i in range(width):
                        total[i].set(e.fma(vectors[i], weight, total[i].get()))
        for row, total in zip(rows, totals, strict=True):
            for i in range(width):
                e.store(total[i].get(), row.out, e.add(at, 4 * i * e.lanes))
