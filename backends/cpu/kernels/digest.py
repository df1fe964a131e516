"""Digests of memory, one for each piece, as fast as it can be read: they tell whether a file is as it was written."""

from __future__ import annotations

from collections.abc import Callable

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.simd import I64, Emitter, Value, emitted, put_word, word

CHAINS = 4  # vectors that are summed side by side, to hide the latency of one

ARGUMENTS = (
    "address",
    "n_bytes",  # a multiple of 64
    "piece_bytes",  # a multiple of 64
    "out",  # int64, one for each piece
)


def build(isa: Isa) -> Callable[[int, int, int], None]:
    """Shares the pieces out over the threads. A digest depends on how many lanes the instruction set has."""
    fold = emitted(isa, 3, _fold)
    step = CHAINS * isa.lanes * 4

    def digest(thread, n_threads, a):
        n_bytes, piece = word(a, 1), word(a, 2)
        n_pieces = (n_bytes + piece - 1) // piece
        for i in range(n_pieces * thread // n_threads, n_pieces * (thread + 1) // n_threads):
            n = min(piece, n_bytes - i * piece)
            start = word(a, 0) + i * piece
            whole = n // step * step
            out = word(a, 3) + 8 * i
            put_word(out, n)
            fold(start, whole, out)
            for at in range(whole, n, 8):
                put_word(out, word(out, 0) * 0x100000001B3 + word(start + at, 0))

    return digest


def _fold(e: Emitter, start: Value, n_bytes: Value, out: Value) -> None:
    """Each 32-bit lane is the value at 33 of a polynomial whose coefficients are its words: 33 is odd, so that no
    word is multiplied away."""
    sums = [e.var(e.zero(e.vi)) for _ in range(CHAINS)]
    size = 4 * e.lanes
    with e.loop(0, n_bytes, CHAINS * size) as at:
        for i, total in enumerate(sums):
            value = total.get()
            times_33 = e.b.add(value, e.b.shl(value, e.const(e.vi, 5)))
            total.set(e.b.add(times_33, e.load(e.vi, e.add(start, at), i * size)))
    result = e.load(I64, out)
    for total in sums:
        for lane in range(e.lanes):
            element = e.b.zext(e.b.extract_element(total.get(), e.b.trunc(e.i64(lane), e.vi.element)), I64)
            result = e.add(e.mul(result, 0x100000001B3), element)
    e.store(result, out)
