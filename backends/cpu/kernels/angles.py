"""The cosines and sines of a step's positions, once for all layers that rotate alike."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.simd import double_at, put_real, real_of_bits, word

ARGUMENTS = (
    "positions",  # int64 (n_tokens)
    "n_tokens_at",
    "frequencies",  # float64 (half), radians per position
    "half",
    "out",  # float32 (n_tokens, 2, half)
    "magnitude",  # float32 bits: what all are multiplied by
)


def build(isa: Isa) -> Callable[[int, int, int], None]:
    """In float64, so that far positions keep their phase."""

    def angles(thread, n_threads, a):
        n_tokens, half = word(word(a, 1), 0), word(a, 3)
        n_units = n_tokens * half
        magnitude = real_of_bits(word(a, 5))
        for unit in range(n_units * thread // n_threads, n_units * (thread + 1) // n_threads):
            token = unit // half
            i = unit - token * half
            angle = word(word(a, 0), token) * double_at(word(a, 2), i)
            out = word(a, 4) + token * half * 8
            put_real(out, i, np.float32(math.cos(angle)) * magnitude)
            put_real(out, half + i, np.float32(math.sin(angle)) * magnitude)

    return angles
