"""From the q, k, v product to the attention's inputs: bias, norm of each head, rotation, and the write to the cache.

The cache of a layer is paged: a page holds PAGE positions of one sequence, for each key-value head
    keys    float16 (head_dim, PAGE): positions side by side, a vector scores them together
    values  float16 (PAGE, head_dim), right behind the keys, so that a head's part is read in one go
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llvmlite import ir

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.layouts import PAGE
from edgert.backends.cpu.simd import F32, I32, Emitter, Value, emitted, int32_at, word

ARGUMENTS = (
    "qkv",  # float32 (n_tokens, stride / 4): heads of q, then k, then v; q is rotated in place
    "stride",  # bytes
    "n_tokens_at",
    "positions",  # int64 (n_tokens)
    "slots",  # int64 (n_tokens), the row of the page table
    "pages",  # int32 (n_slots, max_pages)
    "max_pages",
    "keys",  # of page 0
    "values",
    "page_stride",  # bytes from a page to the next
    "angles",  # float32 (n_tokens, 2, n_rot / 2): cosines, sines
    "bias",  # float32 (n_head + 2 n_head_kv, head_dim) or 0
    "q_norm",  # float32 (head_dim) or 0
    "k_norm",
    "eps",  # float32 bits
    "scale",  # float32 bits: what q is multiplied by
)


def build(
    isa: Isa, n_head: str, n_head_kv: str, head_dim: str, n_rot: str, style: str
) -> Callable[[int, int, int], None]:
    """A kernel for one shape of heads; units of work are (token, head)."""
    heads, heads_kv, dim, rotated = int(n_head), int(n_head_kv), int(head_dim), int(n_rot)
    add_bias = emitted(isa, 2, lambda e, x, bias: _add_bias(e, dim, x, bias))
    norm = emitted(isa, 3, lambda e, x, weight, a: _norm(e, dim, x, weight, a))
    rotate = emitted(isa, 2, lambda e, x, angles: _rotate(e, rotated, style, x, angles))
    scale = emitted(isa, 2, lambda e, x, a: _scale(e, dim, x, a))
    write = emitted(isa, 3, lambda e, x, out, stride: _write_halves(e, dim, x, out, stride))
    per_token = heads + 2 * heads_kv

    def rope(thread, n_threads, a):
        n_units = word(word(a, 2), 0) * per_token
        for unit in range(n_units * thread // n_threads, n_units * (thread + 1) // n_threads):
            token = unit // per_token
            head = unit - token * per_token
            x = word(a, 0) + token * word(a, 1) + head * dim * 4
            if word(a, 11):
                add_bias(x, word(a, 11) + head * dim * 4)
            if head < heads + heads_kv:
                weight = word(a, 12) if head < heads else word(a, 13)
                if weight:
                    norm(x, weight, a)
                rotate(x, word(a, 10) + token * rotated * 4)
            if head < heads:
                scale(x, a)
                continue
            position = word(word(a, 3), token)
            page = int32_at(word(a, 5), word(word(a, 4), token) * word(a, 6) + position // PAGE)
            place = position % PAGE
            if head < heads + heads_kv:
                inner = (head - heads) * 2 * dim * PAGE + place
                write(x, word(a, 7) + page * word(a, 9) + inner * 2, PAGE * 2)
            else:
                inner = ((head - heads - heads_kv) * 2 * PAGE + place) * dim
                write(x, word(a, 8) + page * word(a, 9) + inner * 2, 2)

    return rope


def _vector(e: Emitter, length: int) -> ir.VectorType:
    """The widest vector that divides a run of `length` floats."""
    return ir.VectorType(F32, math.gcd(e.lanes, length))


def _add_bias(e: Emitter, dim: int, x: Value, bias: Value) -> None:
    vector = _vector(e, dim)
    with e.loop(0, dim, vector.count) as k:
        at = e.mul(k, 4)
        e.store(e.b.fadd(e.load(vector, x, at), e.load(vector, bias, at)), x, at)


def _norm(e: Emitter, dim: int, x: Value, weight: Value, arguments: Value) -> None:
    """x *= weight / sqrt(mean(x**2) + eps)"""
    vector = _vector(e, dim)
    total = e.var(e.zero(vector))
    with e.loop(0, dim, vector.count) as k:
        value = e.load(vector, x, e.mul(k, 4))
        total.set(e.fma(value, value, total.get()))
    mean = e.b.fmul(e.sum(total.get()), e.const(F32, 1.0 / dim))
    eps = e.load(F32, arguments, 8 * ARGUMENTS.index("eps"))
    root = e.call("llvm.sqrt.f32", F32, e.b.fadd(mean, eps))
    scale = e.splat(e.b.fdiv(e.const(F32, 1.0), root), vector.count)
    with e.loop(0, dim, vector.count) as k:
        at = e.mul(k, 4)
        e.store(e.b.fmul(e.b.fmul(e.load(vector, x, at), scale), e.load(vector, weight, at)), x, at)


def _rotate(e: Emitter, rotated: int, style: str, x: Value, angles: Value) -> None:
    half = rotated // 2
    vector = _vector(e, half)
    n = vector.count
    with e.loop(0, half, n) as k:
        at = e.mul(k, 4)
        cosine, sine = e.load(vector, angles, at), e.load(vector, angles, e.add(at, 4 * half))
        if style == "neox":
            first, second = e.load(vector, x, at), e.load(vector, x, e.add(at, 4 * half))
        else:
            both = e.load(ir.VectorType(F32, 2 * n), x, e.mul(at, 2))
            first = e.shuffle(both, both, list(range(0, 2 * n, 2)))
            second = e.shuffle(both, both, list(range(1, 2 * n, 2)))
        new_first = e.b.fsub(e.b.fmul(first, cosine), e.b.fmul(second, sine))
        new_second = e.b.fadd(e.b.fmul(first, sine), e.b.fmul(second, cosine))
        if style == "neox":
            e.store(new_first, x, at)
            e.store(new_second, x, e.add(at, 4 * half))
        else:
            mixed = [i // 2 + n * (i % 2) for i in range(2 * n)]
            e.store(e.shuffle(new_first, new_second, mixed), x, e.mul(at, 2))


def _scale(e: Emitter, dim: int, x: Value, arguments: Value) -> None:
    vector = _vector(e, dim)
    factor = e.splat(e.load(F32, arguments, 8 * ARGUMENTS.index("scale")), vector.count)
    with e.loop(0, dim, vector.count) as k:
        at = e.mul(k, 4)
        e.store(e.b.fmul(e.load(vector, x, at), factor), x, at)


def _write_halves(e: Emitter, dim: int, x: Value, out: Value, stride: Value) -> None:
    """dim float32 -> float16, `stride` bytes apart."""
    vector = _vector(e, dim)
    with e.loop(0, dim, vector.count) as k:
        halves = e.to_half(e.load(vector, x, e.mul(k, 4)))
        for i in range(vector.count):
            value = e.b.extract_element(halves, ir.Constant(I32, i))
            e.store(value, out, e.b.mul(e.add(k, i), stride))
