"""A draft model's guess between two of its steps: chosen, weighed, and laid out as the input of the next step.

So a draft guesses several tokens in one walk of a tape, which ends where the guessing does, or goes on with the step
of the target that checks the guesses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from edgert.backends.cpu.guessing import PLACE
from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.taking import taker
from edgert.backends.cpu.kernels.walk import ENDED, GENERATION, N_NEXT, NEXT, ticks
from edgert.backends.cpu.sampling import PLACE as SAMPLING
from edgert.backends.cpu.simd import double_at, int32_at, put_word, word
from edgert.backends.cpu.step import N_NARROW, N_TOKENS, N_WANTED, N_WANTED_TILED, N_WIDE


def build(isa: Isa) -> Callable[[int, int, int], None]:
    """The kernel; one thread does all."""
    (odds_of, take), now = taker(isa, "guess"), ticks(isa)
    CHAIN, TEAM, COUNT, SHARES = (PLACE[x] for x in ("chain", "team", "count", "shares"))
    TOKENS, POSITIONS, HEADER, N_HEADER = (PLACE[x] for x in ("tokens", "positions", "header", "n_header"))
    WANTED, ONE, POSITION = (PLACE[x] for x in ("wanted", "one", "position"))
    HISTORY, N_HISTORY, LOGITS, N_ROWS = (SAMPLING[x] for x in ("history", "n_history", "logits", "n_rows"))
    TAPES, EXTRA, UNKNOWN, CHECKED = (PLACE[x] for x in ("tapes", "extra", "unknown", "checked"))
    FURTHER, EASE, TURNED = PLACE["further"], PLACE["ease"], PLACE["turned"]
    TARGET_CHAIN, TARGET_LOGITS, SEQUENCE = PLACE["target_chain"], PLACE["target_logits"], PLACE["sequence"]
    TO_TOKENS, TO_POSITIONS, TO_SLOTS, TO_WANTED, TO_HEADER = (
        PLACE[f"target_{x}"] for x in ("tokens", "positions", "slots", "wanted", "header")
    )

    def helper(function: Callable[..., Any]) -> Any:
        function.__qualname__ = f"{isa.name}.{function.__qualname__}"  # a symbol of its own
        return numba.njit(error_model="numpy", forceinline=True)(function)

    @helper
    def best_length(a, count):
        """How many of the guesses to check, as `Speculator` has it."""
        found, best, likely, gain, run = 0, 0.0, 1.0, 0.0, 0
        for i in range(1, count + 1):
            likely *= odds_of(a, double_at(word(a, SHARES), i - 1))
            gain += likely
            net = gain - double_at(word(a, EXTRA), i)
            if net > best:
                found, best = i, net
            if likely > 0.5:
                run = i
        if not found and run and word(word(a, UNKNOWN), run):
            found = run
        return found

    @helper
    def lay_out_check(a, n):
        """The target's step that checks n guesses, and the choice of tokens after it."""
        chain, draft_chain = word(a, TARGET_CHAIN), word(a, CHAIN)
        history, known = word(draft_chain, HISTORY), word(draft_chain, N_HISTORY) - word(a, COUNT)
        for i in range(n + 1):
            put_word(word(a, TO_TOKENS) + 8 * i, int32_at(history, known - 1 + i))
            put_word(word(a, TO_POSITIONS) + 8 * i, known - 1 + i)
            put_word(word(a, TO_SLOTS) + 8 * i, word(a, SEQUENCE))
            put_word(word(a, TO_WANTED) + 8 * i, i)
        header = word(a, TO_HEADER)
        put_word(header + 8 * N_TOKENS, n + 1)
        put_word(header + 8 * N_WIDE, 0)
        put_word(header + 8 * N_NARROW, n + 1)
        put_word(header + 8 * N_WANTED, n + 1)
        put_word(header + 8 * N_WANTED_TILED, 0)
        put_word(chain + 8 * LOGITS, word(a, TARGET_LOGITS))
        put_word(chain + 8 * N_HISTORY, known)
        put_word(chain + 8 * N_ROWS, n + 1)
        put_word(a + 8 * CHECKED, n)

    def guess(thread, n_threads, a):
        if thread != 0:
            return
        token = take(a)
        if token >= 0:
            position = word(a, POSITION) + 1
            put_word(a + 8 * POSITION, position)
            put_word(word(a, TOKENS), token)
            put_word(word(a, POSITIONS), position)
            put_word(word(a, WANTED), 0)
            for i in range(word(a, N_HEADER)):
                put_word(word(a, HEADER) + 8 * i, word(word(a, ONE), i))
        team, tapes = word(a, TEAM), word(a, TAPES)
        put_word(team + 8 * ENDED, 0)  # as in the round before
        if token < 0:
            put_word(team + 8 * NEXT, 0)
            put_word(team + 8 * N_NEXT, 0)
            if tapes:
                n = best_length(a, word(a, COUNT))
                if n or double_at(a, EASE) == 0.0:
                    n = min(n + word(a, FURTHER), word(a, COUNT))
                lay_out_check(a, n)
                put_word(team + 8 * NEXT, word(tapes, 2 * n))
                put_word(team + 8 * N_NEXT, word(tapes, 2 * n + 1))
            put_word(team + 8 * ENDED, word(team, GENERATION))
            put_word(a + 8 * TURNED, now())

    return guess
