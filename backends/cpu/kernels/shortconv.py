"""A short convolution over positions, channel by channel, of what one product makes: its inputs stand in the cache.

Threads share out the channels, each of which reads only its own, so that nobody waits between writing and reading.
"""

from __future__ import annotations

from collections.abc import Callable

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.layouts import BLOCK, PAGE
from edgert.backends.cpu.simd import Emitter, Value, emitted, int32_at, word

ARGUMENTS = (
    "thirds",  # float32 (n_tokens, stride / 4): b, c and h, n_embd each
    "stride",  # bytes
    "n_tokens_at",
    "positions",  # int64 (n_tokens)
    "slots",  # int64 (n_tokens), the row of the page table
    "pages",  # int32 (n_slots, max_pages)
    "max_pages",
    "inputs",  # of page 0, float32 (PAGE, n_embd): b * h
    "page_stride",  # bytes from a page to the next
    "taps",  # float32 (n_taps, n_embd), the latest position's last
    "out",  # float32 (n_tokens, n_embd)
    "n_embd",
)


def build(isa: Isa, n_taps: str) -> Callable[[int, int, int], None]:
    """Units of work are blocks of channels; a step's tokens may come in any order."""
    taps = int(n_taps)
    write = emitted(isa, 3, _write)
    clear = emitted(isa, 1, _clear)
    accumulate = emitted(isa, 3, _accumulate)
    multiply = emitted(isa, 2, _multiply)

    def shortconv(thread, n_threads, a):
        n_tokens, n_embd = word(word(a, 2), 0), word(a, 11)
        n_units = n_embd // BLOCK
        for unit in range(n_units * thread // n_threads, n_units * (thread + 1) // n_threads):
            column = unit * BLOCK * 4
            for token in range(n_tokens):
                position = word(word(a, 3), token)
                page = int32_at(word(a, 5), word(word(a, 4), token) * word(a, 6) + position // PAGE)
                row = word(a, 0) + token * word(a, 1) + column
                place = word(a, 7) + page * word(a, 8) + position % PAGE * n_embd * 4 + column
                write(row, row + 8 * n_embd, place)
            for token in range(n_tokens):
                last = word(word(a, 3), token)
                out = word(a, 10) + token * n_embd * 4 + column
                clear(out)
                for tap in range(taps):
                    position = last - (taps - 1) + tap
                    if position >= 0:
                        page = int32_at(word(a, 5), word(word(a, 4), token) * word(a, 6) + position // PAGE)
                        place = word(a, 7) + page * word(a, 8) + position % PAGE * n_embd * 4 + column
                        accumulate(out, place, word(a, 9) + tap * n_embd * 4 + column)
                multiply(out, word(a, 0) + token * word(a, 1) + 4 * n_embd + column)

    return shortconv


def _write(e: Emitter, b: Value, h: Value, place: Value) -> None:
    for k in range(0, 4 * BLOCK, 4 * e.lanes):
        e.store(e.b.fmul(e.load(e.vf, b, k), e.load(e.vf, h, k)), place, k)


def _clear(e: Emitter, out: Value) -> None:
    for k in range(0, 4 * BLOCK, 4 * e.lanes):
        e.store(e.zero(e.vf), out, k)


def _accumulate(e: Emitter, out: Value, inputs: Value, taps: Value) -> None:
    for k in range(0, 4 * BLOCK, 4 * e.lanes):
        e.store(e.fma(e.load(e.vf, inputs, k), e.load(e.vf, taps, k), e.load(e.vf, out, k)), out, k)


def _multiply(e: Emitter, out: Value, c: Value) -> None:
    for k in range(0, 4 * BLOCK, 4 * e.lanes):
        e.store(e.b.fmul(e.load(e.vf, out, k), e.load(e.vf, c, k)), out, k)
