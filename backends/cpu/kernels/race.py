"""The draw of a token as a race: each kept token has a random time of its own, divided by its share.

The time is drawn from the seed, the place in the text and the token alone, so that a draft that races over some of
the tokens mostly sees the same winner. `edgert/sampler.py` says the same in NumPy.
"""

from __future__ import annotations

from typing import Any

from edgert.backends.cpu.kernels.logits import (
    Logits,
    bits_of,
    double_bits,
    double_of,
    inlined,
    key_of,
    logit_at,
    put,
    rank_at,
)
from edgert.backends.cpu.sampling import BLOCK, PLACE, RACE_DEPTH
from edgert.backends.cpu.simd import double_at, word


@inlined
def _shifted(z, bits):
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # as an unsigned number


@inlined
def _mixed(z):
    z = (z ^ _shifted(z, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ _shifted(z, 27)) * (0x94D049BB133111EB - (1 << 64))
    return z ^ _shifted(z, 31)


@inlined
def _state_of(seed, counter):
    """As `_state` of edgert/sampler.py."""
    return _mixed(_mixed(seed ^ 0x5851F42D4C957F2D) + counter * (0x9E3779B97F4A7C15 - (1 << 64)))


@inlined
def _log_of(u):
    """Natural logarithm of a float64 in (0, 1)."""
    bits = double_bits(u)
    exponent = (bits >> 52) - 1022
    m = double_of((bits & ((1 << 52) - 1)) | (1022 << 52))  # 0.5 to 1
    if m < 0.7071067811865476:
        m *= 2
        exponent -= 1
    s = (m - 1) / (m + 1)
    z, series = s * s, 0.0
    for i in range(10, 0, -1):
        series = (series + 1.0 / (2 * i + 1)) * z
    return exponent * 0.6931471805599453 + 2 * s * (1 + series)


@inlined
def _time_of(state, token):
    """A token's exponentially distributed time; -1: of all tokens far from the best together."""
    z = _mixed(state + (token + 1) * (0xD1342543DE82EF95 - (1 << 64)))
    return -_log_of((_shifted(z, 11) + 0.5) * 2.0**-53)


def race(readers: Logits) -> Any:
    """A Numba function (arguments, logits, n, peak, bar) -> the place of the first to arrive; notes its share."""
    helper, exp, mass_of = readers.helper, readers.exp, readers.mass_of
    SEED, N_HISTORY, TEMPERATURE = PLACE["seed"], PLACE["n_history"], PLACE["temperature"]
    PEAKS, MASSES, IDS, SHARE = PLACE["peaks"], PLACE["masses"], PLACE["ids"], PLACE["share"]

    @helper
    def id_of(a, place):
        return word(word(a, IDS), place) if word(a, IDS) else place

    @helper
    def draw(a, logits, n, peak, bar):
        peaks, masses, n_blocks = word(a, PEAKS), word(a, MASSES), (n + BLOCK - 1) // BLOCK
        temperature = double_at(a, TEMPERATURE)
        scale, state = 1.0 / temperature, _state_of(word(a, SEED), word(a, N_HISTORY))
        near = max(bar, key_of(peak - RACE_DEPTH * temperature) << 32)
        total, rest, last, token, speed, won = 0.0, 0.0, 0, -1, 0.0, 0.0
        for block in range(n_blocks):
            far = 0.0
            if word(peaks, block) >= near >> 32:
                for i in range(block * BLOCK, min(n, block * BLOCK + BLOCK)):
                    rank = rank_at(logits, i)
                    if rank >= bar:
                        share = exp(bits_of((logit_at(logits, i) - peak) * scale))
                        if rank >= near:
                            total += share
                            time = _time_of(state, id_of(a, i))
                            if share > speed * time:
                                speed, token, won = share / time, i, share
                        else:
                            far += share
            elif word(peaks, block) >= bar >> 32:
                far = mass_of(logits, n, block, peak, scale, bar)
            if far > 0:
                last = block
            rest += far
            put(masses, block, double_bits(far))
        if rest > 0 and rest > speed * _time_of(state, -1):
            goal, block = _shifted(state, 11) * 2.0**-53 * rest, 0
            while block < last and goal >= double_at(masses, block):
                goal -= double_at(masses, block)
                block += 1
            for i in range(block * BLOCK, min(n, block * BLOCK + BLOCK)):
                rank = rank_at(logits, i)
                if bar <= rank < near:
                    share = exp(bits_of((logit_at(logits, i) - peak) * scale))
                    if share > 0:
                        token, won = i, share
                        goal -= share
                        if goal < 0:
                            break
        put(a, SHARE, double_bits(won / (total + rest)))
        return token

    return draw
