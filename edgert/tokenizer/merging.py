"""The merge loop that byte-level BPE and SentencePiece's BPE share."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import repeat

from edgert.tokenizer.algorithm import nothing

_PLACE_BITS = 40
_PLACE = (1 << _PLACE_BITS) - 1
STEPS = 1 << 12


def merge(
    symbols: list[bytes],
    rank: Callable[[bytes], int | None],
    joiner: bytes,
    beat: Callable[[], object] = nothing,
) -> list[bytes]:
    """Joins neighbours, the lowest rank first and the leftmost among equals, until no pair has a rank.

    rank:    of `left + joiner + right`; None when the two do not merge
    beat:    called every STEPS steps
    Takes n log n steps for n symbols, and uses up the list that it is given.
    """
    n = len(symbols)
    if n < 2:
        return symbols
    after = list(range(1, n + 1))
    before = list(range(-1, n - 1))
    heap = []
    left = symbols[0]
    for start in range(1, n, STEPS):
        beat()
        for i in range(start, min(start + STEPS, n)):
            right = symbols[i]
            r = rank(left + joiner + right)
            if r is not None:
                heap.append(r << _PLACE_BITS | i - 1)
            left = right
    heapify(heap)
    while heap:
        beat()
        for _ in repeat(None, STEPS):
            if not heap:
                break
            key = heappop(heap)
            i = key & _PLACE
            left = symbols[i]
            j = after[i]
            # An entry is out of date when its left symbol is gone, or has another partner by now.
            if not left or j == n or rank(left + joiner + symbols[j]) != key >> _PLACE_BITS:
                continue
            symbols[i] = joined = left + symbols[j]
            symbols[j] = b""
            k = after[i] = after[j]
            if k < n:
                before[k] = i
                r = rank(joined + joiner + symbols[k])
                if r is not None:
                    heappush(heap, r << _PLACE_BITS | i)
            h = before[i]
            if h >= 0:
                r = rank(symbols[h] + joiner + joined)
                if r is not None:
                    heappush(heap, r << _PLACE_BITS | h)
    return [symbol for symbol in symbols if symbol]
