"""Which tokens top-k, top-p and min-p keep: each rule is a bar, the lowest rank that it keeps.

Nothing is sorted: a bar is found by quickselect among the few logits that can matter.
"""

from __future__ import annotations

from typing import Any

from edgert.backends.cpu.kernels.logits import (
    ID_MASK,
    KEY_OF_MINUS_INFINITY,
    LOWEST,
    Logits,
    bits_of,
    key_at,
    key_of,
    put,
    value_of,
)
from edgert.backends.cpu.sampling import BLOCK, PLACE
from edgert.backends.cpu.simd import double_at, word


def bars(readers: Logits) -> Any:
    """A Numba function (arguments, logits, n, peak, floor) -> the highest bar; floor is the key that min-p asks for."""
    helper, exp, mass_of = readers.helper, readers.exp, readers.mass_of
    PEAKS, RANKS, TOP_K, TOP_P, LOG_REST = (PLACE[x] for x in ("peaks", "ranks", "top_k", "top_p", "log_rest"))

    @helper
    def gather(logits, n, peaks, floor, ranks):
        """Writes the ranks of all logits whose key is at least floor; returns how many."""
        count = 0
        for block in range((n + BLOCK - 1) // BLOCK):
            if word(peaks, block) >= floor:
                for i in range(block * BLOCK, min(n, block * BLOCK + BLOCK)):
                    key = key_at(logits, i)
                    if key >= floor:
                        put(ranks, count, (key << 32) | (ID_MASK - i))
                        count += 1
        return count

    @helper
    def weight(rank, weighted, peak):
        return exp(bits_of(value_of(rank >> 32) - peak)) if weighted else 1.0

    @helper
    def select(ranks, n, goal, weighted, peak):
        """The highest bar above which the weights reach the goal; LOWEST if all together do not."""
        low, high, above = 0, n, 0.0
        while low < high:
            first, middle, last = word(ranks, low), word(ranks, (low + high) // 2), word(ranks, high - 1)
            pivot = max(min(first, middle), min(max(first, middle), last))
            i, j = low, high - 1
            while True:  # ranks differ, so i and j meet at the pivot
                while word(ranks, i) > pivot:
                    i += 1
                while word(ranks, j) < pivot:
                    j -= 1
                if i >= j:
                    break
                left = word(ranks, i)
                put(ranks, i, word(ranks, j))
                put(ranks, j, left)
            mass = above
            for m in range(low, i):
                mass += weight(word(ranks, m), weighted, peak)
            if i > low and mass >= goal:
                high = i
            else:
                above = mass + weight(pivot, weighted, peak)
                if above >= goal:
                    return pivot
                low = i + 1
        return LOWEST

    @helper
    def bar_of_top_k(a, logits, n, peak, floor):
        """Of top-k, and of top-p among what top-k keeps."""
        peaks, ranks, top_k, top_p = word(a, PEAKS), word(a, RANKS), word(a, TOP_K), double_at(a, TOP_P)
        n_blocks = (n + BLOCK - 1) // BLOCK
        least = KEY_OF_MINUS_INFINITY
        if top_k <= n_blocks:  # so many blocks have a logit as high as the top_k-th of their peaks
            for block in range(n_blocks):
                put(ranks, block, (word(peaks, block) << 32) | (ID_MASK - block))
            least = select(ranks, n_blocks, float(top_k), False, peak) >> 32
        count = gather(logits, n, peaks, least, ranks)
        best = select(ranks, count, float(top_k), False, peak)
        bar = max(floor << 32, best)
        if top_p < 1:
            total, kept = 0.0, 0
            for j in range(count):
                rank = word(ranks, j)
                if rank >= best:
                    put(ranks, kept, rank)
                    kept += 1
                    total += weight(rank, True, peak)
            bar = max(bar, select(ranks, kept, top_p * total, True, peak))
        return bar

    @helper
    def bar_of_top_p(a, logits, n, peak, floor):
        """Of top-p alone."""
        peaks, ranks, top_p = word(a, PEAKS), word(a, RANKS), double_at(a, TOP_P)
        total = 0.0
        for block in range((n + BLOCK - 1) // BLOCK):
            total += mass_of(logits, n, block, peak, 1.0, LOWEST)
        depth, half = double_at(a, LOG_REST), total
        while half >= 2:  # what lies deeper has together less than 1 - top_p of the total
            depth -= 0.693147
            half *= 0.5
        count = gather(logits, n, peaks, max(floor, key_of(peak - depth)), ranks)
        return max(floor << 32, select(ranks, count, top_p * total, True, peak))

    @helper
    def bar_of(a, logits, n, peak, floor):
        if 0 < word(a, TOP_K) < n:
            return bar_of_top_k(a, logits, n, peak, floor)
        if double_at(a, TOP_P) < 1:
            return bar_of_top_p(a, logits, n, peak, floor)
        return floor << 32

    return bar_of
