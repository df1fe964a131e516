"""A draft model's guesses for several sequences between two of its steps: each has a row of the step's logits, and of
the next step where it goes on. The walk ends where none does."""

from __future__ import annotations

from collections.abc import Callable

from edgert.backends.cpu.guessing import PLACE as ONE
from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.taking import taker
from edgert.backends.cpu.kernels.walk import ENDED, GENERATION, N_NEXT, NEXT
from edgert.backends.cpu.sampling import PLACE as SAMPLING
from edgert.backends.cpu.simd import put_word, word
from edgert.backends.cpu.step import N_NARROW, N_TOKENS, N_WANTED, N_WANTED_TILED, N_WIDE
from edgert.backends.cpu.together import PLACE


def build(isa: Isa) -> Callable[[int, int, int], None]:
    """The kernel; one thread does all."""
    _, take = taker(isa, "guess_together")
    TEAM, N, GUESSES, STEPS = (PLACE[x] for x in ("team", "n", "guesses", "steps"))
    TOKENS, POSITIONS, SLOTS, WANTED, HEADER = (PLACE[x] for x in ("tokens", "positions", "slots", "wanted", "header"))
    FROM, STRIDE, LOGITS = PLACE["logits"], PLACE["stride"], SAMPLING["logits"]
    CHAIN, POSITION, SEQUENCE = ONE["chain"], ONE["position"], ONE["sequence"]

    def guess_together(thread, n_threads, a):
        if thread != 0:
            return
        logits, rows = word(a, FROM), 0
        for i in range(word(a, N)):
            one = word(word(a, GUESSES), i)
            if one == 0:  # it has ended
                continue
            put_word(word(one, CHAIN) + 8 * LOGITS, logits)
            logits += word(a, STRIDE)
            token = take(one)
            if token < 0:
                put_word(word(a, GUESSES) + 8 * i, 0)
                continue
            position = word(one, POSITION) + 1
            put_word(one + 8 * POSITION, position)
            put_word(word(a, TOKENS) + 8 * rows, token)
            put_word(word(a, POSITIONS) + 8 * rows, position)
            put_word(word(a, SLOTS) + 8 * rows, word(one, SEQUENCE))
            put_word(word(a, WANTED) + 8 * rows, rows)
            rows += 1
        header, team = word(a, HEADER), word(a, TEAM)
        put_word(header + 8 * N_TOKENS, rows)
        put_word(header + 8 * N_WIDE, 0)
        put_word(header + 8 * N_NARROW, rows)
        put_word(header + 8 * N_WANTED, rows)
        put_word(header + 8 * N_WANTED_TILED, 0)
        put_word(team + 8 * NEXT, word(word(a, STEPS), 2 * rows))
        put_word(team + 8 * N_NEXT, word(word(a, STEPS), 2 * rows + 1))
        put_word(team + 8 * ENDED, word(team, GENERATION))

    return guess_together
