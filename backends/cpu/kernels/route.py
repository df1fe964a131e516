"""Which experts a token goes to, and how much each of them counts: from the router's logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.simd import (
    F32,
    I32,
    Emitter,
    Value,
    bits_of_real,
    emitted,
    put_real,
    put_word,
    real_of_bits,
    u32_at,
    word,
)

ARGUMENTS = (
    "logits",  # float32 rows (n_expert) of the router's product; left changed
    "stride",  # bytes
    "n_rows_at",
    "preference",  # float32 (n_expert) that counts for the choice alone, or 0
    "n_expert",
    "n_used",
    "scale",  # float32 bits
    "ids",  # int64 (n_rows, n_used): the chosen experts, best first
    "shares",  # float32 (n_rows, n_used)
    "keys",  # float32 (n_threads, n_expert): what the choice is made by
    "shared",  # float32 (n_rows): the share of the expert that sees every token, or 0
    "gate",  # bytes from a row of logits to the logit of that share; 0: the share is 1
)
LEAST_SUM = 6.103515625e-5  # of shares that are divided by their sum, as llama.cpp has it


def build(isa: Isa, gating: str, norm: str) -> Callable[[int, int, int], None]:
    """A kernel over rows.

    gating:  "softmax" or "sigmoid" of all logits; "chosen": softmax of those of the chosen experts
    norm:    "1": the chosen experts' shares are divided by their sum
    """
    softmax, sigmoid, late, normed = gating == "softmax", gating == "sigmoid", gating == "chosen", norm == "1"
    exp = emitted(isa, 1, _exp, types.float32)
    one, least = np.float32(1), np.float32(LEAST_SUM)
    lowest = np.float32(-np.inf)

    def route(thread, n_threads, a):
        n_rows = word(word(a, 2), 0)
        n_expert, n_used = word(a, 4), word(a, 5)
        scale = real_of_bits(word(a, 6))
        keys = word(a, 9) + thread * n_expert * 4
        for row in range(n_rows * thread // n_threads, n_rows * (thread + 1) // n_threads):
            scores = word(a, 0) + row * word(a, 1)
            if word(a, 10):
                share = one
                if word(a, 11):
                    share = one / (one + exp(bits_of_real(-real_of_bits(u32_at(scores + word(a, 11))))))
                put_real(word(a, 10), row, share)
            most = lowest
            for i in range(n_expert):
                score = real_of_bits(u32_at(scores + 4 * i))
                most = max(most, score)
            if softmax:
                total = np.float32(0)
                for i in range(n_expert):
                    part = exp(bits_of_real(real_of_bits(u32_at(scores + 4 * i)) - most))
                    put_real(scores, i, part)
                    total += part
                for i in range(n_expert):
                    put_real(scores, i, real_of_bits(u32_at(scores + 4 * i)) / total)
            if sigmoid:
                for i in range(n_expert):
                    put_real(scores, i, one / (one + exp(bits_of_real(-real_of_bits(u32_at(scores + 4 * i))))))
            for i in range(n_expert):
                key = real_of_bits(u32_at(scores + 4 * i))
                if word(a, 3):
                    key += real_of_bits(u32_at(word(a, 3) + 4 * i))
                put_real(keys, i, key)
            ids, shares = word(a, 7) + row * n_used * 8, word(a, 8) + row * n_used * 4
            total = np.float32(0)
            for j in range(n_used):
                best, high = j, lowest  # j: some expert, where no number compares
                for i in range(n_expert):
                    key = real_of_bits(u32_at(keys + 4 * i))
                    if key > high:
                        best, high = i, key
                put_real(keys, best, lowest)
                share = real_of_bits(u32_at(scores + 4 * best))
                if late:
                    share = exp(bits_of_real(share - most))
                put_word(ids + 8 * j, best)
                put_real(shares, j, share)
                total += share
            factor = scale
            if normed or late:
                factor = scale / max(total, least)
            for j in range(n_used):
                put_real(shares, j, real_of_bits(u32_at(shares + 4 * j)) * factor)

    return route


def _exp(e: Emitter, bits: Value) -> Value:
    """exp of the float32 with these bits."""
    value = e.b.bitcast(e.b.trunc(bits, I32), F32)
    return e.b.extract_element(e.exp(e.splat(value)), ir.Constant(I32, 0))
