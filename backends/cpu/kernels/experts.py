"""Products of experts: the packed weights of each with the rows that go to it, read once for all of these.

Of the weights only those of experts that have rows are touched. Every thread takes the same panels of every expert,
so that it alone adds to their columns of the residual stream, expert by expert in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.product import products
from edgert.backends.cpu.layouts import BLOCK, CODECS, WORDS_BYTES, Codec
from edgert.backends.cpu.simd import F32, GATED, I64, Emitter, Value, emitted, word

inlined = numba.njit(error_model="numpy", inline="always")

ARGUMENTS = (
    "weights",  # panels, one expert after the other
    "x",  # activations by slot, as in `product.py`
    "words",
    "y",  # float32 rows: by slot; with "scatter" those of the step
    "y_stride",  # bytes
    "n_cols",
    "n_panels",  # of one expert, even
    "table",  # see `gather.py`
    "n_active_at",
    "rows",  # int64 (n_slots): the row of y that a slot is added to
    "shares",  # float32 (n_slots): what it is multiplied by
    "bias",  # float32 (n_expert, n_panels, lanes), where there is one
)


def build(isa: Isa, codec: str, width: str, epilogue: str, bias: str = "no") -> Callable[[int, int, int], None]:
    """A kernel of one type of weights.

    width:     rows of an expert that run together at most: 1, or 8
    epilogue:  "store" writes y; activations take panels in pairs, gate and up, and write the gated result; "scatter"
               adds the shares of the result to y
    bias:      "yes": is added to the product
    """
    kind = CODECS[codec]
    pair = 2 if epilogue in GATED else 1
    x_bytes = 4 if kind.is_float else 1
    panel_row = kind.panel_bytes(BLOCK, isa.lanes)
    lanes = isa.lanes
    scatters = epilogue == "scatter"

    def arguments(a, entry, unit):
        """Of the kernels below, for the first slot of an expert."""
        expert, slot = word(entry, 0), word(entry, 1)
        n_cols, n_panels = word(a, 5), word(a, 6)
        panel_bytes = n_cols * panel_row // BLOCK
        panel = word(a, 0) + (expert * n_panels + unit * pair) * panel_bytes
        x = word(a, 1) + slot * n_cols * x_bytes
        words = word(a, 2) + slot * (n_cols // BLOCK * WORDS_BYTES)
        y = word(a, 3) + unit * lanes * 4
        if not scatters:
            y += slot * word(a, 4)
        bias = word(a, 11) + (expert * n_panels + unit * pair) * lanes * 4
        return panel, x, words, y, word(a, 9) + 8 * slot, word(a, 10) + 4 * slot, bias

    def first_of(n):
        """Takes n rows where there are so many, else the next smaller power of two; returns how many."""
        run = _panels_times_rows(isa, kind, n, epilogue, bias == "yes")
        if n == 1:

            def one(left, panel, x, words, n_cols, y, y_stride, rows, shares, bias):
                run(panel, x, words, n_cols, y, y_stride, rows, shares, bias)
                return 1

            return inlined(one)
        fewer = first_of(n // 2)

        def some(left, panel, x, words, n_cols, y, y_stride, rows, shares, bias):
            if left < n:
                return fewer(left, panel, x, words, n_cols, y, y_stride, rows, shares, bias)
            run(panel, x, words, n_cols, y, y_stride, rows, shares, bias)
            return n

        return inlined(some)

    where, take = inlined(arguments), first_of(int(width))

    def experts(thread, n_threads, a):
        n_units = word(a, 6) // pair
        n_cols, y_stride = word(a, 5), word(a, 4)
        x_stride, words_stride = n_cols * x_bytes, n_cols // BLOCK * WORDS_BYTES
        for i in range(word(word(a, 8), 0)):
            entry = word(a, 7) + 24 * i
            for unit in range(n_units * thread // n_threads, n_units * (thread + 1) // n_threads):
                panel, x, words, y, rows, shares, bias = where(a, entry, unit)
                t, count = 0, word(entry, 2)
                while t < count:
                    x_t, words_t, y_t = x + t * x_stride, words + t * words_stride, y if scatters else y + t * y_stride
                    t += take(count - t, panel, x_t, words_t, n_cols, y_t, y_stride, rows + 8 * t, shares + 4 * t, bias)

    return experts


def _panels_times_rows(isa: Isa, codec: Codec, n: int, epilogue: str, biased: bool) -> Any:
    """One panel (or pair) times n slots, then the epilogue."""
    bytes_32 = codec.panel_bytes(BLOCK, isa.lanes)

    def finish(e: Emitter, panel, x, words, n_cols, y, y_stride, rows, shares, bias) -> None:  # type: ignore[no-untyped-def]
        n_blocks = e.b.sdiv(n_cols, e.i64(BLOCK))
        panel_bytes = e.mul(n_blocks, bytes_32)
        strides = e.mul(n_cols, 4) if codec.is_float else n_cols, e.mul(n_blocks, WORDS_BYTES)

        def product(at: Value, added: Value) -> list[Value]:
            found = products(e, codec, n, at, x, words, n_cols, *strides, e.add(at, panel_bytes))
            return [e.b.fadd(value, e.load(e.vf, added)) for value in found] if biased else found

        results = product(panel, bias)
        if epilogue in GATED:
            ups = product(e.add(panel, panel_bytes), e.add(bias, 4 * e.lanes))
            results = [e.glu(epilogue, gate, up) for gate, up in zip(results, ups, strict=True)]
        for t, value in enumerate(results):
            if epilogue != "scatter":
                e.store(value, e.add(y, e.mul(y_stride, t)))
                continue
            place = e.add(y, e.b.mul(y_stride, e.load(I64, rows, 8 * t)))
            e.store(e.fma(value, e.broadcast(F32, shares, 4 * t), e.load(e.vf, place)), place)

    return emitted(isa, 9, finish)
