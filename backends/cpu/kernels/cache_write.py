"""One position's keys and values of a head: float32 -> their places in a page.

A page holds PAGE positions of one sequence, for each key-value head first the keys, then the values, so that a
head's part is read in one go. Keys are read by vectors of positions side by side, values by vectors of dimensions:

    f16     keys float16 (head_dim, PAGE); values float16 (PAGE, head_dim)
    q8_0    keys uint8 (head_dim / 4, PAGE, 4), values uint8 (PAGE / 4, head_dim, 4): as dot products take them
    q4_0    the same with two codes a byte: of each 32 dimensions the first 16 in the low nibbles, then
            keys (head_dim / 32, 4, PAGE, 4), values (PAGE / 4, head_dim / 32, 16, 4)
    packed types end with float16 scales (head_dim / 32, PAGE)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils

from edgert.backends.cpu.layouts import BLOCK, PAGE, CacheType
from edgert.backends.cpu.simd import F32, I8, I32, I64, Emitter, Value

SCALES = (1.0, 0.93, 0.86, 1.07)  # tried for 4 bits, as shares of that which takes in the largest value


def write(e: Emitter, kind: CacheType, side: str, dim: int, x: Value, page: Value, place: Value) -> None:
    """Stores float32 (dim) as position `place` of a page's keys or values (side "k" or "v").

    With refined types, x becomes what rounding left of it.
    """
    if kind.is_packed:
        _write_packed(e, kind, side, dim, x, page, place)
        return
    stride = 2 * PAGE if side == "k" else 2
    out = e.add(page, e.mul(place, 2 if side == "k" else 2 * dim))
    vector = ir.VectorType(F32, math.gcd(e.lanes, dim))
    with e.loop(0, dim, vector.count) as k:
        halves = e.to_half(e.load(vector, x, e.mul(k, 4)))
        for i in range(vector.count):
            value = e.b.extract_element(halves, ir.Constant(I32, i))
            e.store(value, out, e.mul(e.add(k, i), stride))


def _write_packed(e: Emitter, kind: CacheType, side: str, dim: int, x: Value, page: Value, place: Value) -> None:
    codes = e.b.ptrtoint(cgutils.alloca_once(e.b, I8, size=BLOCK), I64)
    n_bytes = BLOCK * kind.bits // 8
    with e.loop(0, dim // BLOCK) as block:
        at = e.mul(block, 4 * BLOCK)
        values = [e.load(e.vf, x, e.add(at, 4 * i)) for i in range(0, BLOCK, e.lanes)]
        scale, integers = quantize(e, kind, values)
        if kind.refined:
            unit = e.splat(e.b.fneg(e.b.extract_element(e.from_half(e.splat(scale, 8)), ir.Constant(I32, 0))))
            for i, (value, vector) in enumerate(zip(values, integers, strict=True)):
                code = e.to_float(e.b.sub(vector, e.const(e.vi, kind.offset)))
                e.store(e.fma(code, unit, value), x, e.add(at, 4 * i * e.lanes))
        if kind.bits == 4:
            half = len(integers) // 2
            pairs = zip(integers[:half], integers[half:], strict=True)
            integers = [e.b.or_(low, e.b.shl(high, e.const(e.vi, 4))) for low, high in pairs]
        one_by_one = side == "k" or e.lanes != 16
        if one_by_one:
            for i, vector in enumerate(integers):
                e.store(e.b.trunc(vector, ir.VectorType(I8, e.lanes)), codes, i * e.lanes)
        if side == "k":
            out = e.add(page, e.mul(block, n_bytes * PAGE), e.mul(place, 4))
            for quad in range(n_bytes // 4):
                e.store(e.load(I32, codes, 4 * quad), out, quad * 4 * PAGE)
        else:
            row = e.mul(e.b.lshr(place, e.i64(2)), dim * kind.bits // 2)
            out = e.add(page, row, e.mul(block, 4 * n_bytes))
            byte = e.b.and_(place, e.i64(3))
            if one_by_one:
                with e.loop(0, n_bytes) as i:
                    e.store(e.load(I8, codes, i), e.add(out, byte), e.mul(i, 4))
            else:
                _store_bytes(e, integers, out, byte)
        scales = e.add(page, dim * PAGE * kind.bits // 8, e.mul(place, 2))
        e.store(scale, scales, e.mul(block, 2 * PAGE))


def _store_bytes(e: Emitter, integers: list[Value], out: Value, byte: Value) -> None:
    """Stores the low byte of each lane as one byte of each 32 bits; others', which another thread may write, stay."""
    shift = e.splat(e.b.trunc(e.mul(byte, 8), I32))
    bits = e.b.shl(e.i64(0x1111111111111111), byte)
    mask = e.b.bitcast(bits, ir.VectorType(ir.IntType(1), 4 * e.lanes))
    for i, vector in enumerate(integers):
        quads = e.b.bitcast(e.b.shl(vector, shift), e.vb)
        e.call("llvm.masked.store.v64i8.p0", ir.VoidType(), quads, e.at(out, 64 * i), ir.Constant(I32, 1), mask)


