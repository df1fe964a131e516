"""What a draft's guess is taken for: chosen, weighed, and written behind the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from edgert.backends.cpu.guessing import PLACE
from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.logits import double_bits
from edgert.backends.cpu.kernels.sample import chooser
from edgert.backends.cpu.sampling import PLACE as SAMPLING
from edgert.backends.cpu.simd import double_at, put_u32, put_word, word


def taker(isa: Isa, owner: str) -> tuple[Any, Any]:
    """Numba functions over the address of a sequence's arguments (`guessing.ARGUMENTS`).

    odds_of(a, share):  how often guesses of such a probability are right
    take(a):            a guess more; the token after which guessing goes on, or -1 where it ends

    owner:  the kernel that they are for
    """
    choose = chooser(isa, owner)
    CHAIN, COUNT, STEPS, MOST, EASE = (PLACE[x] for x in ("chain", "count", "steps", "most", "ease"))
    LIKELY, FLOORS, P_MIN, N_SURE, SURE = (PLACE[x] for x in ("likely", "floors", "p_min", "n_sure", "sure"))
    ODDS, SHARES, N_ENDS, ENDS = (PLACE[x] for x in ("odds", "shares", "n_ends", "ends"))
    IDS, SHARE, HISTORY, N_HISTORY = (SAMPLING[x] for x in ("ids", "share", "history", "n_history"))

    def helper(function: Callable[..., Any]) -> Any:
        function.__qualname__ = f"{isa.name}.{owner}.{function.__qualname__}"  # a symbol of its own
        return numba.njit(error_model="numpy", forceinline=True)(function)

    @helper
    def odds_of(a, share):
        kind = 0
        while kind < word(a, N_SURE) and share >= double_at(word(a, SURE), kind):
            kind += 1
        return double_at(word(a, ODDS), kind)

    @helper
    def take(a):
        chain = word(a, CHAIN)
        place = choose(chain)
        put_word(a + 8 * STEPS, word(a, STEPS) + 1)
        share = double_at(chain, SHARE)
        if place < 0 or share < double_at(a, P_MIN):
            return -1
        token = word(word(chain, IDS), place) if word(chain, IDS) else place
        count, n_history = word(a, COUNT), word(chain, N_HISTORY)
        put_u32(word(chain, HISTORY) + 4 * n_history, token)
        put_word(chain + 8 * N_HISTORY, n_history + 1)
        put_word(word(a, SHARES) + 8 * count, double_bits(share))
        likely = double_at(a, LIKELY) * odds_of(a, share)
        put_word(a + 8 * LIKELY, double_bits(likely))
        count += 1
        put_word(a + 8 * COUNT, count)
        going_on = count < word(a, MOST) and likely >= double_at(word(a, FLOORS), count) * double_at(a, EASE)
        for i in range(word(a, N_ENDS)):
            going_on = going_on and token != word(word(a, ENDS), i)
        return token if going_on else -1

    return odds_of, take
