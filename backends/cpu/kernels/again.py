"""The end of a round of guessing and checking: what became of it is noted, and the next one laid out.

So several rounds are one walk. Between two walks Python's code and data come from memory, since the weights have
displaced them from the processor's caches: it takes longer for one round than for what three more add to it.
"""

from __future__ import annotations

from collections.abc import Callable

import numba

from edgert.backends.cpu.guessing import DONE, LOG, N_CHECKED, N_CHOSEN, N_MADE, PLACE
from edgert.backends.cpu.guessing import TURNED as LOG_TURNED
from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.logits import double_bits
from edgert.backends.cpu.kernels.walk import ENDED, GENERATION, N_NEXT, NEXT, ticks
from edgert.backends.cpu.sampling import PLACE as SAMPLING
from edgert.backends.cpu.simd import int32_at, put_u32, put_word, word
from edgert.backends.cpu.step import N_NARROW, N_TOKENS


def build(isa: Isa) -> Callable[[int, int, int], None]:
    """The kernel; one thread does all."""
    now = ticks(isa)
    CHAIN, TEAM, COUNT, STEPS, MOST = (PLACE[x] for x in ("chain", "team", "count", "steps", "most"))
    FURTHER, EASE, REPEATED = PLACE["further"], PLACE["ease"], PLACE["repeated"]
    LIKELY, SHARES, N_ENDS, ENDS = (PLACE[x] for x in ("likely", "shares", "n_ends", "ends"))
    TOKENS, POSITIONS, SLOTS, WANTED = (PLACE[x] for x in ("tokens", "positions", "slots", "wanted"))
    HEADER, ONE, N_HEADER, POSITION = (PLACE[x] for x in ("header", "one", "n_header", "position"))
    ROUNDS, MOST_ROUNDS, LIMIT, INTERRUPTED = (PLACE[x] for x in ("rounds", "most_rounds", "limit", "interrupted"))
    LOGS, LOG_STRIDE, CHECKED, TARGET_CHAIN = (PLACE[x] for x in ("log", "log_stride", "checked", "target_chain"))
    FIRST_STEPS, HISTORY, N_HISTORY = PLACE["first_steps"], SAMPLING["history"], SAMPLING["n_history"]
    TURNED, CHOSEN, CHOSEN_TOKENS = PLACE["turned"], SAMPLING["chosen"], SAMPLING["tokens"]

    @numba.njit(error_model="numpy", inline="always")
    def repeats(history, end, n):
        """Whether the last n tokens stand somewhere before."""
        for i in range(end - 2, n - 2, -1):
            j = 0
            while j < n and int32_at(history, i - j) == int32_at(history, end - 1 - j):
                j += 1
            if j == n:
                return True
        return False

    def again(thread, n_threads, a):
        if thread != 0:
            return
        team, chain, target = word(a, TEAM), word(a, CHAIN), word(a, TARGET_CHAIN)
        n_chosen, tokens = word(target, CHOSEN), word(target, CHOSEN_TOKENS)
        known = word(chain, N_HISTORY) - word(a, COUNT)  # before the round
        log = word(a, LOGS) + word(a, LOG_STRIDE) * word(a, ROUNDS)
        put_word(log + 8 * N_MADE, word(a, COUNT))
        put_word(log + 8 * N_CHECKED, word(a, CHECKED))
        put_word(log + 8 * N_CHOSEN, n_chosen)
        put_word(log + 8 * LOG_TURNED, word(a, TURNED))
        put_word(log + 8 * DONE, now())
        put_word(a + 8 * ROUNDS, word(a, ROUNDS) + 1)
        going_on = word(a, ROUNDS) < word(a, MOST_ROUNDS) and not word(word(a, INTERRUPTED), 0)
        most = min(word(a, MOST), word(a, LIMIT) - known - n_chosen)
        going_on = going_on and most > 0
        for i in range(n_chosen):
            token = word(tokens, i)
            put_word(log + 8 * (LOG + i), token)
            going_on = going_on and token >= 0
            for j in range(word(a, N_ENDS)):
                going_on = going_on and token != word(word(a, ENDS), j)
        put_word(team + 8 * ENDED, 0)
        if not going_on:
            return
        history = word(chain, HISTORY)
        for i in range(n_chosen):
            put_u32(history + 4 * (known + i), word(tokens, i))
        if word(a, REPEATED) and repeats(history, known + n_chosen, word(a, REPEATED)):
            return
        read = known - 1 + word(a, STEPS)  # tokens that the draft has read, of which some may be wrong guesses
        shift = word(a, POSITION) + 1 - read  # from a token's place in the text to that in the draft's cache
        right, end = min(read, known + n_chosen - 1), known + n_chosen
        for i in range(end - right):
            put_word(word(a, TOKENS) + 8 * i, int32_at(history, right + i))
            put_word(word(a, POSITIONS) + 8 * i, right + i + shift)
            put_word(word(a, SLOTS) + 8 * i, word(word(a, SLOTS), 0))
        put_word(word(a, WANTED), end - right - 1)
        for i in range(word(a, N_HEADER)):
            put_word(word(a, HEADER) + 8 * i, word(word(a, ONE), i))
        put_word(word(a, HEADER) + 8 * N_TOKENS, end - right)
        put_word(word(a, HEADER) + 8 * N_NARROW, end - right)
        put_word(a + 8 * POSITION, end - 1 + shift)
        put_word(chain + 8 * N_HISTORY, end)
        put_word(a + 8 * SHARES, word(a, SHARES) + 8 * word(a, COUNT))
        put_word(a + 8 * MOST, most)
        put_word(a + 8 * COUNT, 0)
        put_word(a + 8 * STEPS, 0)
        put_word(a + 8 * LIKELY, double_bits(1.0))
        put_word(a + 8 * EASE, double_bits(1.0))
        put_word(a + 8 * FURTHER, 0)
        first = word(a, FIRST_STEPS) + 16 * (end - right - 1)
        put_word(team + 8 * NEXT, word(first, 0))
        put_word(team + 8 * N_NEXT, word(first, 1))
        put_word(team + 8 * ENDED, word(team, GENERATION))

    again.__qualname__ = f"{isa.name}.{again.__qualname__}"
    return again