def quantize(e: Emitter, kind: CacheType, values: list[Value]) -> tuple[Value, list[Value]]:
    """A block of float32 vectors -> the int16 bits of its float16 scale, and its codes as int32 vectors.

    Of 8 bits the largest magnitude becomes 127. Of 4 bits it becomes about -8, with a scale of its opposite sign: of a
    few scales near that, the one whose codes, fitted by least squares, leave the least error.
    """
    if kind.bits == 8:
        most = e.reduce(_fold([e.fabs(value) for value in values], e.maximum), e.maximum)
        scale = e.b.fmul(most, e.const(F32, 1 / 127))
    else:
        most = e.reduce(_fold(values, e.maximum), e.maximum)
        least = e.reduce(_fold(values, e.minimum), e.minimum)
        positive = e.b.fcmp_ordered(">", most, e.b.fneg(least))
        scale = _fitted(e, values, e.b.fmul(e.b.select(positive, most, least), e.const(F32, -1 / 8)))
    half = e.to_half(e.splat(scale, 8))
    factor = e.splat(inverse(e, e.b.extract_element(e.from_half(half), ir.Constant(I32, 0))))
    codes = [e.b.add(code, e.const(e.vi, kind.offset)) for code in _codes(e, kind.bits, values, factor)]
    return e.b.extract_element(half, ir.Constant(I32, 0)), codes


def _codes(e: Emitter, bits: int, values: list[Value], factor: Value) -> list[Value]:
    """values * factor, rounded to what so many bits hold."""
    low, high = (e.const(e.vi, bound) for bound in ((-127, 127) if bits == 8 else (-8, 7)))
    codes = []
    for value in values:
        code = e.round(e.b.fmul(value, factor))
        code = e.b.select(e.b.icmp_signed("<", code, low), low, code)
        codes.append(e.b.select(e.b.icmp_signed(">", code, high), high, code))
    return codes


def _fitted(e: Emitter, values: list[Value], scale: Value) -> Value:
    """The scale for 4 bits, near a given one, that leaves the least squared error."""
    best, least = scale, e.const(F32, -1.0)
    for share in SCALES:
        factor = e.splat(inverse(e, e.b.fmul(scale, e.const(F32, share))))
        product, square = e.zero(e.vf), e.zero(e.vf)
        for value, code in zip(values, _codes(e, 4, values, factor), strict=True):
            number = e.to_float(code)
            product, square = e.fma(number, value, product), e.fma(number, number, square)
        product, square = e.sum(product), e.sum(square)
        fitted = e.b.fmul(product, inverse(e, square))
        taken = e.b.fmul(product, fitted)  # what these codes take off the sum of squares
        better = e.b.fcmp_ordered(">", taken, least)
        best, least = e.b.select(better, fitted, best), e.b.select(better, taken, least)
    return best


def _fold(vectors: list[Value], combine: Callable[[Value, Value], Value]) -> Value:
    return functools.reduce(combine, vectors)


def inverse(e: Emitter, scale: Value) -> Value:
    """1 / scale, or 0 where nothing is to be divided."""
    some = e.b.fcmp_ordered("!=", scale, e.const(F32, 0.0))
    return e.b.select(some, e.b.fdiv(e.const(F32, 1.0), scale), e.const(F32, 0.0))
