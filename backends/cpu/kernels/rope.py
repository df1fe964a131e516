"""From the q, k, v product to the attention's inputs: norm of each head, rotation, and the write to the cache.

Where keys of the cache are rotated by `hadamard.py` so are the queries, which leaves their products as they are;
rotated values come out of the attention rotated, and what reads its results turns them back.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llvmlite import ir

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.cache_write import write
from edgert.backends.cpu.kernels.hadamard import rotate_head
from edgert.backends.cpu.layouts import CACHE_TYPES, PAGE
from edgert.backends.cpu.simd import F32, Emitter, Value, emitted, int32_at, word

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
    "q_norm",  # float32 (head_dim) or 0
    "k_norm",
    "norm_stride",  # bytes from a head's weights to the next head's (0: all have the same)
    "eps",  # float32 bits
    "scale",  # float32 bits: what q is multiplied by
    "means",  # float32 (n_head_kv, head_dim) that refined keys are held less of
    "scales",  # float32 (n_ctx): by position, in place of `scale`; or 0
)
SCALE = ARGUMENTS.index("scale")


def build(
    isa: Isa,
    n_head: str,
    n_head_kv: str,
    head_dim: str,
    n_rot: str,
    style: str,
    type_k: str,
    type_v: str,
    norm: str = "rms",
    first: str = "norm",
    values: str = "as they are",
) -> Callable[[int, int, int], None]:
    """A kernel for one shape of heads; units of work are (token, head).

    first:   whether "norm" or "rope" comes first
    values:  "norm": heads of v are normed, without a weight
    """
    heads, heads_kv, dim, rotated = int(n_head), int(n_head_kv), int(head_dim), int(n_rot)
    apply_norm = emitted(isa, 3, lambda e, x, weight, a: _norm(e, dim, norm == "layer", x, weight, a))
    rotate = emitted(isa, 2, lambda e, x, angles: _rotate(e, rotated, style, x, angles))
    scale = emitted(isa, 2, lambda e, x, factor: _scale(e, dim, x, factor))
    norm_value = emitted(isa, 2, lambda e, x, a: _norm(e, dim, False, x, None, a))
    rotates_first, norms_values = first == "rope", values == "norm"
    kind_k, kind_v = CACHE_TYPES[type_k], CACHE_TYPES[type_v]
    spread = emitted(isa, 1, lambda e, x: rotate_head(e, dim, x))
    write_key = emitted(isa, 3, lambda e, *a: write(e, kind_k, "k", dim, *a))
    write_value = emitted(isa, 3, lambda e, *a: write(e, kind_v, "v", dim, *a))
    subtract = emitted(isa, 2, lambda e, x, mean: _subtract(e, dim, x, mean))
    spread_keys, spread_values, refined = kind_k.rotated, kind_v.rotated, kind_k.refined
    head_bytes = kind_k.page_bytes(dim) + kind_v.page_bytes(dim)
    per_token = heads + 2 * heads_kv

    def rope(thread, n_threads, a):
        n_tokens = word(word(a, 2), 0)
        n_units = n_tokens * per_token
        for unit in range(n_units * thread // n_threads, n_units * (thread + 1) // n_threads):
            head = unit // n_tokens  # threads that wrote neighbours of one head would share lines of the cache
            token = unit - head * n_tokens
            x = word(a, 0) + token * word(a, 1) + head * dim * 4
            if head < heads + heads_kv:
                weight = word(a, 11) + head * word(a, 13)
                if head >= heads:
                    weight = word(a, 12) + (head - heads) * word(a, 13)
                if rotates_first:
                    rotate(x, word(a, 10) + token * rotated * 4)
                if word(a, 11):
                    apply_norm(x, weight, a)
                if rotated and not rotates_first:
                    rotate(x, word(a, 10) + token * rotated * 4)
                if spread_keys:
                    spread(x)
            position = word(word(a, 3), token)
            if head < heads:
                scale(x, word(a, 17) + position * 4 if word(a, 17) else a + 8 * SCALE)
                continue
            row = word(word(a, 4), token) * word(a, 6)
            page = int32_at(word(a, 5), row + position // PAGE)
            place = position % PAGE
            if head < heads + heads_kv:
                inner = (head - heads) * head_bytes
                if refined:
                    subtract(x, word(a, 16) + (head - heads) * dim * 4)
                write_key(x, word(a, 7) + page * word(a, 9) + inner, place)
                if refined and position < PAGE:
                    write_key(x, word(a, 7) + int32_at(word(a, 5), row - 1) * word(a, 9) + inner, place)
            else:
                if norms_values:
                    norm_value(x, a)
                if spread_values:
                    spread(x)
                inner = (head - heads - heads_kv) * head_bytes
                write_value(x, word(a, 8) + page * word(a, 9) + inner, place)

    return rope


def _vector(e: Emitter, length: int) -> ir.VectorType:
    """The widest vector that divides a run of `length` floats."""
    return ir.VectorType(F32, math.gcd(e.lanes, length))


def _norm(e: Emitter, dim: int, centred: bool, x: Value, weight: Value | None, arguments: Value) -> None:
    """x *= weight / sqrt(mean(x**2) + eps), less its mean first where it is to be centred."""
    vector = _vector(e, dim)
    total = e.var(e.zero(vector))
    if centred:
        with e.loop(0, dim, vector.count) as k:
            total.set(e.b.fadd(total.get(), e.load(vector, x, e.mul(k, 4))))
        shift = e.splat(e.b.fmul(e.sum(total.get()), e.const(F32, 1.0 / dim)), vector.count)
        with e.loop(0, dim, vector.count) as k:
            e.store(e.b.fsub(e.load(vector, x, e.mul(k, 4)), shift), x, e.mul(k, 4))
        total.set(e.zero(vector))
    with e.loop(0, dim, vector.count) as k:
        value = e.load(vector, x, e.mul(k, 4))
        total.set(e.fma(value, value, total.get()))
    mean = e.b.fmul(e.sum(total.get()), e.const(F32, 1.0 / dim))
    eps = e.load(F32, arguments, 8 * ARGUMENTS.index("eps"))
    root = e.call("llvm.sqrt.f32", F32, e.b.fadd(mean, eps))
    scale = e.splat(e.b.fdiv(e.const(F32, 1.0), root), vector.count)
    with e.loop(0, dim, vector.count) as k:
        at = e.mul(k, 4)
        value = e.b.fmul(e.load(vector, x, at), scale)
        e.store(value if weight is None else e.b.fmul(value, e.load(vector, weight, at)), x, at)


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


def _scale(e: Emitter, dim: int, x: Value, factor: Value) -> None:
    vector = _vector(e, dim)
    factors = e.splat(e.load(F32, factor), vector.count)
    with e.loop(0, dim, vector.count) as k:
        at = e.mul(k, 4)
        e.store(e.b.fmul(e.load(vector, x, at), factors), x, at)


def _subtract(e: Emitter, dim: int, x: Value, mean: Value) -> None:
    for k in range(0, 4 * dim, 4 * e.lanes):
        e.store(e.b.fsub(e.load(e.vf, x, k), e.load(e.vf, mean, k)), x, k)
