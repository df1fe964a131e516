"""The Hadamard rotation of a head: it spreads outliers over all dimensions, and undoes itself."""

from __future__ import annotations

import math

from llvmlite import ir

from edgert.backends.cpu.simd import F32, Emitter, Value


def hadamard(e: Emitter, vectors: list[Value]) -> list[Value]:
    """Rotates the dimensions that float32 vectors of `lanes` hold one after the other, in blocks of 2**n.

    Blocks are as large as divides their number: 64 for heads of 64, 32 for heads of 96.
    """
    dim = len(vectors) * e.lanes
    block = dim & -dim
    factor = e.const(e.vf, 1 / math.sqrt(block))
    out = [e.b.fmul(vector, factor) for vector in vectors]
    step = 1
    while step < min(block, e.lanes):
        swapped = [i ^ step for i in range(e.lanes)]
        signs = ir.Constant(e.vf, [ir.Constant(F32, -1.0 if i & step else 1.0) for i in range(e.lanes)])
        out = [e.fma(vector, signs, e.shuffle(vector, vector, swapped)) for vector in out]
        step *= 2
    while step < block:
        apart = step // e.lanes
        for i in range(len(out)):
            if not i & apart:
                low, high = out[i], out[i + apart]
                out[i], out[i + apart] = e.b.fadd(low, high), e.b.fsub(low, high)
        step *= 2
    return out


def rotate_head(e: Emitter, dim: int, x: Value) -> None:
    """Rotates float32 (dim) in place."""
    places = range(0, 4 * dim, 4 * e.lanes)
    for place, vector in zip(places, hadamard(e, [e.load(e.vf, x, place) for place in places]), strict=True):
        e.store(vector, x, place)
