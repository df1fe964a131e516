"""Rows of float32 -> the form in which the next product reads them, with the norm or activation between fused in.

The forms of a row of n_cols activations:
    int8     int8 (n_cols) and four words for each block of 32 (see `panel.py`)
    pairs    the same, but the bytes of two rows together: (n_cols / 8, 2, 8)
    f32      float32 (n_cols), for float weights
    tiles    bf16 tiles (see `tiles.py`), for long runs of tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.flash import sink_weight
from edgert.backends.cpu.kernels.hadamard import rotate_head
from edgert.backends.cpu.layouts import BLOCK, CACHE_TYPES, CHUNK, WORDS_BYTES, partial_bytes
from edgert.backends.cpu.simd import F32, GATED, I8, I32, I64, Emitter, Value, emitted, to_bfloat, word

ARGUMENTS = (
    "source",  # float32 rows
    "source_stride",  # bytes
    "weight",  # float32 (n_cols) of the norm; of a gated activation the up rows
    "n_cols",
    "first_row_at",
    "n_rows_at",
    "out",
    "words",
    "private",  # bytes between the threads' own copies of out and words (0: rows are shared out)
    "index",  # int64 (n_rows) rows to take, or 0
    "eps",  # float32 bits
    "post",  # float32 rows to be normed and added to source first
    "post_stride",
    "post_weight",
    "partials",  # partial results of attention, (n_rows, n_head, max_chunks)
    "max_chunks",
    "positions",
    "window",
    "source_private",  # bytes between the threads' own copies of the merged source
    "bias",  # float32 (n_cols) of a layer norm
    "post_bias",
    "up_stride",  # bytes from an up row to the next
    "post_scale",  # float32 bits: what source is multiplied by when post has been added
    "sinks",  # float32 (n_head): scores of a position without value, for "merge" where the family has one
)


def build(
    isa: Isa,
    source: str,
    form: str,
    norm: str = "rms",
    gated: str = "yes",
    n_head: str = "0",
    head_dim: str = "0",
    type_v: str = "f16",
    sinks: str = "no",
) -> Callable[[int, int, int], None]:
    """A kernel over rows.

    source:  "plain"; "norm"; "renorm" (source = norm of source); "post" (source += norm of the post rows);
             "post_norm" (the same, then norm); an activation (activation(source) * up, or without up where it is
             not gated); "merge" (source = partial results of attention joined)
    form:    "int8", "pairs", "f32", "tiles"; "none" for what "post" and "merge" do to their source alone
    norm:    "rms" or "layer"
    """
    is_gated = gated == "yes"
    convert = emitted(isa, 7, _converter(source, form, norm, is_gated))
    add_post = emitted(isa, 5, lambda e, *a: _add_post(e, norm, *a))
    dim, heads = int(head_dim), int(n_head)
    record = partial_bytes(dim)
    rotated = CACHE_TYPES[type_v].rotated
    renorm = emitted(isa, 4, lambda e, *a: _renorm(e, norm, *a))
    merge = emitted(isa, 5, lambda e, *a: _merge(e, dim, rotated, sinks == "yes", *a))

    # Booleans, since Numba would compare strings while running.
    renorms = source == "renorm"
    posts, merges, converts = source in ("post", "post_norm"), source == "merge", form != "none"
    gates = source in GATED and is_gated

    def rows(thread, n_threads, a):
        first = word(word(a, 4), 0)
        n_rows = word(word(a, 5), 0)
        private = word(a, 8)
        begin, end = n_rows * thread // n_threads, n_rows * (thread + 1) // n_threads
        if private:
            begin, end = 0, n_rows
        for i in range(begin, end):
            row = first + i
            if word(a, 9):
                row = word(word(a, 9), i)
            x = word(a, 0) + row * word(a, 1)
            weight = word(a, 2)
            if posts:
                add_post(x, word(a, 11) + row * word(a, 12), word(a, 13), word(a, 3), a)
            elif renorms:
                renorm(x, weight, word(a, 3), a)
            elif merges:
                x += thread * word(a, 18)
                end = word(word(a, 16), row) + 1
                begin = max(0, end - word(a, 17)) if word(a, 17) else 0
                for head in range(heads):
                    parts = word(a, 14) + (i * heads + head) * word(a, 15) * record
                    last = (end - 1) // CHUNK + 1
                    merge(parts, begin // CHUNK, last, x + head * dim * 4, word(a, 23) + head * 4)
            elif gates:
                weight += row * word(a, 21)
            out, words = word(a, 6) + thread * private, word(a, 7) + thread * private
            if converts:
                convert(x, weight, word(a, 3), a, out, words, i)

    return rows


def _mean(e: Emitter, x: Value, n_cols: Value, function: Callable[[Value], tuple[Value, Value]]) -> Value:
    """The mean of products of two vectors that `function` makes of each vector of the row."""
    parts = [e.var(e.zero(e.vf)) for _ in range(BLOCK // e.lanes)]
    with e.loop(0, n_cols, BLOCK) as k:
        for i, part in enumerate(parts):
            value = e.load(e.vf, x, e.mul(e.add(k, i * e.lanes), 4))
            part.set(e.fma(*function(value), part.get()))
    total = parts[0].get()
    for part in parts[1:]:
        total = e.b.fadd(total, part.get())
    return e.b.fdiv(e.sum(total), e.b.sitofp(n_cols, F32))


def normer(e: Emitter, kind: str, x: Value, n_cols: Value, eps: Value) -> Callable[[Value, Value, Value, Value], Value]:
    """Reads the row's statistics; returns (value, weight, bias, offset) -> the normed value, as vectors.

    weight, bias:  addresses, of which `offset` is that of the vector
    """
    shift = None
    if kind == "layer":
        shift = e.splat(_mean(e, x, n_cols, lambda value: (value, e.const(e.vf, 1.0))))

    def centred(value: Value) -> Value:
        return value if shift is None else e.b.fsub(value, shift)

    mean = _mean(e, x, n_cols, lambda value: (centred(value), centred(value)))
    root = e.call("llvm.sqrt.f32", F32, e.b.fadd(mean, eps))
    scale = e.splat(e.b.fdiv(e.const(F32, 1.0), root))

    def normed(value: Value, weight: Value, bias: Value, offset: Value) -> Value:
        value = e.b.fmul(e.b.fmul(centred(value), scale), e.load(e.vf, weight, offset))
        return value if shift is None else e.b.fadd(value, e.load(e.vf, bias, offset))

    return normed


def _argument(e: Emitter, kind: Any, arguments: Value, name: str) -> Value:
    return e.load(kind, arguments, 8 * ARGUMENTS.index(name))


def _add_post(e: Emitter, norm: str, x: Value, post: Value, weight: Value, n_cols: Value, arguments: Value) -> None:
    normed = normer(e, norm, post, n_cols, _argument(e, F32, arguments, "eps"))
    bias = _argument(e, I64, arguments, "post_bias")
    scale = e.splat(_argument(e, F32, arguments, "post_scale"))
    with e.loop(0, n_cols, e.lanes) as k:
        at = e.mul(k, 4)
        value = normed(e.load(e.vf, post, at), weight, bias, at)
        e.store(e.b.fmul(e.b.fadd(e.load(e.vf, x, at), value), scale), x, at)


def _renorm(e: Emitter, norm: str, x: Value, weight: Value, n_cols: Value, arguments: Value) -> None:
    normed = normer(e, norm, x, n_cols, _argument(e, F32, arguments, "eps"))
    bias = _argument(e, I64, arguments, "bias")
    with e.loop(0, n_cols, e.lanes) as k:
        at = e.mul(k, 4)
        e.store(normed(e.load(e.vf, x, at), weight, bias, at), x, at)


def _merge(
    e: Emitter, dim: int, rotated: bool, sinks: bool, parts: Value, first: Value, last: Value, out: Value, sink: Value
) -> None:
    """Joins the chunks [first, last) of one head, each weighing e**(its maximum - the largest); turns them back."""
    record = partial_bytes(dim)
    most = e.var(e.load(F32, parts, e.add(e.mul(first, record), dim * 4)))
    with e.loop(first, last) as c:
        most.set(e.maximum(most.get(), e.load(F32, parts, e.add(e.mul(c, record), dim * 4))))
    total = e.var(e.zero(F32))
    with e.loop(0, dim, e.lanes) as k:
        e.store(e.zero(e.vf), out, e.mul(k, 4))
    with e.loop(first, last) as c:
        part = e.add(parts, e.mul(c, record))
        weight = e.exp(e.splat(e.b.fsub(e.load(F32, part, dim * 4), most.get())))
        scalar = e.b.extract_element(weight, ir.Constant(I32, 0))
        total.set(e.b.fadd(total.get(), e.b.fmul(scalar, e.load(F32, part, dim * 4 + 4))))
        with e.loop(0, dim, e.lanes) as k:
            at = e.mul(k, 4)
            e.store(e.fma(e.load(e.vf, part, at), weight, e.load(e.vf, out, at)), out, at)
    if sinks:
        total.set(e.b.fadd(total.get(), sink_weight(e, sink, 0, most.get())))
    scale = e.splat(e.b.fdiv(e.const(F32, 1.0), total.get()))
    with e.loop(0, dim, e.lanes) as k:
        at = e.mul(k, 4)
        e.store(e.b.fmul(e.load(e.vf, out, at), scale), out, at)
    if rotated:
        rotate_head(e, dim, out)


def _converter(source: str, form: str, norm: str, gated: bool) -> Callable[..., None]:
    def convert(
        e: Emitter, x: Value, weight: Value, n_cols: Value, arguments: Value, out: Value, words: Value, row: Value
    ) -> None:
        norms = source in ("norm", "post_norm")
        normed = normer(e, norm, x, n_cols, _argument(e, F32, arguments, "eps")) if norms else None
        bias = _argument(e, I64, arguments, "bias")
        if form == "tiles":
            # tile (row / 16, column / 32): 16 rows of 32
            tiles_across = e.b.sdiv(n_cols, e.i64(BLOCK))
            tile = e.add(e.mul(e.b.sdiv(row, e.i64(16)), tiles_across), 0)
            out = e.add(out, e.mul(tile, 1024), e.mul(e.b.srem(row, e.i64(16)), 64))
        else:
            even = e.b.and_(row, e.i64(-2)) if form == "pairs" else row
            out = e.add(out, e.b.mul(even, e.mul(n_cols, 4 if form == "f32" else 1)))
            if form == "pairs":
                out = e.add(out, e.mul(e.b.sub(row, even), 8))
            words = e.add(words, e.b.mul(row, e.mul(e.b.sdiv(n_cols, e.i64(BLOCK)), WORDS_BYTES)))
        with e.loop(0, n_cols, BLOCK) as k:
            values = []
            for i in range(BLOCK // e.lanes):
                at = e.mul(e.add(k, i * e.lanes), 4)
                value = e.load(e.vf, x, at)
                if normed is not None:
                    value = normed(value, weight, bias, at)
                elif source in GATED:
                    value = e.glu(source, value, e.load(e.vf, weight, at)) if gated else e.gate(source, value)
                values.append(value)
            if form == "f32":
                for i, value in enumerate(values):
                    e.store(value, out, e.mul(e.add(k, i * e.lanes), 4))
            elif form == "tiles":
                for i, value in enumerate(values):
                    e.store(to_bfloat(e, value), out, e.add(e.mul(k, 32), 2 * i * e.lanes))
            else:
                at = e.add(words, e.b.sdiv(e.mul(k, WORDS_BYTES), e.i64(BLOCK)))
                _quantize(e, values, e.add(out, e.mul(k, 1 + (form == "pairs"))), at, form == "pairs")

    return convert


def _quantize(e: Emitter, values: list[Value], out: Value, words: Value, paired: bool) -> None:
    """32 values -> int8 with scale max / 127 (paired: eight bytes of each 16), and the block's four words."""
    largest = e.zero(e.vf)
    for value in values:
        largest = e.maximum(largest, e.fabs(value))
    most = e.reduce(largest, e.maximum)
    d = e.b.fmul(most, e.const(F32, 1.0 / 127.0))
    nonzero = e.b.fcmp_ordered(">", most, e.const(F32, 0.0))
    inverse = e.splat(e.b.select(nonzero, e.b.fdiv(e.const(F32, 127.0), most), e.const(F32, 0.0)))
    halves = [e.zero(e.vi), e.zero(e.vi)]
    for i, value in enumerate(values):
        integers = e.round(e.b.fmul(value, inverse))
        half = i * e.lanes // 16
        halves[half] = e.b.add(halves[half], integers)
        at = i * e.lanes
        e.store(e.b.trunc(integers, ir.VectorType(I8, e.lanes)), out, at // 8 * 16 + at % 8 if paired else at)
    first, second = (e.reduce(half, e.b.add) for half in halves)
    whole = e.b.fmul(d, e.b.sitofp(e.b.add(first, second), F32))
    eight = e.const(F32, -8.0)
    e.store(d, words, 0)
    e.store(whole, words, 4)
    e.store(e.b.fmul(eight, e.b.fmul(d, e.b.sitofp(first, F32))), words, 8)
    e.store(e.b.fmul(eight, whole), words, 12)
