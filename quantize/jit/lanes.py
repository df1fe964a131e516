"""Sixteen numbers at a time as one value: a kernel written for one block runs on sixteen blocks side by side.

`Lanes` values live only inside compiled kernels: float32, int32 or truth values, sixteen of each. They take the
operators + - * / < <= > >= == != & | ^ ~ << >>; every lane is rounded as the scalar operation would be (nothing is
contracted or reordered), so that a kernel gives bit for bit what the scalar program gives. Where the processor has
narrower vectors, LLVM splits them.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel.models import PrimitiveModel
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, register_model

N = 16
F32, I32, I1 = ir.FloatType(), ir.IntType(32), ir.IntType(1)


class Lanes(types.Type):
    """Numba's type of sixteen numbers; kind f, i or m (a mask)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(name=f"lanes_{kind}")


F, I, M = Lanes("f"), Lanes("i"), Lanes("m")  # noqa: E741
_VECTOR = {F: ir.VectorType(F32, N), I: ir.VectorType(I32, N), M: ir.VectorType(I1, N)}


@register_model(Lanes)
class _Model(PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR[kind])


# operators: which kinds they take and the LLVM instruction
_ARITHMETIC = {
    operator.add: {F: "fadd", I: "add"},
    operator.sub: {F: "fsub", I: "sub"},
    operator.mul: {F: "fmul", I: "mul"},
    operator.truediv: {F: "fdiv"},
    operator.and_: {I: "and_", M: "and_"},
    operator.or_: {I: "or_", M: "or_"},
    operator.xor: {I: "xor", M: "xor"},
    operator.lshift: {I: "shl"},
    operator.rshift: {I: "ashr"},
}
_IN_PLACE = {operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
             operator.iand: operator.and_, operator.ior: operator.or_}  # fmt: skip
_COMPARE = {operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==",
            operator.ne: "!="}  # fmt: skip


def _register(op: Any, kinds: dict[Lanes, str], result: Lanes | None, emit: Any) -> None:
    @infer_global(op)
    class _Template(AbstractTemplate):
        key = op

        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) == 2 and args[0] in kinds and args[0] == args[1]:
                return signature(result or args[0], *args)
            return None

    for kind, instruction in kinds.items():

        def lower(context: Any, builder: Any, sig: Any, args: Any, instruction: str = instruction) -> Any:
            return emit(builder, instruction, *args)

        lower_builtin(op, kind, kind)(lower)


for _op, _kinds in _ARITHMETIC.items():
    _register(_op, _kinds, None, lambda builder, name, a, b: getattr(builder, name)(a, b))
for _op, _plain in _IN_PLACE.items():
    _register(_op, _ARITHMETIC[_plain], None, lambda builder, name, a, b: getattr(builder, name)(a, b))
for _op, _sign in _COMPARE.items():
    _register(_op, {F: _sign}, M, lambda builder, sign, a, b: (
        builder.fcmp_unordered(sign, a, b) if sign == "!=" else builder.fcmp_ordered(sign, a, b)))  # fmt: skip
    _register(_op, {I: _sign}, M, lambda builder, sign, a, b: builder.icmp_signed(sign, a, b))


def _unary(op: Any, kinds: dict[Lanes, Any]) -> None:
    @infer_global(op)
    class _Template(AbstractTemplate):
        key = op

        def generic(self, args: Any, kws: Any) -> Any:
            return signature(args[0], *args) if len(args) == 1 and args[0] in kinds else None

    for kind, emit in kinds.items():

        def lower(context: Any, builder: Any, sig: Any, args: Any, emit: Any = emit) -> Any:
            return emit(builder, args[0])

        lower_builtin(op, kind)(lower)


_unary(operator.neg, {F: lambda builder, a: builder.fneg(a), I: lambda builder, a: builder.neg(a)})
_unary(operator.invert, {I: lambda builder, a: builder.not_(a), M: lambda builder, a: builder.not_(a)})


def _splat(builder: Any, scalar: Any) -> Any:
    kind = ir.VectorType(scalar.type, N)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(I32, N), None))


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [a.type for a in arguments]), name)
    return builder.call(function, arguments)


@intrinsic
def vf(typing: Any, scalar: Any) -> Any:
    """All lanes float32(scalar)."""
    if not isinstance(scalar, (types.Integer, types.Float, types.IntegerLiteral)):
        return None

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, context.cast(builder, args[0], sig.args[0], types.float32))

    return F(scalar), emit


@intrinsic
def vi(typing: Any, scalar: Any) -> Any:
    """All lanes int32(scalar)."""
    if not isinstance(scalar, (types.Integer, types.IntegerLiteral)):
        return None

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, context.cast(builder, args[0], sig.args[0], types.int32))

    return I(scalar), emit


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, kind: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


_ELEMENT = {types.float32: F, types.int32: I, types.int8: I, types.uint8: I, types.uint16: I}


