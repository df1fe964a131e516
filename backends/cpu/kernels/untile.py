"""bf16 tiles -> float32 rows, for who wants to see what a product reads."""

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
    "out",  # float32 (n_tokens, n_cols)
)


def build(isa: Isa) -> Callable[[int, int, int], None]:
    """A kernel that spreads out all tokens, shared out over the threads by tokens."""
    spread = emitted(isa, 3, _spread)

    def untile(thread, n_threads, a):
        n_cols = word(a, 1)
        n_tokens = word(word(a, 2), 0)
        for token in range(n_tokens * thread // n_threads, n_tokens * (thread + 1) // n_threads):
            line = word(a, 0) + token // 16 * (n_cols // BLOCK) * TILE + token % 16 * (2 * BLOCK)
            spread(line, word(a, 3) + token * n_cols * 4, n_cols // BLOCK)

    return untile


def _spread(e: Emitter, line: Value, out: Value, n_blocks: Value) -> None:
    halves = ir.VectorType(I16, e.lanes)
    with e.loop(0, n_blocks) as k:
        for i in range(0, BLOCK, e.lanes):
            bits = e.b.zext(e.load(halves, e.add(line, e.mul(k, TILE)), 2 * i), e.vi)
            e.store(e.b.shl(bits, e.const(e.vi, 16)), out, e.add(e.mul(k, 4 * BLOCK), 4 * i))
