"""The same place of several rows as one vector: what reads a row's block can read those of all rows of a panel.

Blocks of rows are woven into planes: vectors that hold the same 32 bits of each row. `byte_at`, `u16_at` and `u32_at`
take an address, or `Planes`, to which offsets in bytes are added as to an address. Of planes they make `Lanes`: an
unsigned integer of 32 bits for each row, with the operators of integers, which `put_byte`, `put_u16` and `put_u32`
store one beside the other.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models, register_default
from numba.extending import intrinsic, overload

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.layouts import LINE
from edgert.backends.cpu.simd import I8, I16, I32, I64, Emitter, Value

QUAD = 16  # bytes of a row that are woven at a time


class Lanes(types.Type):
    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(f"Lanes({lanes})")


class Planes(types.Type):
    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(f"Planes({lanes})")


@register_default(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, ir.VectorType(I32, kind.lanes))


@register_default(Planes)
class _PlanesModel(models.StructModel):
    def __init__(self, manager: Any, kind: Planes) -> None:
        super().__init__(manager, kind, [("memory", types.voidptr), ("offset", types.int64)])


def weave(isa: Isa, size: int) -> Any:
    """A Numba function (source, row_bytes, n, ahead) -> the Planes of a block of each row, of `size` bytes.

    size:    16 at least
    source:  address of the first row's block
    n:       rows that there are; those of a panel beyond are zeros
    ahead:   address of as many bytes that are read soon, and are asked for a few at a time
    """
    kind = Planes(isa.lanes)
    n_bytes = (-(-size // QUAD) * QUAD + 4) * isa.lanes  # and a plane that is read, but not used

    def emit(e: Emitter, source: Value, row_bytes: Value, n: Value, ahead: Value, planes: Value) -> None:
        numbers = [e.b.select(e.b.icmp_signed(">", n, e.i64(row)), e.i64(row), e.i64(0)) for row in range(e.lanes)]
        rows = [e.add(source, e.b.mul(number, row_bytes)) for number in numbers]
        places = ir.Constant(e.vi, list(range(e.lanes)))
        there = e.b.sext(e.b.icmp_signed("<", places, e.splat(e.b.trunc(n, I32))), e.vi)

        def take(place: Value, to: Value, skipped: int = 0) -> None:
            words = _transposed(e, [e.load(ir.VectorType(I32, 4), row, place) for row in rows], skipped)
            for i, plane in enumerate(words):
                e.store(e.b.and_(plane, there), e.add(planes, e.mul(to, e.lanes)), 4 * i * e.lanes)

        with e.loop(0, size // QUAD * QUAD, QUAD) as at:
            take(at, at)
            asked = e.add(ahead, e.mul(at, e.lanes))
            for line in range(0, QUAD * e.lanes, LINE):
                e.prefetch(asked, line)
        if rest := size % QUAD:  # with the last sixteen bytes, less those that were there before
            take(e.i64(size - QUAD), e.i64(size - rest), QUAD - rest)

    def typed(_context: Any, *arguments: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            memory = cgutils.alloca_once(builder, ir.ArrayType(I8, n_bytes))
            memory.align = 64
            found = cgutils.create_struct_proxy(kind)(context, builder)
            found.memory, found.offset = builder.bitcast(memory, I8.as_pointer()), ir.Constant(I64, 0)
            source, row_bytes, n, ahead = values
            emit(Emitter(builder, isa), source, row_bytes, n, ahead, builder.ptrtoint(memory, I64))
            return found._getvalue()

        return kind(*(types.int64 for _ in arguments)), generate

    return intrinsic(lambda context, source, row_bytes, n, ahead: typed(context, source, row_bytes, n, ahead))


def _transposed(e: Emitter, rows: list[Value], skipped: int) -> list[Value]:
    """Four words of each row, less so many bytes at their beginning -> four vectors of a word of each row."""
    a, b, c, d = (_joined(e, rows[first::4]) for first in range(4))  # which 128 bits apart change places among them
    if skipped:
        a, b, c, d = (_moved(e, vector, skipped) for vector in (a, b, c, d))
    wide = ir.VectorType(I64, e.lanes // 2)
    words = []
    for half in (0, 1):
        left, right = (e.b.bitcast(_in_turn(e, *both, half=half), wide) for both in ((a, b), (c, d)))
        words += [e.b.bitcast(_in_turn(e, left, right, part), e.vi) for part in (0, 1)]
    return words


def _joined(e: Emitter, vectors: list[Value]) -> Value:
    while len(vectors) > 1:
        places = list(range(2 * vectors[0].type.count))
        vectors = [e.shuffle(*both, places) for both in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _moved(e: Emitter, vector: Value, n: int) -> Value:
    """Each 128 bits less their first n bytes, with zeros behind."""
    places = [at + n if at % QUAD + n < QUAD else 4 * e.lanes for at in range(4 * e.lanes)]
    return e.b.bitcast(e.shuffle(e.b.bitcast(vector, e.vb), e.zero(e.vb), places), e.vi)


def _in_turn(e: Emitter, left: Value, right: Value, half: int) -> Value:
    """The lower (or upper) elements of each 128 bits of both, one of each in turn."""
    count = left.type.count
    n = count * 4 // e.lanes  # elements of 128 bits
    firsts = [at for at in range(count) if at % n // (n // 2) == half]
    return e.shuffle(left, right, [place for at in firsts for place in (at, count + at)])


@intrinsic
def _further(_context, planes, n):
    def generate(context, builder, _signature, values):
        found = cgutils.create_struct_proxy(planes)(context, builder, values[0])
        found.offset = builder.add(found.offset, values[1])
        return found._getvalue()

    return planes(planes, types.int64), generate


@overload(operator.add)
def _add_to_planes(place, n):
    return (lambda place, n: _further(place, n)) if isinstance(place, Planes) else None


def _reader(kind: Any) -> Any:
    """What reads an unsigned integer: one at an address, as int64, or of planes one of each row."""

    def one(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        value = builder.load(builder.inttoptr(values[0], kind.as_pointer()))
        value.align = 1
        return builder.zext(value, I64)

    def typed(_context: Any, place: Any) -> Any:
        if not isinstance(place, Planes):
            return types.int64(types.int64), one
        lanes = ir.VectorType(I32, place.lanes)

        def many(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            planes = cgutils.create_struct_proxy(place)(context, builder, values[0])

            def plane(number: Any) -> Any:
                # From a pointer: of sums LLVM may take either part for the one that points.
                at = builder.gep(planes.memory, [builder.mul(number, ir.Constant(I64, 4 * place.lanes))])
                value = builder.load(builder.bitcast(at, lanes.as_pointer()))
                value.align = 4
                return value

            number = builder.lshr(planes.offset, ir.Constant(I64, 2))
            byte = builder.trunc(builder.and_(planes.offset, ir.Constant(I64, 3)), I32)
            shift = _splat(builder, builder.mul(byte, ir.Constant(I32, 8)), lanes)
            low = plane(number)
            if kind is I32:
                high = plane(builder.add(number, ir.Constant(I64, 1)))
                name = f"llvm.fshr.v{place.lanes}i32"
                function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(lanes, [lanes] * 3), name)
                return builder.call(function, [high, low, shift])
            part = builder.lshr(low, shift)  # which no format has on both sides of a plane's end
            return builder.and_(part, ir.Constant(lanes, [ir.Constant(I32, (1 << kind.width) - 1)] * place.lanes))

        return Lanes(place.lanes)(place), many

    return intrinsic(lambda context, place: typed(context, place))


byte_at, u16_at, u32_at = (_reader(kind) for kind in (I8, I16, I32))


def _putter(kind: Any) -> Any:
    """What stores the low bits of an integer, or of Lanes."""

    def typed(_context: Any, value: Any) -> Any:
        lanes = value.lanes if isinstance(value, Lanes) else 0
        stored = ir.VectorType(kind, lanes) if lanes else kind

        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            address, bits = values
            bits = bits if bits.type == stored else builder.trunc(bits, stored)
            builder.store(bits, builder.inttoptr(address, stored.as_pointer())).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, value if lanes else types.int64), generate

    return intrinsic(lambda context, address, value: typed(context, value))


put_byte, put_u16, put_u32 = (_putter(kind) for kind in (I8, I16, I32))


@intrinsic
def any_has(_context, value, mask):
    """Whether an integer, or that of any row, has some of the bits of a mask."""
    lanes = value.lanes if isinstance(value, Lanes) else 0

    def generate(_c, builder, _s, values):
        bits, mask = values
        if lanes:
            mask = _splat(builder, builder.trunc(mask, I32), bits.type)
        found = builder.icmp_unsigned("!=", builder.and_(bits, mask), ir.Constant(bits.type, None))
        if lanes:
            found = builder.bitcast(found, ir.IntType(lanes))
            found = builder.icmp_unsigned("!=", found, ir.Constant(found.type, 0))
        return found

    return types.boolean(value if lanes else types.int64, types.int64), generate


def _splat(builder: Any, scalar: Any, kind: Any) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(kind, None))


def _operator(function: Any, name: str) -> None:
    """Makes an operator of integers known for Lanes with Lanes or an integer, on either side."""

    def typed(_context: Any, left: Any, right: Any) -> Any:
        kind = left if isinstance(left, Lanes) else right

        def generate(_c: Any, builder: Any, _s: Any, values: Any) -> Any:
            vector = ir.VectorType(I32, kind.lanes)
            sides = [
                value if isinstance(side, Lanes) else _splat(builder, builder.trunc(value, I32), vector)
                for side, value in zip((left, right), values, strict=True)
            ]
            return getattr(builder, name)(*sides)

        sides = (side if isinstance(side, Lanes) else types.int64 for side in (left, right))
        return kind(*sides), generate

    apply = intrinsic(lambda context, left, right: typed(context, left, right))

    @overload(function)
    def known(left, right):
        some = isinstance(left, Lanes) or isinstance(right, Lanes)
        return (lambda left, right: apply(left, right)) if some else None


for _function, _name in (
    (operator.and_, "and_"),
    (operator.or_, "or_"),
    (operator.ior, "or_"),
    (operator.xor, "xor"),
    (operator.lshift, "shl"),
    (operator.rshift, "lshr"),
    (operator.add, "add"),
    (operator.sub, "sub"),
    (operator.mul, "mul"),
):
    _operator(_function, _name)
