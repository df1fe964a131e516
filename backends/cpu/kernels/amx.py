"""The tile instructions: eight registers of 16 rows of 64 bytes, and a product of bf16 pairs summed in float32."""

from __future__ import annotations

from llvmlite import ir

from edgert.backends.cpu.simd import I8, I16, Emitter, Value


def _call(e: Emitter, name: str, *arguments: Value) -> None:
    function = e.b.module.globals.get(f"llvm.x86.{name}")
    if function is None:
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        function = ir.Function(e.b.module, kind, f"llvm.x86.{name}")
    e.b.call(function, arguments)


def _register(number: int) -> Value:
    return ir.Constant(I8, number)


def configure_tiles(e: Emitter, place: Value) -> None:
    """Makes all eight registers 16 x 64 bytes; the configuration is written to 64 bytes at `place`."""
    _configure(e, place, [(ir.Constant(I8, 16), 64)] * 8)


def _configure(e: Emitter, place: Value, sizes: list[tuple[Value, int]]) -> None:
    """sizes: of the first registers, rows (int8) and bytes of a row"""
    e.store(e.zero(ir.VectorType(I8, 64)), place)
    e.store(ir.Constant(I8, 1), place, 0)
    for register, (rows, width) in enumerate(sizes):
        e.store(ir.Constant(I16, width), place, 16 + 2 * register)
        e.store(rows, place, 48 + register)
    _call(e, "ldtilecfg", e.at(place))


def release_tiles(e: Emitter) -> None:
    """Gives the registers back, so that the system need not save them."""
    _call(e, "tilerelease")


def load_tile(e: Emitter, register: int, pointer: Value, stride: int | Value = 64) -> None:
    """16 rows of 64 bytes, `stride` bytes apart."""
    _call(e, "tileloadd64", _register(register), pointer, e.i64(stride) if isinstance(stride, int) else stride)


def store_tile(e: Emitter, register: int, pointer: Value, stride: int = 64) -> None:
    """16 rows of 64 bytes, `stride` bytes apart."""
    _call(e, "tilestored64", _register(register), pointer, e.i64(stride))


def zero_tile(e: Emitter, register: int) -> None:
    """All zeros."""
    _call(e, "tilezero", _register(register))


def multiply_tiles(e: Emitter, total: int, left: int, right: int) -> None:
    """total[m][n] += sum over k of left[m][k] * right[k / 2][n][k % 2]; left and right hold bf16, total float32."""
    _call(e, "tdpbf16ps", _register(total), _register(left), _register(right))


def configure_bytes(e: Emitter, place: Value, rows: Value, depth: int) -> None:
    """Registers 0 for int32 sums, 1 for `depth` bytes of 16 weights, 2 for as many of `rows` tokens (see above)."""
    n, quads = e.b.trunc(rows, I8), ir.Constant(I8, depth // 4)
    _configure(e, place, [(n, 64), (quads, 64), (n, depth)])


def multiply_bytes(e: Emitter, total: int, left: int, right: int) -> None:
    """total[m][n] += sum over k of left[m][k] * right[k / 4][n][k % 4]; left int8, right unsigned, total int32."""
    _call(e, "tdpbsud", _register(total), _register(left), _register(right))
