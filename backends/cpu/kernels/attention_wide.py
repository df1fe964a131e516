"""Attention of a run of tokens of one sequence: a few tokens and their group of heads pass over the keys together."""

from __future__ import annotations

from collections.abc import Callable

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.flash import Row, attend, parts_of, sink_weight
from edgert.backends.cpu.kernels.hadamard import rotate_head
from edgert.backends.cpu.layouts import CACHE_TYPES, CacheType, partial_bytes, wide_attention_tokens
from edgert.backends.cpu.simd import F32, Emitter, Value, emitted, word

ARGUMENTS = (
    "q",  # float32 rows: heads of q first
    "q_stride",  # bytes
    "n_rows_at",  # rows 0..n-1, runs of 64 tokens of one sequence
    "positions",
    "slots",
    "pages",
    "max_pages",
    "keys",
    "values",
    "page_stride",  # bytes from a page to the next
    "window",
    "out",  # float32 rows (n_head, head_dim)
    "scratch",  # results of `flash.Row`, one set a thread
    "scratch_stride",
    "softcap",  # float32 bits: what scores are capped at
    "sinks",  # float32 (n_head): scores of a position without value, where the family has one
)


def build(
    isa: Isa,
    n_head: str,
    n_head_kv: str,
    head_dim: str,
    type_k: str,
    type_v: str,
    capped: str = "no",
    sinks: str = "no",
) -> Callable[[int, int, int], None]:
    """Units of work are (tokens, key-value head), dealt to the threads in turn: later ones see more keys."""
    heads, heads_kv, dim = int(n_head), int(n_head_kv), int(head_dim)
    group = heads // heads_kv
    together = wide_attention_tokens(isa.registers, group)
    kinds = CACHE_TYPES[type_k], CACHE_TYPES[type_v]
    head_bytes = kinds[0].page_bytes(dim) + kinds[1].page_bytes(dim)

    n_parts, size = parts_of(group)
    last = (n_parts - 1) * size  # where the last part begins

    def emitter(n_heads: int) -> Callable[..., None]:
        def run(e: Emitter, *arguments: Value) -> None:
            _run(e, kinds, dim, together, n_heads, capped == "yes", sinks == "yes", *arguments)

        return run

    attend_part, attend_last = emitted(isa, 13, emitter(size)), emitted(isa, 13, emitter(group - last))

    def attention(thread, n_threads, a):
        n_rows = word(word(a, 2), 0)
        out_stride = heads * dim * 4
        scratch = word(a, 12) + thread * word(a, 13)
        unit = thread
        while unit < n_rows // together * heads_kv:  # a range could raise on a step of 0
            row = unit // heads_kv * together
            head = unit % heads_kv
            inner = head * head_bytes
            q = word(a, 0) + row * word(a, 1) + head * group * dim * 4
            keys, values = word(a, 7) + inner, word(a, 8) + inner
            pages = word(a, 5) + word(word(a, 4), row) * word(a, 6) * 4
            position = word(word(a, 3), row)
            out = word(a, 11) + row * out_stride + head * group * dim * 4
            sink = word(a, 15) + head * group * 4
            for part in range(0, last, size):
                attend_part(q + part * dim * 4, word(a, 1), keys, values, word(a, 9), pages, position, word(a, 10),
                            scratch, out + part * dim * 4, out_stride, word(a, 14), sink + part * 4)  # fmt: skip
            attend_last(q + last * dim * 4, word(a, 1), keys, values, word(a, 9), pages, position, word(a, 10),
                        scratch, out + last * dim * 4, out_stride, word(a, 14), sink + last * 4)  # fmt: skip
            unit += n_threads

    return attention


def _run(  # type: ignore[no-untyped-def]
    e: Emitter,
    kinds: tuple[CacheType, CacheType],
    dim: int,
    together: int,
    n_heads: int,
    capped: bool,
    sinks: bool,
    q,
    q_stride,
    keys,
    values,
    stride,
    pages,
    position,
    window,
    scratch,
    out,
    out_stride,
    softcap,
    sink,
) -> None:
    """`together` tokens and n_heads heads of each."""
    zero, record = e.i64(0), partial_bytes(dim)
    rows = []
    begin = None
    for t in range(together):
        end = e.add(position, t + 1)
        start = e.b.sub(end, window)
        limited = e.b.and_(e.b.icmp_signed(">", window, zero), e.b.icmp_signed(">", start, zero))
        start = e.b.select(limited, start, zero)
        begin = start if begin is None else begin
        for g in range(n_heads):
            result = e.add(scratch, (t * n_heads + g) * record)
            rows.append(Row(e.add(q, e.mul(q_stride, t), g * dim * 4), start, end, result))
    assert begin is not None
    cap = softcap if capped else None
    attend(e, dim, kinds, rows, keys, values, stride, pages, begin, e.add(position, together), cap)
    for t in range(together):
        for g in range(n_heads):
            result = rows[t * n_heads + g].out
            total = e.load(F32, result, dim * 4 + 4)
            if sinks:
                total = e.b.fadd(total, sink_weight(e, sink, 4 * g, e.load(F32, result, dim * 4)))
            scale = e.splat(e.b.fdiv(e.const(F32, 1.0), total))
            place = e.add(out, e.mul(out_stride, t), g * dim * 4)
            with e.loop(0, dim, e.lanes) as k:
                at = e.mul(k, 4)
                e.store(e.b.fmul(e.load(e.vf, result, at), scale), place, at)
            if kinds[1].rotated:
                rotate_head(e, dim, place)
