"""bf16 tiles -> the sums of the squares of their columns, for who wants no more of what a product reads."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.layouts import BLOCK, TILE
from edgert.backends.cpu.simd import I16, Emitter, Value, emitted, word

ARGUMENTS = (
    "x",  # bf16 tiles (n_tokens / 16, n_cols / 32, 16, 32), as `tiles.py` reads them
    "n_cols",
    "n_tokens_at",  # address of the int64 number of tokens
    "out",  # float32 (n_cols,)
)
TURNS = 4  # rows whose sums are kept apart: none waits for the one before


def build(isa: Isa) -> Callable[[int, int, int], None]:
    """A kernel that sums over all tokens, shared out over the threads by columns."""
    add_up = emitted(isa, 4, _add_up)

    def squares(thread, n_threads, a):
        n_blocks, n_tokens = word(a, 1) // BLOCK, word(word(a, 2), 0)
        for k in range(n_blocks * thread // n_threads, n_blocks * (thread + 1) // n_threads):
            add_up(word(a, 0) + k * TILE, word(a, 3) + k * BLOCK * 4, n_tokens, n_blocks * TILE)

    return squares


def _add_up(e: Emitter, x: Value, out: Value, n_tokens: Value, stride: Value) -> None:
    halves = ir.VectorType(I16, e.lanes)
    steps = range(0, BLOCK, e.lanes)
    sums = {(turn, i): e.var(e.zero(e.vf)) for turn in range(TURNS) for i in steps}

    def add(line: Value, turn: int, offset: int) -> None:
        for i in steps:
            bits = e.b.zext(e.load(halves, line, offset + 2 * i), e.vi)
            value = e.b.bitcast(e.b.shl(bits, e.const(e.vi, 16)), e.vf)
            sums[turn, i].set(e.fma(value, value, sums[turn, i].get()))

    whole = e.b.udiv(n_tokens, e.i64(16))
    with e.loop(0, whole) as tile:
        line = e.add(x, e.mul(tile, stride))
        for row in range(16):
            add(line, row % TURNS, row * 2 * BLOCK)
    with e.loop(e.mul(whole, 16), n_tokens) as token:
        row = e.b.urem(token, e.i64(16))
        add(e.add(x, e.mul(whole, stride), e.mul(row, 2 * BLOCK)), 0, 0)
    for i in steps:
        total = sums[0, i].get()
        for turn in range(1, TURNS):
            total = e.b.fadd(total, sums[turn, i].get())
        e.store(total, out, 4 * i)
