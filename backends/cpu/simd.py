"""A macro assembler: Python loops emit LLVM vector code, inside functions that Numba compiles.

`Emitter` speaks in the vectors of one instruction set; `emitted` makes a Numba intrinsic of a Python function that
uses one. Addresses are int64. Only what differs between instruction sets is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from edgert.backends.cpu.isa import Isa

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
Value = Any  # an llvmlite value
ACTIVATIONS = ("silu", "gelu", "gelu_erf", "relu", "relu_sqr")
GATED = (*ACTIVATIONS, "swiglu_oai")  # what `Emitter.glu` knows


class Var:
    """A mutable local that LLVM keeps in a register."""

    def __init__(self, builder: Any, value: Value) -> None:
        self._builder = builder
        self._slot = cgutils.alloca_once(builder, value.type)
        self.set(value)

    def get(self) -> Value:
        return self._builder.load(self._slot)

    def set(self, value: Value) -> None:
        self._builder.store(value, self._slot)


class Emitter:
    """Emits vector code for one instruction set; vf, vi, vb are its float32, int32 and byte vectors."""

    def __init__(self, builder: Any, isa: Isa) -> None:
        self.b = builder
        self.isa = isa
        self.lanes = isa.lanes
        self.vf = ir.VectorType(F32, self.lanes)
        self.vi = ir.VectorType(I32, self.lanes)
        self.vb = ir.VectorType(I8, 4 * self.lanes)

    # scalars, addresses, control
    def i64(self, value: int) -> Value:
        return ir.Constant(I64, value)

    def at(self, address: Value, offset: int | Value = 0, kind: Any = I8) -> Value:
        """A typed pointer to address + offset (bytes)."""
        base = self.b.inttoptr(address, I8.as_pointer())
        if not isinstance(offset, int) or offset:
            base = self.b.gep(base, [self.i64(offset) if isinstance(offset, int) else offset])
        return self.b.bitcast(base, kind.as_pointer())

    def load(self, kind: Any, address: Value, offset: int | Value = 0) -> Value:
        value = self.b.load(self.at(address, offset, kind))
        value.align = 1
        return value

    def store(self, value: Value, address: Value, offset: int | Value = 0) -> None:
        self.b.store(value, self.at(address, offset, value.type)).align = 1

    def prefetch(self, address: Value, offset: int, locality: int = 2) -> None:
        """Asks for the cache line at address + offset, which need not exist; 3: the nearest cache, 2: the second."""
        arguments = [self.at(address, offset), *(ir.Constant(I32, value) for value in (0, locality, 1))]
        self.call("llvm.prefetch.p0", ir.VoidType(), *arguments)

    def add(self, *values: Value) -> Value:
        total = values[0]
        for value in values[1:]:
            total = self.b.add(total, self.i64(value) if isinstance(value, int) else value)
        return total

    def mul(self, left: Value, right: int | Value) -> Value:
        return self.b.mul(left, self.i64(right) if isinstance(right, int) else right)

    def var(self, value: Value) -> Var:
        return Var(self.b, value)

    @contextmanager
    def loop(self, start: int | Value, stop: int | Value, step: int = 1) -> Iterator[Value]:
        """The body runs with i = start, start + step, ... < stop."""
        first = self.i64(start) if isinstance(start, int) else start
        last = self.i64(stop) if isinstance(stop, int) else stop
        with cgutils.for_range_slice(self.b, first, last, self.i64(step), intp=I64) as (index, _):
            yield index

    def call(self, name: str, result: Any, *arguments: Value) -> Value:
        """Calls an LLVM intrinsic by its mangled name."""
        function = self.b.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(result, [argument.type for argument in arguments])
            function = ir.Function(self.b.module, kind, name)
        return self.b.call(function, arguments)

    # constants and broadcasts
    def real(self, bits: Value) -> Value:
        """The float32 with these bits (the low half of an int64)."""
        return self.b.bitcast(self.b.trunc(bits, I32), F32)

    def const(self, kind: Any, value: float) -> Value:
        """A vector (or scalar) constant with all elements equal."""
        if isinstance(kind, ir.VectorType):
            return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)
        return ir.Constant(kind, value)

    def zero(self, kind: Any) -> Value:
        return ir.Constant(kind, None)

    def splat(self, scalar: Value, lanes: int = 0) -> Value:
        kind = ir.VectorType(scalar.type, lanes or self.lanes)
        first = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
        mask = ir.Constant(ir.VectorType(I32, kind.count), None)
        return self.b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), mask)

    def broadcast(self, kind: Any, address: Value, offset: int | Value = 0) -> Value:
        """A vector whose elements all are the scalar at address + offset."""
        return self.splat(self.load(kind, address, offset))

    def broadcast_quad(self, address: Value, quad: int) -> Value:
        """A vector whose elements all are the four bytes number `quad` at address, which 16 bytes around must exist."""
        if self.isa.dot != "sdot":
            return self.broadcast(I32, address, 4 * quad)
        # The instruction takes its second factor from any part of a vector, so one load serves four of them.
        quads = self.load(self.vi, address, quad // 4 * 16)
        return self.shuffle(quads, quads, [quad % 4] * 4)

    def shuffle(self, left: Value, right: Value, indexes: list[int]) -> Value:
        mask = ir.Constant(ir.VectorType(I32, len(indexes)), [ir.Constant(I32, i) for i in indexes])
        return self.b.shuffle_vector(left, right, mask)

    # float arithmetic
    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c; rounded once where the processor can."""
        if self.isa.dot == "scalar":
            return self.b.fadd(self.b.fmul(a, b), c)
        suffix = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
        return self.call(f"llvm.fma.{suffix}", a.type, a, b, c)

    def maximum(self, a: Value, b: Value) -> Value:
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def minimum(self, a: Value, b: Value) -> Value:
        return self.b.select(self.b.fcmp_ordered("<", a, b), a, b)

    def fabs(self, vector: Value) -> Value:
        integers = ir.VectorType(I32, vector.type.count)
        return self.b.bitcast(
            self.b.and_(self.b.bitcast(vector, integers), self.const(integers, 0x7FFFFFFF)), vector.type
        )

    def round(self, vector: Value) -> Value:
        """float32 below 2**22 in magnitude -> the nearest int32, ties to even."""
        integers = ir.VectorType(I32, vector.type.count)
        shifted = self.b.fadd(vector, self.const(vector.type, 12582912.0))  # 1.5 * 2**23
        return self.b.sub(self.b.bitcast(shifted, integers), self.const(integers, 0x4B400000))

    def to_float(self, integers: Value) -> Value:
        return self.b.sitofp(integers, self.vf)

    def reduce(self, vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """Folds a vector to a scalar in a fixed tree order."""
        count = vector.type.count
        while count > 1:
            count //= 2
            undefined = ir.Constant(vector.type, ir.Undefined)
            low = self.shuffle(vector, undefined, list(range(count)))
            high = self.shuffle(vector, undefined, list(range(count, 2 * count)))
            vector = combine(low, high)
        return self.b.extract_element(vector, ir.Constant(I32, 0))

    def sum(self, vector: Value) -> Value:
        return self.reduce(vector, self.b.fadd)

    def load_half(self, address: Value, offset: int | Value = 0) -> Value:
        """`lanes` float16 values as float32."""
        return self.from_half(self.load(ir.VectorType(I16, self.lanes), address, offset))

    def from_half(self, bits: Value) -> Value:
        """The int16 bits of float16 values -> float32."""
        count = bits.type.count
        vf, vi = ir.VectorType(F32, count), ir.VectorType(I32, count)
        if self.isa.dot != "scalar":
            return self.b.fpext(self.b.bitcast(bits, ir.VectorType(F16, count)), vf)
        # Without a conversion instruction: shift exponent and mantissa up, rescale by 2**112, keep the sign.
        wide = self.b.zext(bits, vi)
        magnitude = self.b.shl(self.b.and_(wide, self.const(vi, 0x7FFF)), self.const(vi, 13))
        scaled = self.b.fmul(self.b.bitcast(magnitude, vf), self.const(vf, 2.0**112))
        sign = self.b.shl(self.b.and_(wide, self.const(vi, 0x8000)), self.const(vi, 16))
        return self.b.bitcast(self.b.or_(self.b.bitcast(scaled, vi), sign), vf)

    def load_bfloat(self, address: Value, offset: int | Value = 0) -> Value:
        """`lanes` bfloat16 values as float32."""
        bits = self.b.zext(self.load(ir.VectorType(I16, self.lanes), address, offset), self.vi)
        return self.b.bitcast(self.b.shl(bits, self.const(self.vi, 16)), self.vf)

    def to_half(self, vector: Value) -> Value:
        """float32 -> the int16 bits of float16, rounded to nearest even."""
        kind = ir.VectorType(I16, vector.type.count)
        if self.isa.dot != "scalar":
            return self.b.bitcast(self.b.fptrunc(vector, ir.VectorType(F16, vector.type.count)), kind)
        vi, vf = ir.VectorType(I32, vector.type.count), vector.type
        bits = self.b.bitcast(vector, vi)
        sign = self.b.and_(self.b.lshr(bits, self.const(vi, 16)), self.const(vi, 0x8000))
        magnitude = self.minimum(self.fabs(vector), self.const(vf, 65504.0))
        bits = self.b.bitcast(magnitude, vi)
        # Normal numbers: rebias and round by carry. Smaller ones are multiples of 2**-24, which adding 0.5 rounds to.
        odd = self.b.and_(self.b.lshr(bits, self.const(vi, 13)), self.const(vi, 1))
        normal = self.b.add(self.b.add(bits, self.const(vi, 0x0FFF - 0x38000000)), odd)
        normal = self.b.lshr(normal, self.const(vi, 13))
        small = self.b.bitcast(self.b.fadd(magnitude, self.const(vf, 0.5)), vi)
        small = self.b.sub(small, self.const(vi, 0x3F000000))
        result = self.b.select(self.b.icmp_signed("<", bits, self.const(vi, 0x38800000)), small, normal)
        return self.b.trunc(self.b.or_(result, sign), kind)

    def exp(self, x: Value) -> Value:
        """e**x to within 2 ulp; flushes to 0 below -87."""
        kind, integers = x.type, ir.VectorType(I32, x.type.count)
        shift = self.const(kind, 12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
        x = self.maximum(self.minimum(x, self.const(kind, 88.0)), self.const(kind, -88.0))
        rounded = self.fma(x, self.const(kind, 1.4426950408889634), shift)
        n = self.b.fsub(rounded, shift)
        r = self.fma(n, self.const(kind, -0.693145751953125), x)
        r = self.fma(n, self.const(kind, -1.428606765330187e-06), r)
        p = self.const(kind, 1.9875691500e-4)
        for coefficient in (
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        ):
            p = self.fma(p, r, self.const(kind, coefficient))
        p = self.fma(self.b.fmul(r, r), p, self.b.fadd(r, self.const(kind, 1.0)))
        exponent = self.b.shl(self.b.bitcast(rounded, integers), self.const(integers, 23))
        result = self.b.bitcast(self.b.add(self.b.bitcast(p, integers), exponent), kind)
        return self.b.select(self.b.fcmp_ordered("<", x, self.const(kind, -87.0)), self.zero(kind), result)

    def gate(self, activation: str, x: Value) -> Value:
        """One of ACTIVATIONS."""
        kind, one = x.type, self.const(x.type, 1.0)
        if activation in ("relu", "relu_sqr"):
            positive = self.maximum(x, self.zero(kind))
            return positive if activation == "relu" else self.b.fmul(positive, positive)
        if activation == "gelu_erf":
            half = self.b.fmul(x, self.const(kind, 0.5))
            return self.fma(half, self.erf(self.b.fmul(x, self.const(kind, 0.7071067811865476))), half)
        z = x  # the others are x * sigmoid(z)
        if activation == "gelu":
            cube = self.fma(self.b.fmul(x, x), self.const(kind, 0.044715), one)
            z = self.b.fmul(self.b.fmul(x, self.const(kind, 1.5957691216057308)), cube)
        return self.b.fdiv(x, self.b.fadd(one, self.exp(self.b.fsub(self.zero(kind), z))))

    def erf(self, x: Value) -> Value:
        """To within 2e-7. Source: Abramowitz and Stegun, 7.1.26."""
        kind = x.type
        magnitude = self.fabs(x)
        one = self.const(kind, 1.0)
        t = self.b.fdiv(one, self.fma(magnitude, self.const(kind, 0.3275911), one))
        p = self.const(kind, 1.061405429)
        for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
            p = self.fma(p, t, self.const(kind, coefficient))
        decay = self.exp(self.b.fsub(self.zero(kind), self.b.fmul(x, x)))
        result = self.b.fsub(one, self.b.fmul(self.b.fmul(p, t), decay))
        negative = self.b.fcmp_ordered("<", x, self.zero(kind))
        return self.b.select(negative, self.b.fsub(self.zero(kind), result), result)

    def tanh(self, x: Value) -> Value:
        """To within a few ulp of 1."""
        kind, one = x.type, self.const(x.type, 1.0)
        grown = self.exp(self.b.fmul(x, self.const(kind, 2.0)))
        return self.b.fsub(one, self.b.fdiv(self.const(kind, 2.0), self.b.fadd(grown, one)))

    def glu(self, activation: str, gate: Value, up: Value) -> Value:
        """activation(gate) * up; swiglu_oai: gpt-oss's clamped form.

        Source: GptOssExperts of transformers.
        """
        if activation != "swiglu_oai":
            return self.b.fmul(self.gate(activation, gate), up)
        kind, limit = gate.type, 7.0
        gate = self.minimum(self.const(kind, limit), gate)  # in this order NaN remains NaN
        up = self.maximum(self.const(kind, -limit), self.minimum(self.const(kind, limit), up))
        scaled = self.b.fmul(gate, self.const(kind, -1.702))
        one = self.const(kind, 1.0)
        gate = self.b.fdiv(gate, self.b.fadd(one, self.exp(scaled)))
        return self.fma(gate, up, gate)

    # bytes
    def look_up(self, table: Value, codes: Value) -> Value:
        """table[code] for each byte; the table repeats its 16 bytes over a vector, codes are below 16."""
        if self.isa.dot == "scalar":
            result = self.zero(self.vb)
            for i in range(4 * self.lanes):
                place = ir.Constant(I32, i)
                byte = self.b.extract_element(table, self.b.zext(self.b.extract_element(codes, place), I32))
                result = self.b.insert_element(result, byte, place)
            return result
        name = {4: "aarch64.neon.tbl1.v16i8", 8: "x86.avx2.pshuf.b", 16: "x86.avx512.pshuf.b.512"}[self.lanes]
        return self.call(f"llvm.{name}", self.vb, table, codes)

    def dot(self, sums: Value, codes: Value, x: Value, signed: bool = False) -> Value:
        """sums[r] += the four products of bytes 4r..4r+3; codes are unsigned (or signed), x is int8 (as vi).

        Unsigned codes above 127 are for "vnni" and "scalar" alone; x is at least -127.
        """
        x = self.b.bitcast(x, self.vb)
        return getattr(self, f"_dot_{self.isa.dot}")(sums, codes, x, signed)

    def _dot_vnni(self, sums: Value, codes: Value, x: Value, _signed: bool) -> Value:
        return self.call(f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}", self.vi, sums, codes, x)

    def _dot_maddubs(self, sums: Value, codes: Value, x: Value, signed: bool) -> Value:
        if signed:  # |code| * (x with the code's sign): no sum of two reaches 2**15
            x = self.call("llvm.x86.avx2.psign.b", self.vb, x, codes)
            codes = self.call(f"llvm.abs.v{4 * self.lanes}i8", self.vb, codes, ir.Constant(ir.IntType(1), 0))
        return self.b.add(sums, self.join_products(self.partial_products(codes, x)))

    def products_held(self, most: int, signed: bool) -> int:
        """How many `partial_products` of codes up to `most` fit into int16; 0 where adding so few gains nothing."""
        if self.isa.dot == "maddubs":
            return 0 if signed else 32767 // (2 * 127 * most)
        return 32767 // (127 * most) if self.isa.dot == "smull" and most < 64 else 0

    def partial_products(self, codes: Value, x: Value) -> Value:
        """Codes times signed bytes as int16, by twos (of unsigned codes) or one by one as the processor has it."""
        x = self.b.bitcast(x, self.vb)
        if self.isa.dot == "maddubs":
            return self.call("llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 2 * self.lanes), codes, x)
        wide = ir.VectorType(I16, 4 * self.lanes)
        return self.b.mul(self.b.sext(codes, wide), self.b.sext(x, wide))

    def join_products(self, parts: Value) -> Value:
        """Sums of `partial_products` -> int32 sums of each row."""
        if self.isa.dot == "maddubs":
            return self.call("llvm.x86.avx2.pmadd.wd", self.vi, parts, self.const(parts.type, 1))
        halves = [self.shuffle(parts, parts, list(range(i, i + 8))) for i in (0, 8)]
        twos = [self.call("llvm.aarch64.neon.saddlp.v4i32.v8i16", self.vi, half) for half in halves]
        return self.call("llvm.aarch64.neon.addp.v4i32", self.vi, *twos)

    def _dot_sdot(self, sums: Value, codes: Value, x: Value, _signed: bool) -> Value:
        return self.call("llvm.aarch64.neon.sdot.v4i32.v16i8", self.vi, sums, codes, x)

    def multiply_squares(self, sums: Value, left: Value, right: Value) -> Value:
        """With `matrix`: sums[i][j] += left[i] . right[j], of two times eight signed bytes each."""
        return self.call("llvm.aarch64.neon.smmla.v4i32.v16i8", self.vi, sums, left, right)

    def _dot_smull(self, sums: Value, codes: Value, x: Value, _signed: bool) -> Value:
        products = self.partial_products(codes, x)
        halves = [self.shuffle(products, products, list(range(i, i + 8))) for i in (0, 8)]
        twos = self.call("llvm.aarch64.neon.addp.v8i16", halves[0].type, *halves)  # none reaches 2**15
        return self.b.add(sums, self.call("llvm.aarch64.neon.saddlp.v4i32.v8i16", self.vi, twos))

    def _dot_scalar(self, sums: Value, codes: Value, x: Value, signed: bool) -> Value:
        wide = ir.VectorType(I32, 4 * self.lanes)
        extend = self.b.sext if signed else self.b.zext
        products = self.b.mul(extend(codes, wide), self.b.sext(x, wide))
        for i in range(4):
            sums = self.b.add(sums, self.shuffle(products, products, list(range(i, 4 * self.lanes, 4))))
        return sums


def to_bfloat(e: Emitter, value: Value) -> Value:
    """float32 -> the int16 bits of bfloat16, rounded to nearest."""
    bits = e.b.add(e.b.bitcast(value, e.vi), e.const(e.vi, 0x8000))
    return e.b.trunc(e.b.lshr(bits, e.const(e.vi, 16)), ir.VectorType(I16, e.lanes))


def bfloat_pairs(e: Emitter, first: Value, second: Value) -> Value:
    """Two float32 vectors as bf16 pairs, the first in the low half of each 32 bits."""
    half = e.const(e.vi, 0x8000)
    low = e.b.lshr(e.b.add(e.b.bitcast(first, e.vi), half), e.const(e.vi, 16))
    high = e.b.and_(e.b.add(e.b.bitcast(second, e.vi), half), e.const(e.vi, -65536))
    return e.b.or_(low, high)


def emitted(isa: Isa, n_arguments: int, emit: Callable[..., Value | None], result: Any = types.void) -> Any:
    """A Numba function of `n_arguments` int64 whose body is what `emit(emitter, *values)` emits."""

    def typed(_context: Any, *arguments: Any) -> Any:
        signature = result(*(types.int64 for _ in arguments))

        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            value = emit(Emitter(builder, isa), *values)
            return context.get_dummy_value() if value is None else value

        return signature, generate

    # An intrinsic's arity is read from its Python signature.
    names = ", ".join(["context", *(f"a{i}" for i in range(n_arguments))])
    scope: dict[str, Any] = {"typed": typed}
    exec(f"def emitted({names}):\n    return typed({names})", scope)
    return intrinsic(scope["emitted"])


def _access(kind: Any, result: Any, place: int, read: Callable[[Any, Any], Any]) -> Any:
    """A Numba function (address) or (address, index) that reads a scalar of LLVM type `kind`."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], kind.as_pointer())
        value = builder.load(builder.gep(pointer, [values[1]]) if place else pointer)
        value.align = 1
        return read(builder, value)

    if place:
        return intrinsic(lambda _context, address, index: (result(types.int64, types.int64), generate))
    return intrinsic(lambda _context, address: (result(types.int64), generate))


def _identity(_builder: Any, value: Any) -> Any:
    return value


# Scalars of arrays, by address and index (in elements).
word = _access(I64, types.int64, 1, _identity)
int32_at = _access(I32, types.int64, 1, lambda b, value: b.sext(value, I64))
double_at = _access(ir.DoubleType(), types.float64, 1, _identity)
# Scalars at an address; unsigned ones come as int64.
byte_at = _access(I8, types.int64, 0, lambda b, value: b.zext(value, I64))
u16_at = _access(I16, types.int64, 0, lambda b, value: b.zext(value, I64))
u32_at = _access(I32, types.int64, 0, lambda b, value: b.zext(value, I64))


def _putter(kind: Any, value_type: Any, convert: Callable[[Any, Any], Any]) -> Any:
    """A Numba function (address, value) that stores a scalar."""

    def typed(_context: Any, _address: Any, _value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            builder.store(convert(builder, values[1]), builder.inttoptr(values[0], kind.as_pointer())).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, value_type), generate

    return intrinsic(lambda context, address, value: typed(context, address, value))


put_byte = _putter(I8, types.int64, lambda b, value: b.trunc(value, I8))
put_u16 = _putter(I16, types.int64, lambda b, value: b.trunc(value, I16))
put_u32 = _putter(I32, types.int64, lambda b, value: b.trunc(value, I32))
put_word = _putter(I64, types.int64, _identity)
put_float = _putter(F32, types.float32, _identity)


@intrinsic
def real_of_bits(_context, bits):
    """The float32 with these bits (the low half of an int64)."""

    def generate(_c, builder, _s, values):
        return builder.bitcast(builder.trunc(values[0], I32), F32)

    return types.float32(types.int64), generate


@intrinsic
def bits_of_real(_context, value):
    """The bits of a float32, as a non-negative int64."""

    def generate(_c, builder, _s, values):
        return builder.zext(builder.bitcast(values[0], I32), I64)

    return types.int64(types.float32), generate


@numba.njit(inline="always")
def put_real(address, index, value):
    """Stores a float32 at place `index` of the array at `address`."""
    put_float(address + 4 * index, value)


@numba.njit(error_model="numpy", forceinline=True)
def half_at(address):
    """The float16 at an address as float32, by integer arithmetic: every processor can."""
    bits = u16_at(address)
    magnitude = real_of_bits((bits & 0x7FFF) << 13) * np.float32(2.0**112)
    return -magnitude if bits & 0x8000 else magnitude
