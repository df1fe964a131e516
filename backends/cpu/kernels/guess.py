"""A draft model's guess between two of its steps: chosen, weighed, and laid out as the input of the next step.

So a draft guesses several tokens in one walk of a tape, which ends where the guessing does.
"""

from __future__ import annotations

from collections.abc import Callable

from edgert.backends.cpu.guessing import PLACE
from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.logits import double_bits
from edgert.backends.cpu.kernels.sample import chooser
from edgert.backends.cpu.kernels.walk import ENDED, GENERATION
from edgert.backends.cpu.sampling import PLACE as SAMPLING
from edgert.backends.cpu.simd import double_at, put_u32, put_word, word


def build(isa: Isa) -> Callable[[int, int, int], None]:
    """The kernel; one thread does all."""
    choose = chooser(isa, "guess")
    CHAIN, TEAM, COUNT, STEPS, MOST = (PLACE[x] for x in ("chain", "team", "count", "steps", "most"))
    LIKELY, FLOORS, P_MIN, N_SURE, SURE = (PLACE[x] for x in ("likely", "floors", "p_min", "n_sure", "sure"))
    ODDS, SHARES, N_ENDS, ENDS = (PLACE[x] for x in ("odds", "shares", "n_ends", "ends"))
    TOKENS, POSITIONS, HEADER, N_HEADER = (PLACE[x] for x in ("tokens", "positions", "header", "n_header"))
    WANTED, ONE, POSITION = (PLACE[x] for x in ("wanted", "one", "position"))
    IDS, SHARE, HISTORY, N_HISTORY = (SAMPLING[x] for x in ("ids", "share", "history", "n_history"))

    def guess(thread, n_threads, a):
        if thread != 0:
            return
        chain = word(a, CHAIN)
        place = choose(chain)
        put_word(a + 8 * STEPS, word(a, STEPS) + 1)
        share = double_at(chain, SHARE)
        going_on = place >= 0 and share >= double_at(a, P_MIN)
        if going_on:
            token = word(word(chain, IDS), place) if word(chain, IDS) else place
            count, n_history = word(a, COUNT), word(chain, N_HISTORY)
            put_u32(word(chain, HISTORY) + 4 * n_history, token)
            put_word(chain + 8 * N_HISTORY, n_history + 1)
            put_word(word(a, SHARES) + 8 * count, double_bits(share))
            kind = 0
            while kind < word(a, N_SURE) and share >= double_at(word(a, SURE), kind):
                kind += 1
            likely = double_at(a, LIKELY) * double_at(word(a, ODDS), kind)
            put_word(a + 8 * LIKELY, double_bits(likely))
            count += 1
            put_word(a + 8 * COUNT, count)
            going_on = count < word(a, MOST) and likely >= double_at(word(a, FLOORS), count)
            for i in range(word(a, N_ENDS)):
                going_on = going_on and token != word(word(a, ENDS), i)
            if going_on:
                position = word(a, POSITION) + 1
                put_word(a + 8 * POSITION, position)
                put_word(word(a, TOKENS), token)
                put_word(word(a, POSITIONS), position)
                put_word(word(a, WANTED), 0)
                for i in range(word(a, N_HEADER)):
                    put_word(word(a, HEADER) + 8 * i, word(word(a, ONE), i))
        if not going_on:
            put_word(word(a, TEAM) + 8 * ENDED, word(word(a, TEAM), GENERATION))

    return guess
