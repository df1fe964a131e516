"""Norms all of q and all of k, where a family norms the whole row in place of each head."""

from __future__ import annotations

from collections.abc import Callable

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.rows import normer
from edgert.backends.cpu.simd import F32, Emitter, Value, emitted, word

ARGUMENTS = (
    "rows",  # float32 (n_tokens, stride / 4): q, then k
    "stride",  # bytes
    "n_tokens_at",
    "n_q",
    "n_k",
    "q_norm",  # float32 (n_q)
    "q_bias",  # float32 (n_q), of a layer norm
    "k_norm",
    "k_bias",
    "eps",  # float32 bits
)


def build(isa: Isa, norm: str) -> Callable[[int, int, int], None]:
    """Units of work are (token, q or k)."""
    apply = emitted(isa, 5, lambda e, *a: _apply(e, norm, *a))

    def row_norm(thread, n_threads, a):
        n_units = 2 * word(word(a, 2), 0)
        for unit in range(n_units * thread // n_threads, n_units * (thread + 1) // n_threads):
            part = unit % 2
            x = word(a, 0) + unit // 2 * word(a, 1) + part * word(a, 3) * 4
            apply(x, word(a, 3 + part), word(a, 5 + 2 * part), word(a, 6 + 2 * part), a)

    return row_norm


def _apply(e: Emitter, norm: str, x: Value, n_cols: Value, weight: Value, bias: Value, arguments: Value) -> None:
    normed = normer(e, norm, x, n_cols, e.load(F32, arguments, 8 * ARGUMENTS.index("eps")))
    with e.loop(0, n_cols, e.lanes) as k:
        at = e.mul(k, 4)
        e.store(normed(e.load(e.vf, x, at), weight, bias, at), x, at)
