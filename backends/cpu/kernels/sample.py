"""Chooses a token: penalties, top-k, top-p, min-p, temperature and the draw, in a few passes over the logits.

`logits.py` says how they are read, `bars.py` which tokens are kept, `race.py` which of these is drawn.
`edgert/sampler.py` says the same in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.bars import bars
from edgert.backends.cpu.kernels.logits import (
    ID_MASK,
    KEY_OF_MINUS_INFINITY,
    LOWEST,
    double_bits,
    key_at,
    key_of,
    logit_at,
    put,
    reader,
    value_of,
)
from edgert.backends.cpu.kernels.race import race
from edgert.backends.cpu.sampling import ALL_FORBIDDEN, BLOCK, NOT_FINITE, PLACE
from edgert.backends.cpu.simd import double_at, int32_at, put_real, put_u32, word


def build(isa: Isa) -> Callable[[int, int, int], None]:
    """The kernel; one thread does all."""
    call = chooser(isa, "sample")
    LOGITS, HISTORY, N_HISTORY = PLACE["logits"], PLACE["history"], PLACE["n_history"]
    N_ROWS, STRIDE, CHOSEN, TOKENS = PLACE["n_rows"], PLACE["stride"], PLACE["chosen"], PLACE["tokens"]

    def sample(thread, n_threads, a):
        if thread != 0:
            return
        for row in range(word(a, N_ROWS)):
            token = call(a)
            put(word(a, TOKENS), row, token)
            put(a, CHOSEN, row + 1)
            n_history = word(a, N_HISTORY)
            if row + 1 == word(a, N_ROWS) or token != int32_at(word(a, HISTORY), n_history):
                return
            put(a, N_HISTORY, n_history + 1)
            put(a, LOGITS, word(a, LOGITS) + word(a, STRIDE))

    sample.__qualname__ = f"{isa.name}.{sample.__qualname__}"
    return sample


def chooser(isa: Isa, owner: str) -> Any:
    """A Numba function (address of the arguments) that chooses a token.

    owner:  the kernel that it is for
    """
    readers = reader(isa, owner)
    named, helper = readers.named, readers.helper
    scan, peak_of, mass_of = readers.scan, readers.peak_of, readers.mass_of
    bar_of, draw = bars(readers), race(readers)
    LOGITS, N, PLACES, PEAKS, UNDO = (PLACE[x] for x in ("logits", "n", "places", "peaks", "undo"))
    HISTORY, N_HISTORY, N_LAST, COUNTS = (PLACE[x] for x in ("history", "n_history", "n_last", "counts"))
    BIAS_IDS, BIAS, N_BIAS = PLACE["bias_ids"], PLACE["bias"], PLACE["n_bias"]
    REPEAT, PRESENCE, FREQUENCY = (PLACE[f"{x}_penalty"] for x in ("repeat", "presence", "frequency"))
    TEMPERATURE, TOP_K, LOG_MIN_P = PLACE["temperature"], PLACE["top_k"], PLACE["log_min_p"]
    WANT_SHARE, SHARE = PLACE["want_share"], PLACE["share"]

    @helper
    def place_of(a, token):
        return int32_at(word(a, PLACES), token) if word(a, PLACES) else token

    @helper
    def change(logits, token, value, undo, n_undo):
        """Gives a logit another value and notes the former one; returns how many are noted."""
        put(undo, 2 * n_undo, token)
        put(undo, 2 * n_undo + 1, int32_at(logits, token))
        put_real(logits, token, np.float32(value))
        return n_undo + 1

    @helper
    def bend(a, logits):
        """Bias and penalties; returns how many (id, former value) pairs lie in undo."""
        undo, n_undo = word(a, UNDO), 0
        for j in range(word(a, N_BIAS)):
            token = word(word(a, BIAS_IDS), j)
            n_undo = change(logits, token, logit_at(logits, token) + double_at(word(a, BIAS), j), undo, n_undo)
        history, n_history, counts = word(a, HISTORY), word(a, N_HISTORY), word(a, COUNTS)
        n_last = word(a, N_LAST)
        begin = max(0, n_history - n_last) if n_last >= 0 else 0
        for j in range(begin, n_history):
            token = place_of(a, int32_at(history, j))
            if token >= 0:
                put(counts, token, word(counts, token) + 1)
        for j in range(begin, n_history):
            token = place_of(a, int32_at(history, j))
            count = word(counts, token) if token >= 0 else 0
            if count:
                put(counts, token, 0)
                value, repeat = logit_at(logits, token), double_at(a, REPEAT)
                value = value / repeat if value > 0 else value * repeat
                value = value - count * double_at(a, FREQUENCY) - double_at(a, PRESENCE)
                n_undo = change(logits, token, value, undo, n_undo)
        return n_undo

    @helper
    def share_of_best(a, logits, n, peak):
        """The best token's probability at temperature 1; what is far below it counts as nothing."""
        peaks, total, floor = word(a, PEAKS), 0.0, key_of(peak - 16.0)
        for block in range((n + BLOCK - 1) // BLOCK):
            if word(peaks, block) >= floor:
                total += mass_of(logits, n, block, peak, 1.0, LOWEST)
        put(a, SHARE, double_bits(1.0 / total))

    @helper
    def choose(a, logits, n):
        peaks, n_blocks = word(a, PEAKS), (n + BLOCK - 1) // BLOCK
        best = LOWEST
        for block in range(n_blocks):
            best = max(best, (word(peaks, block) << 32) | (ID_MASK - block))
        key, block = best >> 32, ID_MASK - (best & ID_MASK)
        if key == KEY_OF_MINUS_INFINITY:
            return ALL_FORBIDDEN
        if double_at(a, TEMPERATURE) == 0 or word(a, TOP_K) == 1:
            token = block * BLOCK
            while key_at(logits, token) != key:
                token += 1
            if word(a, WANT_SHARE):
                share_of_best(a, logits, n, value_of(key))
            return token
        peak = value_of(key)
        return draw(a, logits, n, peak, bar_of(a, logits, n, peak, key_of(peak + double_at(a, LOG_MIN_P))))

    @named
    def result_of(a):
        logits, n, peaks = word(a, LOGITS), word(a, N), word(a, PEAKS)
        n_blocks = n // BLOCK
        magnitude = scan(logits, n_blocks, peaks)
        for i in range(n_blocks * BLOCK, n):
            magnitude = max(magnitude, int32_at(logits, i) & 0x7FFFFFFF)
        if magnitude >= 0x7F800000:
            return NOT_FINITE
        if n_blocks * BLOCK < n:
            put(peaks, n_blocks, peak_of(logits, n, n_blocks))
        n_undo, undo = bend(a, logits), word(a, UNDO)
        for j in range(n_undo):
            block = word(undo, 2 * j) // BLOCK
            put(peaks, block, peak_of(logits, n, block))
        token = choose(a, logits, n)
        for j in range(n_undo - 1, -1, -1):
            put_u32(logits + 4 * word(undo, 2 * j), word(undo, 2 * j + 1))
        return token

    @intrinsic
    def call(_context: Any, a: Any) -> Any:
        """Calls result_of as C would: Numba's own call brings code for exceptions, and with it CPython's symbols."""
        signature = types.int64(types.int64)

        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            compiled = context.compile_subroutine(builder, result_of, signature)
            _, value = context.call_internal_no_propagate(builder, compiled.fndesc, signature, values)
            return value

        return signature, generate

    return call
