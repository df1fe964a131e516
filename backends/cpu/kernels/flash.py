"""Attention with online softmax over a paged cache: the emitter that all attention kernels share.

Several rows (query heads of one key-value head, of one or a few tokens) pass over the keys together, so that each
key and value is loaded and converted once for all of them. Nothing of size n_ctx is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir
from numba.core import cgutils

from edgert.backends.cpu.layouts import PAGE
from edgert.backends.cpu.simd import F32, I32, I64, Emitter, Value

PAGES = 8  # pages between two updates of the running maximum
STEP = PAGES * PAGE
AHEAD = 3  # pages between the one in work and the one asked for: pages of one head are far apart
MASKED, NOTHING = -1e30, -1e20  # a masked score, and a maximum below all scores but above that


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
    rows: list[Row],
    keys: Value,
    values: Value,
    stride: Value,
    pages: Value,
    begin: Value,
    end: Value,
) -> None:
    """Runs the rows over positions [begin, end) of one sequence.

    keys, values:  addresses of the head's part of page 0; a page's is `stride` bytes after the one before
    pages:         address of the sequence's int32 page numbers
    """
    n_rows, n_vectors = len(rows), PAGE // e.lanes
    scores = cgutils.alloca_once(e.b, F32, size=n_rows * STEP)
    scores_at = e.b.ptrtoint(scores, I64)
    found = cgutils.alloca_once(e.b, I64, size=PAGES)  # addresses of the values of the pages at hand
    found_at = e.b.ptrtoint(found, I64)
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
    with e.loop(first_page, last_page, PAGES) as page:
        left = e.b.sub(last_page, page)
        n_pages = e.b.select(e.b.icmp_signed("<", left, e.i64(PAGES)), left, e.i64(PAGES))
        with e.loop(0, n_pages) as j:
            at = e.mul(e.add(page, j), 4)
            offset = e.mul(stride, e.b.sext(e.load(I32, pages, at), I64))
            ahead = e.mul(stride, e.b.sext(e.load(I32, e.add(pages, at), 4 * AHEAD), I64))
            for line in range(0, dim * PAGE * 2, 64):
                e.prefetch(e.add(keys, ahead), line)
                e.prefetch(e.add(values, ahead), line)
            e.store(e.add(values, offset), found_at, e.mul(j, 8))
            key = e.add(keys, offset)
            for v in range(n_vectors):
                dots = _scores(e, dim, rows, e.add(key, 2 * v * e.lanes))
                position = e.add(e.mul(e.add(page, j), PAGE), v * e.lanes)
                places = e.b.add(e.splat(e.b.trunc(position, I32)), lane)
                for r, dot in enumerate(dots):
                    low, high = bounds[r]
                    seen = e.b.and_(e.b.icmp_signed(">=", places, low), e.b.icmp_signed("<", places, high))
                    at = e.add(e.mul(j, PAGE * 4), (r * STEP + v * e.lanes) * 4)
                    e.store(e.b.select(seen, dot, masked), scores_at, at)
        corrections = [
            _softmax(e, e.add(scores_at, r * STEP * 4), e.mul(n_pages, PAGE), maxima[r], sums[r]) for r in range(n_rows)
        ]
        _add_values(e, dim, rows, scores_at, found_at, n_pages, corrections)
    for r, row in enumerate(rows):
        e.store(maxima[r].get(), row.out, dim * 4)
        e.store(sums[r].get(), row.out, dim * 4 + 4)


def _scores(e: Emitter, dim: int, rows: list[Row], key: Value) -> list[Value]:
    """q . k of each row with `lanes` positions side by side; enough chains to hide the multiply's latency."""
    chains = 1
    while chains * 2 * len(rows) <= 8 and dim % (chains * 2) == 0:
        chains *= 2
    totals = [[e.var(e.zero(e.vf)) for _ in range(chains)] for _ in rows]
    with e.loop(0, dim, chains) as d:
        for c in range(chains):
            place = e.add(d, c)
            k = e.load_half(key, e.mul(place, PAGE * 2))
            for row, total in zip(rows, totals, strict=True):
                q = e.broadcast(F32, row.q, e.mul(place, 4))
                total[c].set(e.fma(k, q, total[c].get()))
    results = []
    for total in totals:
        parts = [part.get() for part in total]
        while len(parts) > 1:
            parts = [e.b.fadd(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]
        results.append(parts[0])
    return results


def _softmax(e: Emitter, scores: Value, count: Value, maximum, total) -> Value:  # type: ignore[no-untyped-def]
    """Scores -> weights in place; returns what earlier sums are multiplied by."""
    largest = e.var(e.const(e.vf, NOTHING))
    with e.loop(0, count, e.lanes) as k:
        largest.set(e.maximum(largest.get(), e.load(e.vf, scores, e.mul(k, 4))))
    before = maximum.get()
    after = e.maximum(before, e.reduce(largest.get(), e.maximum))
    maximum.set(after)
    part = e.var(e.zero(e.vf))
    with e.loop(0, count, e.lanes) as k:
        at = e.mul(k, 4)
        weight = e.exp(e.b.fsub(e.load(e.vf, scores, at), e.splat(after)))
        part.set(e.b.fadd(part.get(), weight))
        e.store(weight, scores, at)
    correction = e.b.extract_element(e.exp(e.splat(e.b.fsub(before, after))), ir.Constant(I32, 0))
    total.set(e.b.fadd(e.b.fmul(total.get(), correction), e.sum(part.get())))
    return correction


def _add_values(
    e: Emitter, dim: int, rows: list[Row], scores: Value, found: Value, n_pages: Value, corrections: list[Value]
) -> None:
    """out = out * correction + weights . values, a few vectors of the head at a time in registers."""
    budget = 24 if e.lanes == 16 else 10
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
            with e.loop(0, PAGE) as p:
                value = e.add(page, e.mul(p, dim * 2))
                vectors = [e.load_half(value, 2 * i * e.lanes) for i in range(width)]
                weight_at = e.mul(e.add(e.mul(j, PAGE), p), 4)
                for r, total in enumerate(totals):
                    weight = e.broadcast(F32, scores, e.add(weight_at, r * STEP * 4))
                    for i in range(width):
                        total[i].set(e.fma(vectors[i], weight, total[i].get()))
        for row, total in zip(rows, totals, strict=True):
            for i in range(width):
                e.store(total[i].get(), row.out, e.add(at, 4 * i * e.lanes))