def _array(context: Any, builder: Any, kind: Any, data: Any, count: Any) -> Any:
    """An array of memory that nobody counts references to."""
    array = context.make_array(kind)(context, builder)
    size = ir.Constant(ir.IntType(64), context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    context.populate_array(array, data=data, shape=[count], strides=[size], itemsize=size, meminfo=None)
    return array._getvalue()


def local(count: int, dtype: Any) -> Any:
    """The function local() of kernels: an array of so many numbers on the stack."""
    kind = types.Array(dtype, 1, "C")

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        number = ir.Constant(ir.IntType(64), count)
        data = cgutils.alloca_once(builder, context.get_data_type(dtype), size=number)
        return _array(context, builder, kind, data, number)

    return intrinsic(lambda typing: (kind(), emit))


def array_at(dtype: Any) -> Any:
    """The function array_at(address, count) of kernels: an array that stands at an address."""
    kind = types.Array(dtype, 1, "C")

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        address, count = (context.cast(builder, args[i], sig.args[i], types.int64) for i in range(2))
        data = builder.inttoptr(address, context.get_data_type(dtype).as_pointer())
        return _array(context, builder, kind, data, count)

    return intrinsic(lambda typing, address, count: (kind(address, count), emit))


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """Sixteen neighbours from array[index] on, unchecked: float32, or int32 from any integers."""
    result = _ELEMENT[array.dtype]

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        index = context.cast(builder, args[1], sig.args[1], types.int64)
        kind = ir.VectorType(context.get_value_type(sig.args[0].dtype), N)
        value = builder.load(_pointer(context, builder, sig.args[0], args[0], index, kind))
        value.align = 1
        if kind.element.__class__ is ir.IntType and kind.element.width < 32:
            return (builder.sext if sig.args[0].dtype.signed else builder.zext)(value, _VECTOR[I])
        return value

    return result(array, index), emit


@intrinsic
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Sixteen neighbours to array[index] on, unchecked; integers are cut to the array's width."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        index = context.cast(builder, args[1], sig.args[1], types.int64)
        kind = ir.VectorType(context.get_value_type(sig.args[0].dtype), N)
        value = args[2]
        if kind.element.__class__ is ir.IntType and kind.element.width < 32:
            value = builder.trunc(value, kind)
        builder.store(value, _pointer(context, builder, sig.args[0], args[0], index, kind)).align = 1
        return context.get_dummy_value()

    return types.void(array, index, value), emit


@intrinsic(prefer_literal=True)
def scatter(typing: Any, array: Any, index: Any, stride: Any, value: Any, width: Any) -> Any:
    """Lane k to the `width` (1, 2 or 4) bytes of a uint8 array at index + k * stride."""
    bits = ir.IntType(8 * width.literal_value)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        index, stride = (context.cast(builder, args[i], sig.args[i], types.int64) for i in (1, 2))
        for lane in range(N):
            word = builder.extract_element(args[3], ir.Constant(I32, lane))
            if bits.width < 32:
                word = builder.trunc(word, bits)
            builder.store(word, _pointer(context, builder, sig.args[0], args[0], index, bits)).align = 1
            index = builder.add(index, stride)
        return context.get_dummy_value()

    return types.void(array, index, stride, value, width), emit


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """Sixteen vectors of sixteen -> their columns, in four rounds that interleave halves."""
    low = [i // 2 + (N if i % 2 else 0) for i in range(N)]
    high = [i + N // 2 for i in low]
    masks = [ir.Constant(ir.VectorType(I32, N), [ir.Constant(I32, i) for i in half]) for half in (low, high)]
    for _ in range(4):
        rows = [builder.shuffle_vector(rows[k // 2], rows[k // 2 + N // 2], masks[k % 2]) for k in range(N)]
    return rows


@intrinsic
def turn(typing: Any, source: Any, index: Any, stride: Any, target: Any, place: Any) -> Any:
    """float32: source[index + k * stride + i] -> target[place + 16 * i + k], k and i to 15."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        index, stride, place = (context.cast(builder, args[i], sig.args[i], types.int64) for i in (1, 2, 4))
        kind = _VECTOR[F]
        rows = []
        for _ in range(N):
            rows.append(builder.load(_pointer(context, builder, sig.args[0], args[0], index, kind)))
            rows[-1].align = 1
            index = builder.add(index, stride)
        for i, column in enumerate(_transpose(builder, rows)):
            at = builder.add(place, ir.Constant(ir.IntType(64), N * i))
            builder.store(column, _pointer(context, builder, sig.args[3], args[3], at, kind)).align = 1
        return context.get_dummy_value()

    return types.void(source, index, stride, target, place), emit


@intrinsic
def select(typing: Any, mask: Any, yes: Any, no: Any) -> Any:
    """Where the mask is set one value, else the other."""
    if mask != M or yes != no:
        return None
    return yes(mask, yes, no), lambda context, builder, sig, args: builder.select(*args)


@intrinsic
def some(typing: Any, mask: Any) -> Any:
    """Whether any lane of a mask is set."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], ir.IntType(N))
        return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(N), 0))

    return types.boolean(mask), emit


@intrinsic
def lane(typing: Any, value: Any, index: Any) -> Any:
    """One lane as a scalar."""
    scalar = {F: types.float32, I: types.int32, M: types.boolean}[value]

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.extract_element(args[0], context.cast(builder, args[1], sig.args[1], types.int32))

    return scalar(value, index), emit


def _mapped(llvm: str) -> Any:
    @intrinsic
    def function(typing: Any, value: Any) -> Any:
        if value != F:
            return None
        return F(F), lambda context, builder, sig, args: _call(builder, f"llvm.{llvm}.v{N}f32", _VECTOR[F], *args)

    return function


absolute = _mapped("fabs")
root = _mapped("sqrt")
trunc = _mapped("trunc")


def _converted(source: Lanes, target: Lanes, how: str) -> Any:
    @intrinsic
    def function(typing: Any, value: Any) -> Any:
        if value != source:
            return None
        return target(value), lambda context, builder, sig, args: getattr(builder, how)(args[0], _VECTOR[target])

    return function


to_float = _converted(I, F, "sitofp")
to_int = _converted(F, I, "fptosi")  # towards zero; the value must fit
bits_of = _converted(F, I, "bitcast")
float_of = _converted(I, F, "bitcast")
