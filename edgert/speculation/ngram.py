"""Guesses from what was already said: a hashed memory of n-grams."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ORDERS = (5, 3, 2)  # tokens that must agree, the longest first
LONGEST = 32  # tokens back to which an agreement is followed
FEW = 16  # tokens that are taken in one by one
_FACTOR = 0x9E3779B1


class NgramMemory:
    """A text, and where in it each run of a few tokens was last seen.

    The tables keep one place for a hash; a stale or foreign one is found out by comparing the tokens.

    capacity:  most tokens of the text
    """

    def __init__(self, capacity: int) -> None:
        self.tokens = np.zeros(capacity, np.int32)
        self.n = 0
        bits = max(10, min(17, (2 * capacity - 1).bit_length()))
        self._shift = 32 - bits
        self._tables = [np.zeros(1 << bits, np.int32) for _ in ORDERS]
        # A few numbers at a time are read and written through memoryviews: between two steps all that is touched,
        # NumPy's code as well, comes from memory.
        self._views: list[memoryview[int]] = [table.data for table in self._tables]
        self._view: memoryview[int] = self.tokens.data

    def sync(self, tokens: NDArray[np.int32], n: int, *, grown: bool = False) -> None:
        """Makes the text equal to the first n tokens; what it begins with in common is kept.

        grown:  the tokens are those of the call before and more
        """
        known = min(self.n, n)
        if not grown and not np.array_equal(tokens[:known], self.tokens[:known]):
            known = int((tokens[:known] != self.tokens[:known]).argmax())
        if n - known < FEW:
            view = tokens.data
            for place in range(known, n):
                self._view[place] = view[place]
        else:
            self.tokens[known:n] = tokens[known:n]
        self.n = n
        self._index(known, n)

    def append(self, tokens: NDArray[np.int32]) -> None:
        """Adds a text of its own; where the room ends, the oldest is written over."""
        tokens = tokens[-len(self.tokens) :]
        start = self.n if self.n + len(tokens) <= len(self.tokens) else 0
        self.n = start + len(tokens)
        self.tokens[start : self.n] = tokens
        self._index(start, self.n)

    def _index(self, start: int, end: int) -> None:
        """Notes the runs before each place from start to end."""
        if end - start < FEW:
            for place in range(max(start, ORDERS[-1]), end):
                for slot, view in zip(self._slots(self._view, place), self._views, strict=True):
                    if slot >= 0:
                        view[slot] = place
            return
        for order, table in zip(ORDERS, self._tables, strict=True):
            first = max(start, order)
            keys = np.zeros(max(end - first, 0), np.uint32)
            for i in range(order):
                part = self.tokens[first - order + i : end - order + i].astype(np.uint32)
                keys = keys * np.uint32(_FACTOR) + part + np.uint32(1)
            table[keys >> np.uint32(self._shift)] = np.arange(first, end, dtype=np.int32)

    def _slots(self, tokens: memoryview[int], n: int) -> list[int]:
        """Where each table keeps the run before place n; -1: there is no such run."""
        key, power, found = 0, 1, [-1] * len(ORDERS)
        for length in range(1, min(ORDERS[0], n) + 1):
            key += (tokens[n - length] + 1) * power
            power *= _FACTOR
            if length in ORDERS:
                found[ORDERS.index(length)] = (key & 0xFFFFFFFF) >> self._shift
        return found

    def find(self, context: NDArray[np.int32], n: int, limit: int) -> tuple[list[int], int]:
        """What followed when the end of `context[:n]` was seen last, and how many tokens agreed; [] and 0: never.

        When the context is as long as this text, it is this text: a guess that reaches its end repeats itself.
        """
        mine, other = self._view, context.data
        for order, slot, table in zip(ORDERS, self._slots(other, n), self._views, strict=True):
            place = table[slot] if slot >= 0 else 0
            if not order <= place < self.n:
                continue
            agreed, length = 0, min(LONGEST, place, n)
            while agreed < length and mine[place - 1 - agreed] == other[n - 1 - agreed]:
                agreed += 1
            if agreed < order:
                continue
            guess = mine[place : min(place + limit, self.n)].tolist()
            while len(guess) < limit and self.n == n:
                guess += guess[: limit - len(guess)]
            return guess, agreed
        return [], 0
