"""Attention of single tokens: the cached positions are cut in chunks that threads share, merged by `merge.py`.

Chunks are cut at fixed positions, so that a token's result depends on nothing but its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.flash import Row, attend, parts_of
from edgert.backends.cpu.layouts import CACHE_TYPES, CHUNK, partial_bytes
from edgert.backends.cpu.simd import Emitter, emitted, word

ARGUMENTS = (
    "q",  # float32 rows: heads of q first
    "q_stride",  # bytes
    "first_row_at",
    "n_rows_at",
    "positions",  # int64 by row
    "slots",  # int64 by row
    "pages",  # int32 (n_slots, max_pages)
    "max_pages",
    "keys",
    "values",
    "page_stride",  # bytes from a page to the next
    "window",  # positions that a token sees, itself included; 0: all
    "partials",  # (n_rows, n_head, max_chunks) results of `flash.Row`
    "max_chunks",
    "softcap",  # float32 bits: what scores are capped at
)


def build(
    isa: Isa, n_head: str, n_head_kv: str, head_dim: str, type_k: str, type_v: str, capped: str = "no"
) -> Callable[[int, int, int], None]:
    """Units of work are (token, chunk, key-value head); each runs the head's group of queries, large ones in parts."""
    heads, heads_kv, dim = int(n_head), int(n_head_kv), int(head_dim)
    group = heads // heads_kv
    record = partial_bytes(dim)
    kinds = CACHE_TYPES[type_k], CACHE_TYPES[type_v]
    head_bytes = kinds[0].page_bytes(dim) + kinds[1].page_bytes(dim)

    n_parts, size = parts_of(group)
    last = (n_parts - 1) * size  # where the last part begins

    def emitter(n_rows: int) -> Callable[..., None]:
        def run(  # type: ignore[no-untyped-def]
            e: Emitter, q, keys, values, stride, pages, begin, end, out, step, softcap
        ) -> None:
            rows = [Row(e.add(q, r * dim * 4), begin, end, e.add(out, e.mul(step, r))) for r in range(n_rows)]
            cap = softcap if capped == "yes" else None
            attend(e, dim, kinds, rows, keys, values, stride, pages, begin, end, cap)

        return run

    attend_part, attend_last = emitted(isa, 10, emitter(size)), emitted(isa, 10, emitter(group - last))

    def attention(thread, n_threads, a):
        first, n_rows = word(word(a, 2), 0), word(word(a, 3), 0)
        window, max_chunks = word(a, 11), word(a, 13)
        total = 0
        for i in range(n_rows):
            end = word(word(a, 4), first + i) + 1
            begin = max(0, end - window) if window else 0
            total += (end - 1) // CHUNK - begin // CHUNK + 1
        total *= heads_kv
        mine, stop = total * thread // n_threads, total * (thread + 1) // n_threads
        unit, i = 0, 0
        while i < n_rows and unit < stop:
            slot, begin, n = word(word(a, 5), first + i), 0, 1
            if window:
                begin = max(0, word(word(a, 4), first + i) + 1 - window)
            while i + n < n_rows and word(word(a, 5), first + i + n) == slot:
                n += 1
            pages = word(a, 6) + slot * word(a, 7) * 4
            # Tokens of one sequence take a head's keys after one another, which then lie in this processor's cache.
            for chunk in range(begin // CHUNK, word(word(a, 4), first + i + n - 1) // CHUNK + 1):
                for head in range(heads_kv):
                    keys, values = word(a, 8) + head * head_bytes, word(a, 9) + head * head_bytes
                    for j in range(i, i + n):
                        end = word(word(a, 4), first + j) + 1
                        begin = max(0, end - window) if window else 0
                        start, stop_at = max(begin, chunk * CHUNK), min(end, (chunk + 1) * CHUNK)
                        if start >= stop_at:
                            continue
                        if mine <= unit < stop:
                            out = word(a, 12) + ((j * heads + head * group) * max_chunks + chunk) * record
                            q = word(a, 0) + (first + j) * word(a, 1) + head * group * dim * 4
                            step = max_chunks * record
                            for part in range(0, last, size):
                                attend_part(q + part * dim * 4, keys, values, word(a, 10), pages, start, stop_at,
                                            out + part * step, step, word(a, 14))  # fmt: skip
                            attend_last(q + last * dim * 4, keys, values, word(a, 10), pages, start, stop_at,
                                        out + last * step, step, word(a, 14))  # fmt: skip
                        unit += 1
            i += n

    return attention
