"""Products of bf16 tiles by vector instructions (vdpbf16ps), for processors that have these and no tile instructions.

The layouts are those of `attention_tiles.py`. The sums of 8 rows and two tiles of columns stand in registers while
pairs pass by: each vector of columns serves all rows, and each pair of a row that is broadcast serves both tiles. With
16 rows and one tile loads were the bottleneck, and took a third longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir

from edgert.backends.cpu.layouts import TILE
from edgert.backends.cpu.simd import I32, Emitter, Value, Var

ROWS = 8  # of the 16 of a tile, at a time
SIDE_BY_SIDE = 2  # tiles of columns
PAIRS = 16  # of a row of a tile
UNROLLED = 4  # pairs


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


PAIRED = ir.VectorType(_BFloat(), 32)


def dot_pairs(e: Emitter, sums: Value, left: Value, right: Value) -> Value:
    """sums[i] += the products of both bf16 numbers of each 32 bits."""
    pairs = e.b.bitcast(left, PAIRED), e.b.bitcast(right, PAIRED)
    return e.call("llvm.x86.avx512bf16.dpbf16ps.512", e.vf, sums, *pairs)


def bfloat_halves(e: Emitter, first: Value, second: Value) -> Value:
    """Two float32 vectors as bf16 one after the other, rounded to nearest even, in int32 words."""
    return e.b.bitcast(e.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRED, second, first), e.vi)


@contextmanager
def _sums(e: Emitter, out: Value) -> Iterator[list[list[Var]]]:
    """[row][tile]: what stands at `out`, which is put back in the end."""
    places = [[e.add(out, tile * TILE + 64 * row) for tile in range(SIDE_BY_SIDE)] for row in range(ROWS)]
    sums = [[e.var(e.load(e.vf, place)) for place in two] for two in places]
    yield sums
    for two, held in zip(places, sums, strict=True):
        for place, total in zip(two, held, strict=True):
            e.store(total.get(), place)


def _add_products(e: Emitter, sums: list[list[Var]], rows: Value, columns: Value) -> None:
    """The products of rows of pairs and of two tiles of columns."""
    with e.loop(0, PAIRS, UNROLLED) as pair:
        at, line = e.add(rows, e.mul(pair, 4)), e.add(columns, e.mul(pair, 64))
        for i in range(UNROLLED):
            vectors = [e.load(e.vi, line, tile * TILE + 64 * i) for tile in range(SIDE_BY_SIDE)]
            for row, held in enumerate(sums):
                both = e.broadcast(I32, at, 64 * row + 4 * i)
                for total, vector in zip(held, vectors, strict=True):
                    total.set(dot_pairs(e, total.get(), both, vector))


def weigh_by_dots(e: Emitter, v_tiles: int, weights: Value, values: Value, results: Value, n_pairs: Value) -> None:
    """results += weights . values, n_pairs of pages."""
    with e.loop(0, 16, ROWS) as row, e.loop(0, v_tiles, SIDE_BY_SIDE) as d:
        line = e.mul(row, 64)
        with _sums(e, e.add(results, line, e.mul(d, TILE))) as sums, e.loop(0, n_pairs) as k:
            tile = e.add(values, e.mul(e.add(e.mul(k, v_tiles), d), TILE))
            _add_products(e, sums, e.add(weights, line, e.mul(k, TILE)), tile)
