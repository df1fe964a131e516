"""Attention of single tokens: the cached positions are cut in chunks that threads share, merged by `merge.py`.

Chunks are cut at fixed positions, so that a token's result depends on nothing but its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.flash import Row, attend
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
)


def build(
    isa: Isa, n_head: str, n_head_kv: str, head_dim: str, type_k: str, type_v: str
) -> Callable[[int, int, int], None]:
    """Units of work are (token, chunk, key-value head); each runs the head's whole group of queries."""
    heads, heads_kv, dim = int(n_head), int(n_head_kv), int(head_dim)
    group = heads // heads_kv
    record = partial_bytes(dim)
    kinds = CACHE_TYPES[type_k], CACHE_TYPES[type_v]
    head_bytes = kinds[0].page_bytes(dim) + kinds[1].page_bytes(dim)

    def run(  # type: ignore[no-untyped-def]
        e: Emitter, q, keys, values, stride, pages, begin, end, out, step
    ) -> None:
        rows = [Row(e.add(q, r * dim * 4), begin, end, e.add(out, e.mul(step, r))) for r in range(group)]
        attend(e, dim, kinds, rows, keys, values, stride, pages, begin, end)

    attend_group = emitted(isa, 9, run)

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
        unit = 0
        for i in range(n_rows):
            row = first + i
            end = word(word(a, 4), row) + 1
            begin = max(0, end - window) if window else 0
            pages = word(a, 6) + word(word(a, 5), row) * word(a, 7) * 4
            for chunk in range(begin // CHUNK, (end - 1) // CHUNK + 1):
                for head in range(heads_kv):
                    if mine <= unit < stop:
                        out = word(a, 12) + ((i * heads + head * group) * max_chunks + chunk) * record
                        inner = head * head_bytes
                        attend_group(
                            word(a, 0) + row * word(a, 1) + head * group * dim * 4,
                            word(a, 8) + inner,
                            word(a, 9) + inner,
                            word(a, 10),
                            pages,
                            max(begin, chunk * CHUNK),
                            min(end, (chunk + 1) * CHUNK),
                            out,
                            max_chunks * record,
                        )
                    unit += 1

    return attention
